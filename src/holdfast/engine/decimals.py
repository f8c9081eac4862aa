"""SQL for exact sums and averages of decimals.

Spark's arithmetic on decimals drops fractional digits as soon as a type would need more than 38
digits, even if the value does not. Therefore the last step works on the digits as text.
"""

from __future__ import annotations

from decimal import Decimal

from holdfast.engine.exact import let


def _unit(scale: int) -> str:
    """The value of the 21st digit from the right."""
    return f"{format(Decimal(1).scaleb(20 - scale), 'f')}BD"


def parts_of(x: str, scale: int) -> tuple[str, str]:
    """A decimal of up to 38 digits in two parts: the first 18 digits as an integer, and the last
    20. The sums of the parts do not overflow, so they do not depend on the order of rows."""
    unit = _unit(scale)
    return f"cast({x} div {unit} as decimal(38,0))", f"cast({x} % {unit} as decimal(38,{scale}))"


def total_of(high: str, low: str, scale: int) -> str:
    """The decimal(38, scale) whose parts have these sums; null if it has more than 38 digits."""
    unit, last = _unit(scale), f"{low} % {_unit(scale)}"
    # As an integer: a sum of decimals with 38 fractional digits would have only 37 of them.
    integer = f"cast({_last_20(_digits(last))} as decimal(20,0)) * if({_negative(last)}, -1, 1)"
    carried = f"{high} + cast({low} div {unit} as decimal(38,0)) as h, {integer} as l"
    # Both parts get the same sign.
    borrowed = ", ".join(
        f"case when p.h > 0 and p.l < 0 then {less} when p.h < 0 and p.l > 0 then {more} "
        f"else p.{part} end as {part}"
        for part, less, more in (
            ("h", "p.h - 1", "p.h + 1"),
            ("l", f"p.l + {10**20}BD", f"p.l - {10**20}BD"),
        )
    )
    text = f"concat({_digits('q.h')}, {_last_20(_digits('q.l'))})"
    value = f"try_cast({_number('q.h < 0 or q.l < 0', text, scale)} as decimal(38,{scale}))"
    return let("p", f"struct({carried})", let("q", f"struct({borrowed})", value))


def _last_20(digits: str) -> str:
    return f"right(concat('{'0' * 20}', {digits}), 20)"


def average_of(total: str, n: str, precision: int, scale: int) -> str:
    """`total`, a decimal(38, scale), divided by `n`, with four more fractional digits: rounded half
    up, as Spark does. A long division, nine digits at a time."""
    fine = min(scale + 4, 38)
    digits = f"right(concat('{'0' * 45}', {_digits('t')}, '{'0' * (fine - scale)}'), 45)"
    next_nine = "(s.r * 1000000000L + cast(substr(u, i, 9) as bigint))"
    divided = (
        "aggregate(sequence(1, 37, 9), named_struct('r', 0L, 'o', ''), (s, i) -> named_struct("
        f"'r', {next_nine} % {n}, "
        f"'o', concat(s.o, lpad(cast({next_nine} div {n} as string), 9, '0'))))"
    )
    up = f"if(2 * q.r >= {n}, 1BD, 0BD)"
    quotient = f"cast(try_add(try_cast(q.o as decimal(38,0)), {up}) as string)"
    wanted = f"decimal({min(38, precision + 4)},{fine})"
    value = f"try_cast({_number(_negative('t'), quotient, fine)} as {wanted})"
    body = let("t", total, let("u", digits, let("q", divided, value)))
    return f"if({n} = 0, null, {body})"


def _negative(number: str) -> str:
    """Compared with an integer, a decimal would lose digits that do not fit the common type."""
    return f"cast({number} as double) < 0D"


def _digits(number: str) -> str:
    """The digits of a decimal, as text. Spark's `abs` rounds to 34 digits."""
    return f"translate(cast({number} as string), '-.', '')"


def _number(negative: str, digits: str, scale: int) -> str:
    """Digits as the text of a number of which the last `scale` ones are a fraction."""
    sign, padded = f"if({negative}, '-', '')", f"concat('{'0' * 39}', {digits})"
    if scale == 0:
        return f"concat({sign}, {padded})"
    return let("w", padded, f"concat({sign}, left(w, length(w) - {scale}), '.', right(w, {scale}))")
