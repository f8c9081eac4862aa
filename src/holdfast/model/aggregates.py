"""The aggregates of a window, as descriptions. The engine computes them (`engine/mergeable.py`).

Every aggregate can be merged from partial aggregates. The result is the same to the bit for every
grouping of the rows (ARCHITECTURE.md). A PySpark aggregate Column can be used instead of an
`Aggregate`; the engine decomposes the Column into these aggregates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import InputError

KINDS = (
    "count", "sum", "min", "max", "avg", "stddev", "stddev_pop", "variance", "var_pop", "first",
    "last", "approx_distinct", "quantile", "top_k",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Aggregate:
    kind: str
    #: SQL expression over the columns of the input; None for `count()` of rows.
    arg: str | None = None
    params: tuple[tuple[str, Any], ...] = field(default=())

    def param(self, name: str) -> Any:
        return dict(self.params)[name]


def count(column: str | None = None) -> Aggregate:
    """The number of rows, or of non-null values of `column`."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """The sum. Integers: exact, NULL if the sum does not fit a long. Decimals: exact, NULL if the
    sum does not fit 38 digits. Doubles: the exact sum, rounded once at the end. The result does not
    depend on the order of rows."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    return Aggregate("max", column)


def avg(column: str) -> Aggregate:
    return Aggregate("avg", column)


def stddev(column: str) -> Aggregate:
    """Sample standard deviation, computed from the exact sums of the values and their squares.
    Decimals are first rounded to doubles."""
    return Aggregate("stddev", column)


def first(column: str) -> Aggregate:
    """The value of the earliest row; among rows with the same time, the smallest value."""
    return Aggregate("first", column)


def last(column: str) -> Aggregate:
    """The value of the latest row; among rows with the same time, the greatest value."""
    return Aggregate("last", column)


def approx_distinct(column: str, *, lg_k: int = 12) -> Aggregate:
    """Estimated number of distinct values, from a HyperLogLog sketch of 2**lg_k registers."""
    if not 4 <= lg_k <= 21:
        raise InputError(f"approx_distinct: lg_k={lg_k} must be from 4 to 21")
    return Aggregate("approx_distinct", column, (("lg_k", lg_k),))


def quantile(column: str, q: float, *, error: float = 0.01) -> Aggregate:
    """The q-quantile with a relative error of at most `error`, from counts in logarithmic bins."""
    if not 0.0 <= q <= 1.0:
        raise InputError(f"quantile: q={q} must be from 0 to 1")
    if not 1e-4 <= error <= 0.5:
        raise InputError(f"quantile: error={error} must be from 0.0001 to 0.5")
    return Aggregate("quantile", column, (("q", float(q)), ("error", float(error))))


def top_k(column: str, k: int = 10) -> Aggregate:
    """The k most frequent values with their exact counts, as array<struct<value, count>>. Among
    values with equal counts, the smaller value comes first."""
    if k < 1:
        raise InputError(f"top_k: k={k} must be at least 1")
    return Aggregate("top_k", column, (("k", int(k)),))
