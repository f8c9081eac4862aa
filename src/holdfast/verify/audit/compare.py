"""Comparison of two tables as multisets of rows per bucket, never by position.

Rows are numbered so that equal rows have equal numbers. Equality is exact, except for floating
point: values closer together than the tolerance count as equal. The rest is counting. An ideal row
without a received row is *missing*, a surplus received row that equals an ideal row is
*duplicated*, any other received row is *wrong* (ECOC section 2.5: DS_i, DS_c and DS_f).
All operations work on columns; there is no loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types as at

from holdfast.edge.client import RECEIVED_AT
from holdfast.model.levels import Ints, Levels, Matched, came_too_early, evaluate
from holdfast.storage.hashing import hash_array
from holdfast.storage.rows import canonical, times_us

Floats = npt.NDArray[np.float64]

#: Relative tolerance for doubles; larger than the error of adding in another order.
TOLERANCE = 1e-9
#: The same for columns of 32 bits, which hold about seven digits.
TOLERANCE_FLOAT = 1e-6
EXAMPLES = 5
#: Optional column of the received rows: the bucket they were delivered with.
BUCKET = "__bucket"


@dataclass(frozen=True, slots=True)
class Delay:
    """Quantiles of the delay of rows, in microseconds. Each one is the delay of an actual row."""

    p50_us: int
    p95_us: int
    p99_us: int
    max_us: int


@dataclass(frozen=True, slots=True)
class Comparison:
    ideal_rows: int
    received_rows: int
    #: Received rows that are ideal; duplicates do not count.
    correct: int
    missing: int
    wrong: int
    duplicated: int
    #: The correct rows. Their sequence number is the bucket, which is the unit of order. The ideal
    #: arrival of a row is its own time; that time is also used if no arrival was recorded.
    matched: Matched
    levels: Levels
    #: Up to `EXAMPLES` rows of each kind of fault, with their bucket.
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: Delay of the correct rows: since the end of their bucket, and since their own time.
    after_bucket: Delay | None = None
    after_row: Delay | None = None

    @property
    def timed(self) -> bool:
        """Whether there are correct rows with a recorded arrival."""
        return self.after_row is not None

    @property
    def lossless(self) -> bool:
        return self.levels.lole

    @property
    def loss_factor(self) -> float:
        return self.levels.loss_factor

    @property
    def error_factor(self) -> float:
        return self.levels.error_factor

    @property
    def order_breaks(self) -> tuple[int, ...]:
        """Buckets with a correct row that arrived before a row of an earlier bucket."""
        return order_breaks([self.matched])


def compare(
    ideal: pa.Table,
    received: pa.Table,
    *,
    time: str,
    width_us: int,
) -> Comparison:
    """Compare the received rows with the ideal rows.

    `received` has the columns of `ideal`, and optionally `__received_at` and `__bucket`.
    """
    names = ideal.column_names
    ideal_times, times = times_us(ideal, time), times_us(received, time)
    buckets = (
        received[BUCKET].to_numpy().astype(np.int64)
        if BUCKET in received.column_names
        else times // width_us
    )
    at_us = times_us(received, RECEIVED_AT) if RECEIVED_AT in received.column_names else None
    count = ideal.num_rows
    ids = _number(np.zeros(count + len(times), np.int64), np.r_[ideal_times // width_us, buckets])
    floats: list[_Values] = []
    for name in names:
        for leaf in _leaves(_both(ideal[name], received[name])):
            if at.is_floating(leaf.type):
                floats.append(_Values.of(leaf))
                ids = _number(ids, floats[-1].nulls)
            else:
                ids = _number(ids, _codes(leaf))
    for values in floats:
        ids = values.cluster(ids)
    pairs, missing, wrong, duplicated = _match(ids, count, floats, at_us)
    matched_ideal, matched_received = pairs
    examples = {
        kind: _examples(table.select(names), of, rows)
        for kind, table, of, rows in (
            ("missing", ideal, ideal_times // width_us, missing),
            ("wrong", received, buckets, wrong),
            ("duplicated", received, buckets, duplicated),
        )
        if len(rows)
    }
    of_bucket, time_us = buckets[matched_received], times[matched_received]
    arrived_us = time_us if at_us is None else at_us[matched_received]
    order = np.argsort(time_us, kind="stable")
    false = len(wrong) + len(duplicated)
    matched = Matched(count, false, of_bucket[order], time_us[order], arrived_us[order])
    timed = at_us is not None and len(matched_received) > 0
    return Comparison(
        count, received.num_rows, len(matched_ideal), len(missing), len(wrong), len(duplicated),
        matched=matched,
        levels=evaluate({"": matched}),
        examples=examples,
        after_bucket=_delay(arrived_us - (of_bucket + 1) * width_us) if timed else None,
        after_row=_delay(arrived_us - time_us) if timed else None,
    )  # fmt: skip


def order_breaks(outputs: Sequence[Matched]) -> tuple[int, ...]:
    """Buckets with a row that arrived before a row of an earlier bucket, of any output.

    IESO also requires an order within a bucket. No contract promises that order.
    """
    buckets = np.concatenate([np.empty(0, np.int64), *(rows.seq for rows in outputs)])
    at_us = np.concatenate([np.empty(0, np.int64), *(rows.at_us for rows in outputs)])
    return tuple(int(bucket) for bucket in np.unique(buckets[came_too_early(buckets, at_us)]))


# -- numbering ----------------------------------------------------------------------------------


def _number(ids: Ints, codes: npt.NDArray[Any]) -> Ints:
    """Return new numbers that are equal where both the old numbers and the codes are equal."""
    _, codes = np.unique(codes, return_inverse=True)
    _, ids = np.unique(ids * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)
    return ids.astype(np.int64)


def _both(ideal: pa.ChunkedArray, received: pa.ChunkedArray) -> pa.Array:
    """Concatenate a column of both tables in canonical encoding, ideal rows first."""
    chunks = [*ideal.chunks, *received.cast(ideal.type).chunks]
    table = pa.table({"column": pa.chunked_array(chunks, ideal.type)})
    return canonical(table).column(0).combine_chunks()


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the leaf columns of a struct column; a null struct differs from a struct of nulls."""
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    if not at.is_struct(array.type):
        yield array
        return
    yield array.is_null()
    for child in array.flatten():
        yield from _leaves(child)


