"""Two tables held against each other as multisets of rows per bucket, never by position.

Rows are numbered so that equal rows have equal numbers: exactly for everything but floating point,
where values that lie closer together than the tolerance count as one. Then only counting is left:
an ideal row nobody received is *missing*, a received row that is ideal but came too often is
*duplicated*, any other received row is *wrong* (ECOC section 2.5: DS_i, DS_c and DS_f).
All of it is whole columns: no loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

#: Doubles differ by less, relatively, when they only were added up in another order.
TOLERANCE = 1e-9
#: The same for columns of 32 bits, which hold about seven digits.
TOLERANCE_FLOAT = 1e-6
EXAMPLES = 5
#: Column of received rows, where it is known: the bucket they were delivered with.
BUCKET = "_bucket"


@dataclass(frozen=True, slots=True)
class Delay:
    """How late rows came, in microseconds. Every number is the delay of some row."""

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
    #: The correct rows, numbered by their bucket, for the bucket is the unit of order. Ideally a
    #: row comes at its own time; where nobody noted when it really came, it is put down as then.
    matched: Matched
    levels: Levels
    #: Of each kind of fault a few rows, with their bucket.
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: Of the correct rows, since the end of their bucket and since their own time.
    after_bucket: Delay | None = None
    after_row: Delay | None = None

    @property
    def timed(self) -> bool:
        """Whether there are correct rows of which it is known when they came."""
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
        """Buckets of which a correct row came before one of an earlier bucket."""
        return order_breaks([self.matched])


def compare(
    ideal: pa.Table,
    received: pa.Table,
    *,
    time: str,
    width_us: int,
    tolerance: Mapping[str, str] | None = None,
) -> Comparison:
    """`received` has the columns of `ideal`, with `_received_at` and perhaps `_bucket` beside them.
    `tolerance` names, for a column of doubles, the column of `ideal` with its own absolute one."""
    tolerance = tolerance or {}
    names = [name for name in ideal.column_names if name not in tolerance.values()]
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
                given = ideal[tolerance[name]] if name in tolerance else None
                floats.append(_Values.of(leaf, given))
                ids = _number(ids, floats[-1].nulls)
            else:
                ids = _number(ids, _codes(leaf))
    for values in floats:
        ids = values.cluster(ids)
    pairs, missing, wrong, duplicated = _match(ids, count, floats, at_us)
    mine, theirs = pairs
    examples = {
        kind: _examples(table.select(names), of, rows)
        for kind, table, of, rows in (
            ("missing", ideal, ideal_times // width_us, missing),
            ("wrong", received, buckets, wrong),
            ("duplicated", received, buckets, duplicated),
        )
        if len(rows)
    }
    of_bucket, time_us = buckets[theirs], times[theirs]
    came = time_us if at_us is None else at_us[theirs]
    order = np.argsort(time_us, kind="stable")
    false = len(wrong) + len(duplicated)
    matched = Matched(count, false, of_bucket[order], time_us[order], came[order])
    timed = at_us is not None and len(theirs) > 0
    return Comparison(
        count, received.num_rows, len(mine), len(missing), len(wrong), len(duplicated),
        matched=matched,
        levels=evaluate({"": matched}),
        examples=examples,
        after_bucket=_delay(came - (of_bucket + 1) * width_us) if timed else None,
        after_row=_delay(came - time_us) if timed else None,
    )  # fmt: skip


def order_breaks(outputs: Sequence[Matched]) -> tuple[int, ...]:
    """Buckets of which something came before something of an earlier bucket, of any output. The
    order within a bucket, to which IESO holds outputs too, is nobody's promise."""
    buckets = np.concatenate([np.empty(0, np.int64), *(rows.seq for rows in outputs)])
    at_us = np.concatenate([np.empty(0, np.int64), *(rows.at_us for rows in outputs)])
    return tuple(int(bucket) for bucket in np.unique(buckets[came_too_early(buckets, at_us)]))


# -- numbering ----------------------------------------------------------------------------------


def _number(ids: Ints, codes: npt.NDArray[Any]) -> Ints:
    """New numbers, equal exactly where both the old number and the code are."""
    _, codes = np.unique(codes, return_inverse=True)
    _, ids = np.unique(ids * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)
    return ids.astype(np.int64)


