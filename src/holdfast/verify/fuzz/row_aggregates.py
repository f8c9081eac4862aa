"""The aggregates of a group, exactly, from their documentation (`model/aggregates.py`)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from typing import Any

from holdfast.verify.fuzz.case import Agg
from holdfast.verify.fuzz.kinds import digits, rank, same

#: Chance that the sketch of a distinct count exceeds this many standard errors: below 1e-8.
_SIGMAS = 6.0


@dataclass(frozen=True, slots=True)
class Near:
    """An approximate result: any value within `allowed` of `exact`."""

    exact: Any
    allowed: float


def aggregate(agg: Agg, held: list[tuple[int, Any]], kind: str) -> Any:
    """The result, of type `kind`, over (time, value) of the rows of a group."""
    values = [value for _, value in held if value is not None]
    match agg.kind:
        case "count":
            return len(values)
        case "min":
            return min(values, key=rank, default=None)
        case "max":
            return max(values, key=rank, default=None)
        case "first":
            return min(held, key=lambda row: (row[0], rank(row[1])))[1]
        case "last":
            return max(held, key=lambda row: (row[0], rank(row[1])))[1]
        case "sum" | "avg":
            return _sum(values, kind, average=agg.kind == "avg")
        case "stddev" | "stddev_pop" | "variance" | "var_pop":
            return _spread(values, agg.kind)
        case "approx_distinct":
            distinct = len({same(value) for value in values})
            share = _SIGMAS * 1.04 / math.sqrt(2.0 ** agg.params.get("lg_k", 12))
            return Near(distinct, 1 + share * distinct)
        case "quantile":
            return _quantile(values, agg.params["q"], agg.params.get("error", 0.01))
        case "top_k":
            return _top(values, agg.params["k"])
    raise AssertionError(agg.kind)


def _sum(values: list[Any], kind: str, *, average: bool) -> Any:
    if not values:
        return None
    if isinstance(values[0], Decimal):
        return _decimal(values, kind, average=average)
    if isinstance(values[0], float):
        if not all(map(math.isfinite, values)):
            special = sum(value for value in values if not math.isfinite(value))
            return special / len(values) if average else special
        exact = _nearest(sum(map(Fraction, values), Fraction(0)))
        return exact / len(values) if average else exact
    whole = sum(values)
    if average:
        return float(whole) / len(values)
    return whole if -(2**63) <= whole < 2**63 else None


def _spread(values: list[Any], kind: str) -> Any:
    divisor = len(values) - (0 if kind.endswith("pop") else 1)
    if divisor < 1:
        return None
    # Decimals are converted to double first, as Spark does.
    numbers = [float(value) if isinstance(value, Decimal) else value for value in values]
    if not all(map(math.isfinite, numbers)):
        return math.nan
    exact = list(map(Fraction, numbers))
    mean = sum(exact, Fraction(0)) / len(exact)
    variance = sum(((value - mean) ** 2 for value in exact), Fraction(0)) / divisor
    result = _nearest(variance) if kind.startswith("var") else _root(variance)
    # Finite in a double, but the result of the division or the root is rounded once more.
    return Near(result, max(4.5e-16 * result, 5e-324)) if math.isfinite(result) else result


def _root(square: Fraction) -> float:
    bits = square.numerator.bit_length() - square.denominator.bit_length()
    shift = max(0, 400 - bits) // 2
    root = math.isqrt((square.numerator << 2 * shift) // square.denominator)
    return _nearest(Fraction(root, 1 << shift))


def _nearest(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _quantile(values: list[Any], q: float, error: float) -> Any:
    if not values:
        return None
    numbers = sorted((float(value) for value in values), key=rank)
    exact = numbers[math.floor(q * (len(numbers) - 1))]
    return Near(exact, abs(exact) * error * (1 + 1e-9)) if math.isfinite(exact) else exact


def _top(values: list[Any], k: int) -> list[dict[str, Any]]:
    counts = Counter(map(same, values))
    by_form = {same(value): value for value in values}
    ranked = sorted(counts, key=lambda form: (-counts[form], rank(by_form[form])))
    return [{"value": by_form[form], "count": counts[form]} for form in ranked[:k]]


def _decimal(values: list[Decimal], kind: str, *, average: bool) -> Decimal | None:
    """The sum or the average, rounded half up; null if it does not fit its type, or the sum does
    not fit 38 digits."""
    precision, scale = digits(kind)
    total = sum(map(Fraction, values), Fraction(0))
    fraction_digits = max(-int(value.as_tuple().exponent) for value in values)
    if abs(total) * 10**fraction_digits >= 10**38:
        return None
    scaled = (total / len(values) if average else total) * 10**scale
    with localcontext(prec=200, rounding=ROUND_HALF_UP):
        whole = (Decimal(scaled.numerator) / Decimal(scaled.denominator)).to_integral_value()
        return whole.scaleb(-scale) if abs(whole) < 10**precision else None