def _codes(array: pa.Array) -> npt.NDArray[Any]:
    if at.is_null(array.type):
        return np.zeros(len(array), np.int64)
    if at.is_nested(array.type):
        return hash_array(array)
    codes: Ints = array.dictionary_encode(null_encoding="encode").indices.to_numpy()
    return codes


@dataclass(frozen=True, slots=True)
class _Values:
    """A floating point column of both tables, with its tolerance."""

    values: Floats
    nulls: npt.NDArray[np.bool_]
    relative: float

    @classmethod
    def of(cls, leaf: pa.Array) -> _Values:
        nulls = leaf.is_null().to_numpy(zero_copy_only=False)
        values = leaf.fill_null(0.0).to_numpy(zero_copy_only=False).astype(np.float64)
        relative = TOLERANCE if at.is_float64(leaf.type) else TOLERANCE_FLOAT
        return cls(values, nulls, relative)

    def near(self, one: Ints, other: Ints) -> npt.NDArray[np.bool_]:
        a, b = self.values[one], self.values[other]
        finite = np.isfinite(a) & np.isfinite(b)
        with np.errstate(invalid="ignore", over="ignore"):
            allowed = self.relative * np.maximum(np.abs(a), np.abs(b))
            close = finite & (np.abs(a - b) <= allowed)
        same: npt.NDArray[np.bool_] = close | (a == b) | (np.isnan(a) & np.isnan(b))
        return same

    def cluster(self, ids: Ints) -> Ints:
        """Split rows of equal number where sorted neighbours differ by more than the tolerance."""
        order = np.lexsort((self.values, ids)).astype(np.int64)
        apart = (ids[order][1:] != ids[order][:-1]) | ~self.near(order[1:], order[:-1])
        numbers = np.empty(len(ids), np.int64)
        numbers[order] = np.cumsum(np.r_[False, apart]) if len(ids) else 0
        return numbers


# -- counting -----------------------------------------------------------------------------------


def _match(
    ids: Ints, count: int, floats: list[_Values], at_us: Ints | None
) -> tuple[tuple[Ints, Ints], Ints, Ints, Ints]:
    """Return (ideal, received) pairs, missing ideal rows, wrong and duplicated received rows."""
    total = len(ids)
    received = np.arange(total) >= count
    arrived_us = np.zeros(total, np.int64)
    if at_us is not None:
        arrived_us[count:] = at_us  # of equal rows, the first to arrive is the correct one
    order = np.lexsort((arrived_us, *(v.values for v in floats), received, ids))
    numbers = int(ids.max(initial=-1)) + 1
    ideal_count = np.bincount(ids[~received], minlength=numbers)
    received_count = np.bincount(ids[received], minlength=numbers)
    begins = np.r_[0, np.cumsum(ideal_count + received_count)][:-1]
    place = np.arange(total) - begins[ids[order]]
    is_received = received[order]
    rank = np.where(is_received, place - ideal_count[ids[order]], place)
    paired = rank < np.minimum(ideal_count, received_count)[ids[order]]
    matched_ideal, matched_received = order[paired & ~is_received], order[paired & is_received]
    # A chain of neighbours can span more than the tolerance, so each pair is checked again.
    good = np.ones(len(matched_ideal), np.bool_)
    for values in floats:
        good &= values.near(matched_ideal, matched_received)
    rest = order[~paired & is_received]
    duplicates = ideal_count[ids[rest]] > 0
    missing = np.r_[order[~paired & ~is_received], matched_ideal[~good]]
    wrong = np.r_[rest[~duplicates], matched_received[~good]] - count
    pairs = (
        matched_ideal[good].astype(np.int64),
        (matched_received[good] - count).astype(np.int64),
    )
    return pairs, np.sort(missing), np.sort(wrong), np.sort(rest[duplicates] - count)


def _examples(table: pa.Table, buckets: Ints, rows: Ints) -> list[dict[str, Any]]:
    chosen = rows[:EXAMPLES]
    examples = table.take(pa.array(chosen)).to_pylist()
    return [{"bucket": int(b), **row} for b, row in zip(buckets[chosen], examples, strict=True)]


def _delay(delays: Ints) -> Delay:
    quantiles = np.quantile(delays, (0.5, 0.95, 0.99, 1.0), method="inverted_cdf")
    return Delay(*(int(value) for value in quantiles))