def _both(ideal: pa.ChunkedArray, received: pa.ChunkedArray) -> pa.Array:
    """One column of both tables in the one encoding, the ideal rows first."""
    chunks = [*ideal.chunks, *received.cast(ideal.type).chunks]
    table = pa.table({"column": pa.chunked_array(chunks, ideal.type)})
    return canonical(table).column(0).combine_chunks()


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    """The columns a column of structs is made of; a null struct is not a struct of nulls."""
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
    """A column of floating point of both tables, and how close is equal."""

    values: Floats
    nulls: npt.NDArray[np.bool_]
    relative: float
    #: Absolute tolerance per row, 0 for received rows.
    absolute: Floats

    @classmethod
    def of(cls, leaf: pa.Array, given: pa.ChunkedArray | None) -> _Values:
        nulls = leaf.is_null().to_numpy(zero_copy_only=False)
        values = leaf.fill_null(0.0).to_numpy(zero_copy_only=False).astype(np.float64)
        relative = TOLERANCE if at.is_float64(leaf.type) else TOLERANCE_FLOAT
        absolute = np.zeros(len(values))
        if given is not None:
            absolute[: len(given)] = np.nan_to_num(given.to_numpy(), nan=0.0, posinf=0.0)
        return cls(values, nulls, relative, absolute)

    def near(self, one: Ints, other: Ints) -> npt.NDArray[np.bool_]:
        a, b = self.values[one], self.values[other]
        finite = np.isfinite(a) & np.isfinite(b)
        with np.errstate(invalid="ignore", over="ignore"):
            allowed = self.relative * np.maximum(np.abs(a), np.abs(b))
            allowed += np.maximum(self.absolute[one], self.absolute[other])
            close = finite & (np.abs(a - b) <= allowed)
        same: npt.NDArray[np.bool_] = close | (a == b) | (np.isnan(a) & np.isnan(b))
        return same

    def cluster(self, ids: Ints) -> Ints:
        """Split each number where sorted neighbours are further apart than the tolerance."""
        order = np.lexsort((self.values, ids)).astype(np.int64)
        apart = (ids[order][1:] != ids[order][:-1]) | ~self.near(order[1:], order[:-1])
        found = np.empty(len(ids), np.int64)
        found[order] = np.cumsum(np.r_[False, apart]) if len(ids) else 0
        return found


# -- counting -----------------------------------------------------------------------------------


def _match(
    ids: Ints, count: int, floats: list[_Values], at_us: Ints | None
) -> tuple[tuple[Ints, Ints], Ints, Ints, Ints]:
    """Pairs (ideal row, received row); missing ideal rows; wrong and duplicated received rows."""
    total = len(ids)
    received = np.arange(total) >= count
    came = np.zeros(total, np.int64)
    if at_us is not None:
        came[count:] = at_us  # of equal rows the first that came is the right one
    order = np.lexsort((came, *(v.values for v in floats), received, ids))
    numbers = int(ids.max(initial=-1)) + 1
    have = np.bincount(ids[~received], minlength=numbers)
    got = np.bincount(ids[received], minlength=numbers)
    begins = np.r_[0, np.cumsum(have + got)][:-1]
    place = np.arange(total) - begins[ids[order]]
    is_received = received[order]
    rank = np.where(is_received, place - have[ids[order]], place)
    paired = rank < np.minimum(have, got)[ids[order]]
    mine, theirs = order[paired & ~is_received], order[paired & is_received]
    # A chain of neighbours may lead further than the tolerance: each pair is checked by itself.
    good = np.ones(len(mine), np.bool_)
    for values in floats:
        good &= values.near(mine, theirs)
    rest = order[~paired & is_received]
    known = have[ids[rest]] > 0
    missing = np.r_[order[~paired & ~is_received], mine[~good]]
    wrong = np.r_[rest[~known], theirs[~good]] - count
    pairs = (mine[good].astype(np.int64), (theirs[good] - count).astype(np.int64))
    return pairs, np.sort(missing), np.sort(wrong), np.sort(rest[known] - count)


def _examples(table: pa.Table, buckets: Ints, rows: Ints) -> list[dict[str, Any]]:
    chosen = rows[:EXAMPLES]
    told = table.take(pa.array(chosen)).to_pylist()
    return [{"bucket": int(b), **row} for b, row in zip(buckets[chosen], told, strict=True)]


def _delay(delays: Ints) -> Delay:
    found = np.quantile(delays, (0.5, 0.95, 0.99, 1.0), method="inverted_cdf")
    return Delay(*(int(value) for value in found))
