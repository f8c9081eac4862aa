"""Independent implementations of every operator, in DuckDB SQL and Python.

The oracles have no buckets, panes or partials: windows are assigned row by row from the definition,
and doubles are summed with `math.fsum`. Times are microseconds since 1970 on both sides of a
comparison.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

WIDTH_US = 250_000
KEYS = ("a", "b", "", "ключ", "🔑", "Straße", None)
#: Doubles that break careless arithmetic: signed zeros, subnormals, 60 orders of magnitude.
WILD = (0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1e-30, -1e-30, 1e30, -1e30, 1e16, 1.0,
        -1.0, 0.1, 1e300, -1e300, 2.0**44, 2.0**-20, -(2.0**108 - 2.0**55))  # fmt: skip
NOT_FINITE = (math.nan, math.inf, -math.inf)


# -- rows ------------------------------------------------------------------------------------------


def rows_of(
    rng: np.random.Generator,
    count: int,
    *,
    first_us: int = 0,
    buckets: Sequence[int] = (0, 1, 2, 4, 5, 9, 10, 11),
    keys: Sequence[str | None] = KEYS,
    wild: float = 0.4,
    not_finite: float = 0.0,
) -> pa.Table:
    """`ts, k, x, y, i, d, w`: ties in time, nulls, unicode, empty buckets between `buckets`.

    `x` is taken from `WILD` with probability `wild`; otherwise it spans 60 orders of magnitude, but
    the rows of a bucket are close together, so that the order of addition matters. `y` is normal.
    """
    places = rng.choice(np.array(buckets), count) * WIDTH_US
    coarse = rng.integers(0, 10, count) * 25_000
    fine = rng.integers(0, WIDTH_US, count)
    ts = first_us + places + np.where(rng.random(count) < 0.5, coarse, fine)
    scale = rng.integers(-28, 29, max(buckets) + 1)[places // WIDTH_US]
    x = rng.normal(size=count) * 10.0 ** (scale + rng.integers(-2, 3, count))
    x = np.where(rng.random(count) < wild, rng.choice(np.array(WILD), count), x)
    x = np.where(rng.random(count) < not_finite, rng.choice(np.array(NOT_FINITE), count), x)
    words = [None if n == 0 else f"w{n}é" for n in rng.integers(0, 12, count)]
    return pa.table(
        {
            "ts": pa.array(ts, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            "k": pa.array([keys[n] for n in rng.integers(0, len(keys), count)], pa.string()),
            "x": _with_nulls(rng, pa.array(x)),
            "y": _with_nulls(rng, pa.array(rng.normal(5.0, 100.0, count))),
            "i": _with_nulls(rng, pa.array(rng.integers(-(10**6), 10**6, count))),
            "d": _with_nulls(rng, _decimals(rng.integers(-(10**9), 10**9, count))),
            "w": pa.array(words, pa.string()),
        }
    )


SCHEMA = "ts timestamp, k string, x double, y double, i long, d decimal(12,3), w string"


def _decimals(thousandths: np.ndarray[Any, Any]) -> pa.Array:
    from decimal import Decimal

    return pa.array([Decimal(int(n)).scaleb(-3) for n in thousandths], pa.decimal128(12, 3))


def _with_nulls(rng: np.random.Generator, column: pa.Array) -> pa.Array:
    return pa.array(column.to_pylist(), column.type, mask=rng.random(len(column)) < 0.1)


def micros(table: pa.Table) -> pa.Table:
    """Timestamps as whole microseconds, so that the time zone has no influence."""
    for place, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            table = table.set_column(place, field.name, table.column(place).cast(pa.int64()))
    return table


# -- SQL -------------------------------------------------------------------------------------------


def sql(text: str, **tables: pa.Table) -> pa.Table:
    with duckdb.connect() as con:
        con.execute("create macro floor_to(t, s) as t - ((t % s) + s) % s")
        for name, table in tables.items():
            con.register(name, micros(table))
        return con.sql(text).to_arrow_table()


def differences(found: pa.Table, wanted: pa.Table) -> list[str]:
    """Rows of only one side, as multisets; columns by name. Empty if both sides are equal."""
    names = sorted(wanted.column_names)
    if sorted(found.column_names) != names:
        return [f"columns {sorted(found.column_names)} instead of {names}"]
    columns = ", ".join(f'"{name}"' for name in names)
    only = {
        side: sql(f"select {columns} from {a} except all select {columns} from {b}", **tables)
        for side, a, b in (("unexpected", "found", "wanted"), ("missing", "wanted", "found"))
        for tables in ({"found": found, "wanted": wanted},)
    }
    return [f"{side}: {row}" for side, rows in only.items() for row in rows.to_pylist()[:5]]


def in_windows(size_us: int, slide_us: int, rows: str = "rows") -> str:
    """Every row once per window [end - size, end) that contains it; ends are slide multiples."""
    return (
        f"(select *, unnest(range(floor_to(ts, {slide_us}) + {slide_us}, "
        f"floor_to(ts + {size_us}, {slide_us}) + 1, {slide_us})) as end_us from {rows})"
    )


def windows(
    rows: pa.Table, size_us: int, slide_us: int, keys: Sequence[str], aggregates: Mapping[str, str]
) -> pa.Table:
    chosen = [*keys, *(f"{text} as {name}" for name, text in aggregates.items())]
    return sql(
        f"select {', '.join(chosen)}, end_us - {size_us} as window_start, end_us - 1 as ts "
        f"from {in_windows(size_us, slide_us)} group by {', '.join([*keys, 'end_us'])}",
        rows=rows,
    )


SUM_LONG = (
    "case when sum(i) between -9223372036854775808 and 9223372036854775807 then sum(i)::bigint end"
)
#: Nulls are the smallest values.
FIRST_W = "list(w order by ts, w nulls first)[1]"
LAST_W = "list(w order by ts desc, w desc nulls last)[1]"


def groups(
    rows: pa.Table, size_us: int, slide_us: int, keys: Sequence[str], column: str
) -> dict[tuple[Any, ...], list[tuple[int, Any]]]:
    """(time, value) of every row of a window, by the keys and the time of the result."""
    by = ", ".join([*keys, "end_us"])
    grouped = sql(
        f"select {by}, list(ts) as times, list({column}) as vals "
        f"from {in_windows(size_us, slide_us)} group by {by}",
        rows=rows,
    )
    return {
        (*(row[key] for key in keys), row["end_us"] - 1): list(
            zip(row["times"], row["vals"], strict=True)
        )
        for row in grouped.to_pylist()
    }


def count_windows(rows: pa.Table, size: int, slide: int, aggregates: Mapping[str, str]) -> pa.Table:
    """Per `k`, in the order of time and then of the row itself: nulls, NaN, then by value."""
    chosen = ", ".join(f"{text} as {name}" for name, text in aggregates.items())
    return sql(
        f"""with numbered as (
              select *, row_number() over (partition by k order by ts, x is not null,
                coalesce(not isnan(x), true), x, y nulls first, i nulls first, d nulls first,
                w nulls first) - 1 as place
              from rows),
            held as (
              select *, unnest(range(greatest(0, (place - {size} + {slide}) // {slide}),
                                     place // {slide} + 1)) as number
              from numbered)
            select k, {chosen}, max(ts) as ts from held group by k, number
            having count(*) = {size}""",
        rows=rows,
    )


def sessions(rows: pa.Table, quiet_us: int) -> pa.Table:
    """Rows of a key less than `quiet_us` apart form a session; its time is `quiet_us` after it."""
    return sql(
        f"""with marked as (
              select k, ts, coalesce(ts - lag(ts) over (partition by k order by ts) >= {quiet_us},
                                     true)::int as opens from rows),
            numbered as (
              select *, sum(opens) over (partition by k order by ts
                                         rows unbounded preceding) as session from marked)
            select k, count(*) as n, max(ts) + {quiet_us} as ts
            from numbered group by k, session""",
        rows=rows,
    )


# -- doubles ---------------------------------------------------------------------------------------


def exact_sum(values: Iterable[float | None]) -> tuple[float | None, float]:
    """The exact sum, rounded once; no error is allowed."""
    present = [value for value in values if value is not None]
    if not present:
        return None, 0.0
    if not all(map(math.isfinite, present)):
        return sum(value for value in present if not math.isfinite(value)), 0.0
    return nearest(sum(map(Fraction, present))), 0.0


def nearest(number: Fraction | int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def spread(values: Iterable[float | None]) -> tuple[float | None, float]:
    """Sample standard deviation from exact fractions; it may be off by two units of its last
    digit."""
    present = [value for value in values if value is not None]
    if len(present) < 2:
        return None, 0.0
    if not all(map(math.isfinite, present)):
        return math.nan, 0.0
    exact = [Fraction(value) for value in present]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
    # The square root of the numerator as an integer, with more digits than a double has.
    bits = variance.numerator.bit_length() - variance.denominator.bit_length()
    digits = max(0, 400 - bits) // 2
    root = math.isqrt((variance.numerator << 2 * digits) // variance.denominator)
    deviation = nearest(Fraction(root, 1 << digits))
    return deviation, max(4.5e-16 * deviation, 5e-324)


def quantile(values: Iterable[float | None], q: float) -> float | None:
    present = sorted((v for v in values if v is not None), key=lambda v: (math.isnan(v), v))
    return present[math.floor(q * (len(present) - 1))] if present else None


def top_k(values: Iterable[Any], k: int) -> list[dict[str, Any]]:
    """By count, then by value; text compares by its bytes."""
    counted = Counter(value for value in values if value is not None)
    ranked = sorted(counted.items(), key=lambda item: (-item[1], item[0].encode()))
    return [{"value": value, "count": count} for value, count in ranked[:k]]


def first(held: Iterable[tuple[int, float | None]]) -> float | None:
    """Smallest value among the rows of the earliest time; null is smaller than all, NaN greater."""
    return min(held, key=lambda row: (row[0], *_rank(row[1])))[1]


def last(held: Iterable[tuple[int, float | None]]) -> float | None:
    return max(held, key=lambda row: (row[0], *_rank(row[1])))[1]


def _rank(value: float | None) -> tuple[int, float]:
    if value is None:
        return (0, 0.0)
    return (2, 0.0) if math.isnan(value) else (1, value)


def close(found: float | None, wanted: float | None, allowed: float) -> bool:
    if found is None or wanted is None:
        return found is wanted
    if not math.isfinite(wanted):
        return math.isnan(found) if math.isnan(wanted) else found == wanted
    return abs(found - wanted) <= allowed
