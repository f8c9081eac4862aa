"""The documented aggregates over complete groups of raw rows, in plain Spark SQL.

There are no partial aggregates and no panes. Spark's own aggregates are used where they are exact.
Spark's sums and variances of doubles depend on the order of rows and can lose all digits when
values cancel out; Python computes those of `hf.` aggregates exactly. PySpark aggregate Columns are
computed by Spark as they are. Sketches are built from all rows at once; `accuracy` compares them
with the exact answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from functools import reduce
from math import inf, isfinite, isqrt, nan, sqrt
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from holdfast.engine.sql import quoted
from holdfast.errors import InputError
from holdfast.model.aggregates import Aggregate

_WHOLE = ("tinyint", "smallint", "int", "bigint")
#: Allowed error of a distinct-count sketch, in standard errors. Chance of exceeding: below 1e-8.
_SIGMAS = 6.0


@dataclass(slots=True)
class Grouped:
    """One row per group: grouping columns, results, and columns with bounds."""

    frame: DataFrame
    names: list[str]
    #: Result column to (description, column with the exact answer, column with the error bound).
    approximate: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    def accuracy(self) -> list[str]:
        """Report results that are further from the exact answer than declared."""
        violations = []
        for name, (description, exact, bound) in self.approximate.items():
            value = quoted(name)
            off = F.expr(f"not (abs({value} - {exact}) <= {bound} or {value} <=> {exact})")
            bad = self.frame.filter(off).count()
            if bad:
                violations.append(
                    f"{description} is further from the exact answer than declared in {bad} rows"
                )
        return violations


def grouped(df: DataFrame, by: list[str], aggregates: Mapping[str, Any], time: str) -> Grouped:
    """Aggregate `df` by the columns `by`."""
    result = Grouped(df, [*aggregates])
    for function in (holdfast_sum, holdfast_variance, holdfast_stddev):
        df.sparkSession.udf.register(function.__name__, function, "double")
    for text_function in (holdfast_decimals, holdfast_average):
        df.sparkSession.udf.register(text_function.__name__, text_function, "string")
    columns: list[Column] = [F.count(F.lit(1)).alias("__rows")]
    tops: dict[str, Aggregate] = {}
    for number, (name, wanted) in enumerate(aggregates.items()):
        if isinstance(wanted, Aggregate):
            if wanted.kind == "top_k":
                tops[name] = wanted
                continue
            columns.append(F.expr(_sql(df, wanted, time)).alias(name))
            x = f"({wanted.arg})"
            if wanted.kind in ("approx_distinct", "quantile"):
                exact, bound = _exact(x, wanted)
                columns.append(F.expr(exact).alias(f"__e{number}"))
                columns.append(F.expr(bound).alias(f"__b{number}"))
                description = f"{wanted.kind}({wanted.arg}) as {name!r}"
                result.approximate[name] = (description, f"__e{number}", f"__b{number}")
        elif isinstance(wanted, Column) or callable(wanted):
            column = wanted if isinstance(wanted, Column) else wanted()
            columns.append(column.alias(name))
        else:
            raise InputError(
                f"aggregate {name!r}: expected an aggregate, found {type(wanted).__name__}"
            )
    columns_by = [F.col(quoted(name)) for name in by]
    result.frame = df.groupBy(*columns_by).agg(*columns)
    for name, top in tops.items():
        result.frame = _with_top(result.frame, df, by, name, top)
    return result


def _sql(df: DataFrame, aggregate: Aggregate, time: str) -> str:
    if aggregate.arg is None:
        return "count(1)"
    x = f"({aggregate.arg})"
    kind = df.select(F.expr(aggregate.arg)).schema.fields[0].dataType.simpleString()
    match aggregate.kind:
        case "count" | "min" | "max":
            return f"{aggregate.kind}({x})"
        case "stddev" | "stddev_pop" | "variance" | "var_pop":
            value = x if kind in _WHOLE else f"cast({x} as double)"
            divisor = f"count({x})" if aggregate.kind.endswith("pop") else f"count({x}) - 1"
            function = "stddev" if aggregate.kind.startswith("stddev") else "variance"
            return f"holdfast_{function}(collect_list({value}), {divisor})"
        case "sum" if kind in _WHOLE:
            wide = f"sum(cast({x} as decimal(38,0)))"
            fits = f"{wide} between -9223372036854775808BD and 9223372036854775807BD"
            return f"cast(if({fits}, {wide}, null) as bigint)"
        case "avg" if kind in _WHOLE:
            return f"cast(sum(cast({x} as decimal(38,0))) as double) / nullif(count({x}), 0)"
        case "sum" | "avg" if kind.startswith("decimal"):
            precision, scale = (int(text) for text in kind[8:-1].split(","))
            total = f"holdfast_decimals(collect_list(cast({x} as string)), {scale})"
            if aggregate.kind == "sum":
                return f"try_cast({total} as decimal({min(38, precision + 10)},{scale}))"
            return (
                f"try_cast(holdfast_average({total}, count({x}), {min(scale + 4, 38)}) as "
                f"decimal({min(38, precision + 4)},{min(scale + 4, 38)}))"
            )
        case "sum":
            return f"holdfast_sum(collect_list(cast({x} as double)))"
        case "avg":
            return f"holdfast_sum(collect_list(cast({x} as double))) / nullif(count({x}), 0)"
        case "first":
            return f"min_by({x}, struct({quoted(time)}, {x}))"
        case "last":
            return f"max_by({x}, struct({quoted(time)}, {x}))"
        case "approx_distinct":
            value = f"({x} + cast(0 as {kind}))" if kind in ("float", "double") else x
            if kind not in ("int", "bigint", "string", "binary"):
                value = f"cast({value} as string)"
            sketch = f"hll_sketch_agg({value}, {aggregate.param('lg_k')})"
            return f"coalesce(hll_sketch_estimate(hll_union({sketch}, {sketch})), 0L)"
        case "quantile":
            return _binned(_element(x, aggregate.param("q")), aggregate.param("error"))
    raise InputError(f"the audit cannot compute the aggregate {aggregate.kind!r}")


def holdfast_sum(values: list[float]) -> float | None:
    """The exact sum, rounded once."""
    if not values:
        return None
    if not all(map(isfinite, values)):
        return sum(value for value in values if not isfinite(value))
    return _nearest(sum(map(Fraction, values)))


def holdfast_variance(values: list[float], divisor: int) -> float | None:
    """The sum of the squared deviations from the mean, divided by `divisor`."""
    if divisor < 1:
        return None
    return _nearest(_variance(values, divisor)) if all(map(isfinite, values)) else nan


def holdfast_stddev(values: list[float], divisor: int) -> float | None:
    if divisor < 1:
        return None
    if not all(map(isfinite, values)):
        return nan
    variance = _variance(values, divisor)
    # The root of an integer with at least 200 bits; the variance itself may exceed a double.
    bits = variance.numerator.bit_length() - variance.denominator.bit_length()
    shift = max(0, 400 - bits) // 2
    root = isqrt((variance.numerator << 2 * shift) // variance.denominator)
    return _nearest(Fraction(root, 1 << shift))


def _variance(values: list[float], divisor: int) -> Fraction:
    exact = [Fraction(value) for value in values]
    total, squares = sum(exact), sum(value * value for value in exact)
    return Fraction(squares - total * total / len(exact)) / divisor


#: Enough digits for any number of decimals.
_CONTEXT = Context(prec=200, rounding=ROUND_HALF_UP)


def holdfast_decimals(values: list[str], scale: int) -> str | None:
    """The exact sum of decimals as text; null if it does not fit 38 digits."""
    if not values:
        return None
    total = sum((Fraction(value) for value in values), Fraction(0)) * 10**scale
    return f"{Decimal(int(total)).scaleb(-scale, _CONTEXT):f}" if abs(total) < 10**38 else None


def holdfast_average(total: str | None, count: int, scale: int) -> str | None:
    if total is None:
        return None
    average = _CONTEXT.divide(Decimal(total), Decimal(count))
    return f"{average.quantize(Decimal(1).scaleb(-scale), context=_CONTEXT):f}"


def _nearest(number: Fraction | int) -> float:
    try:
        return float(number)
    except OverflowError:
        return inf if number > 0 else -inf


def _element(x: str, q: float) -> str:
    """SQL for the value at sorted position floor(q * (n - 1)), NaN last."""
    at = f"cast(floor({q!r}D * (count({x}) - 1)) as int)"
    return f"get(array_sort(collect_list(cast({x} as double) + 0D)), {at})"


def _binned(value: str, error: float) -> str:
    """SQL for the middle of the logarithmic bin of `value`, which represents the whole bin."""
    gamma = (1 + error) / (1 - error)
    power = f"pow({gamma!r}D, ceil(ln(abs(v)) / ln({gamma!r}D)))"
    middle = f"sign(v) * least({power} * {2 / (gamma + 1)!r}D, 1.7976931348623157e308D)"
    plain = "v is null or isnan(v) or v = 0 or abs(v) = double('Infinity')"
    return f"transform(array({value}), v -> if({plain}, v, {middle}))[0]"


def _exact(x: str, aggregate: Aggregate) -> tuple[str, str]:
    """SQL for the exact answer and for the allowed error of the approximate one."""
    if aggregate.kind == "quantile":
        value = _element(x, aggregate.param("q"))
        return value, f"abs({value}) * {aggregate.param('error') * (1 + 1e-9)!r}D"
    exact = f"size(collect_set({x}))"
    share = _SIGMAS * 1.04 / sqrt(2.0 ** aggregate.param("lg_k"))
    return exact, f"1D + {share!r}D * {exact}"


def _with_top(
    frame: DataFrame, df: DataFrame, by: list[str], name: str, top: Aggregate
) -> DataFrame:
    """Add a `top_k` column: count, sort, cut. A group without values gets an empty list."""
    columns_by = [F.col(quoted(column)) for column in by]
    labels = [f"__by{number}" for number in range(len(by))]
    counted = df.groupBy(*columns_by, F.expr(top.arg or "1").alias("__v")).agg(
        F.count(F.lit(1)).alias("__n")
    )
    best = f"slice(array_sort(collect_list(struct(-__n as m, __v as v))), 1, {top.param('k')})"
    tops = (
        counted.filter("__v is not null")
        .groupBy(*columns_by)
        .agg(F.expr(f"transform({best}, e -> struct(e.v as value, -e.m as count))").alias("__top"))
        .toDF(*labels, name)
    )
    kind = tops.schema[name].dataType.simpleString()
    same = reduce(
        lambda all_, one: all_ & one,
        [F.col(quoted(b)).eqNullSafe(F.col(label)) for b, label in zip(by, labels, strict=True)],
    )
    filled = F.coalesce(F.col(quoted(name)), F.expr(f"cast(array() as {kind})"))
    return frame.join(tops, same, "left").withColumn(name, filled).drop(*labels)
