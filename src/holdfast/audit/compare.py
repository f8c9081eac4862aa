"""Two tables held against each other as multisets of rows per bucket, never by position.

Rows are numbered so that equal rows have equal numbers: exactly for everything but floating point,
where values that lie closer together than the tolerance count as one. Then only counting is left:
an ideal row nobody received is *missing*, a received row that is ideal but came too often is
*duplicated*, any other received row is *wrong* (ECOC section 2.5: DS_i, DS_c and DS_f).
All of it is whole columns: no loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types as at

from holdfast.client import RECEIVED_AT
from holdfast.log.hashing import hash_array
from holdfast.log.rows import canonical, times_us

Ints = npt.NDArray[np.int64]
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
    #: Of each kind of fault a few rows, with their bucket.
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: Of the correct rows, since the end of their bucket and since their own time.
    after_bucket: Delay | None = None
    after_row: Delay | None = None
    #: Buckets of which a correct row came before one of an earlier bucket.
    order_breaks: tuple[int, ...] = ()
    #: When correct rows came: bucket, first and last instant.
    arrivals: tuple[Ints, Ints, Ints] | None = None

    @property
    def lossless(self) -> bool:
        """LOLE: everything, and nothing else."""
        return not (self.missing or self.wrong or self.duplicated)

    @property
    def loss_factor(self) -> float:
        """LF: the share of the ideal rows that was received."""
        return self.correct / self.ideal_rows if self.ideal_rows else 1.0

    @property
    def error_factor(self) -> float:
        """EF: received rows that should not have been, relative to the ideal ones."""
        false = self.wrong + self.duplicated
        return false / self.ideal_rows if self.ideal_rows else (float("inf") if false else 0.0)


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
    found = Comparison(
        ideal.num_rows, received.num_rows, len(mine), len(missing), len(wrong), len(duplicated),
        examples,
    )  # fmt: skip
    if at_us is None or not len(theirs):
        return found
    came, of_bucket = at_us[theirs], buckets[theirs]
    arrivals = _arrivals(of_bucket, came)
    return Comparison(
        found.ideal_rows, found.received_rows, found.correct, found.missing, found.wrong,
        found.duplicated, examples,
        after_bucket=_delay(came - (of_bucket + 1) * width_us),
        after_row=_delay(came - times[theirs]),
        order_breaks=order_breaks(*arrivals),
        arrivals=arrivals,
    )  # fmt: skip


def order_breaks(buckets: Ints, first: Ints, last: Ints) -> tuple[int, ...]:
    """Buckets of which something came before the last of an earlier bucket (IASO; with the
    arrivals of several outputs, IESO)."""
    order = np.lexsort((last, buckets))
    buckets, first, last = buckets[order], first[order], last[order]
    starts = np.searchsorted(buckets, buckets, side="left")
    before = np.r_[np.iinfo(np.int64).min, np.maximum.accumulate(last)][starts]
    return tuple(int(bucket) for bucket in np.unique(buckets[first < before]))


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


def _arrivals(buckets: Ints, at_us: Ints) -> tuple[Ints, Ints, Ints]:
    order = np.lexsort((at_us, buckets))
    present, starts = np.unique(buckets[order], return_index=True)
    came = at_us[order]
    return present, came[starts], came[np.r_[starts[1:], len(came)] - 1]


def _delay(delays: Ints) -> Delay:
    found = np.quantile(delays, (0.5, 0.95, 0.99, 1.0), method="inverted_cdf")
    return Delay(*(int(value) for value in found))
