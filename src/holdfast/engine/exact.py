"""SQL for exact sums and accurate variances, with integers in digits of 28 bits.

A finite double is an integer times a power of two. It is multiplied by a power of two that depends
only on its *block* of 56 binary exponents, so that it becomes an integer of at most 111 bits, and
is split into four signed digits. The sums of the digits are exact in any order and grouping. The
block is a dimension of the partials; typical data has a single block. Block b starts at digit 2b,
so digits of several blocks can be added, too. Squares are split into eight digits in the same way.

The result is the exact sum, rounded once to the nearest double. The variance is computed from the
exact integer n * sum(x * x) - sum(x) ** 2, so no mean is too large for it.
"""

from __future__ import annotations

from collections.abc import Sequence

NAN, PLUS_INF, MINUS_INF = 1000, 1001, 1002
#: Part of the error of `short_sum_of_doubles`.
TOO_WIDE = "holdfast: the numbers of a sum are too wide for decimal arithmetic"
_MASK = "268435455L"
_2P28, _2P56 = "268435456L", "72057594037927936D"
#: Exponent of the power of two by which numbers of block 0 are multiplied. The lowest bit of such a
#: number has the exponent -72; two more bits allow for logarithms that are rounded across a border.
_SHIFT = 74
_2P74 = "18889465931478580854784D"


def block(x: str) -> str:
    """The block of a double, or one of the codes above. 0 and null are in block 0."""
    return (
        f"case when {x} is null or {x} = 0 then 0 when isnan({x}) then {NAN} "
        f"when {x} = double('Infinity') then {PLUS_INF} "
        f"when {x} = double('-Infinity') then {MINUS_INF} "
        f"when abs({x}) >= 9.5367431640625e-7D and abs({x}) < 68719476736D then 0 "
        f"else cast(floor((floor(log2(abs({x}))) + 20) / 56D) as int) end"
    )


def layers_of_double(x: str, name: str) -> list[dict[str, str]]:
    """Columns that split the double `x`, computed layer by layer: `{name}_e` is the block."""
    e, y, w = f"{name}_e", f"{name}_y", f"{name}_w"
    scaled = (
        f"case when {e} = 0 then coalesce({x}, 0D) * {_2P74} when {e} >= {NAN} then 0D "
        f"else {x} * pow(2D, 37 - 28 * {e}) * pow(2D, 37 - 28 * {e}) end"
    )
    return [
        {e: block(x)},
        {y: scaled},
        {w: f"cast({y} / {_2P56} as bigint)"},
        {f"{w}l": f"cast({y} - cast({w} as double) * {_2P56} as bigint)"},
    ]


def digits_of_double(name: str) -> list[str]:
    """Digits of a double, least significant first, from the columns of `layers_of_double`."""
    w = f"{name}_w"
    return [f"{w}l % {_2P28}", f"{w}l div {_2P28}", f"{w} % {_2P28}", f"{w} div {_2P28}"]


def digits_of_whole(x: str) -> list[str]:
    """Digits of an integer of 64 bits."""
    x = f"cast({x} as bigint)"
    return [f"{x} & {_MASK}", f"shiftright({x}, 28) & {_MASK}", f"shiftright({x}, 56)"]


def products_of(digits: Sequence[str]) -> list[str]:
    """The products of digits, by the position in the square to which they contribute."""
    products = []
    for place in range(2 * len(digits) - 1):
        pairs = [(i, place - i) for i in range(len(digits)) if i <= place - i < len(digits)]
        terms = [f"{'' if i == j else '2L * '}{digits[i]} * {digits[j]}" for i, j in pairs]
        products.append(" + ".join(terms))
    return products


def digits_of_square(products: Sequence[str]) -> list[str]:
    """Digits of a square from its products, each of which has up to 58 bits."""
    low = [f"({product} & {_MASK})" for product in products]
    high = [f"shiftright({product}, 28)" for product in products]
    return [
        " + ".join(part[at] for part, at in ((low, place), (high, place - 1)) if 0 <= at < len(low))
        for place in range(len(products) + 1)
    ]


def let(name: str, value: str, body: str) -> str:
    """`body`, in which `name` stands for `value`, computed once."""
    return f"transform(array({value}), {name} -> {body})[0]"


def short_sum_of_doubles(items: str, dim: str, digits: Sequence[str]) -> str:
    """As `sum_of_doubles`, for finite numbers of a single block whose scaled sum is an integer of
    at most 38 decimal digits. The text is a third as long: Spark analyses it at every step. Other
    numbers raise an error with the text `TOO_WIDE`."""
    first = f"{items}[0]"
    total = f"cast({first}.{digits[0]} as decimal(38,0))"
    for place, digit in enumerate(digits[1:], start=1):
        weight = f"{2 ** (28 * place)}BD"
        term = f"try_multiply(cast({first}.{digit} as decimal(38,0)), {weight})"
        total = f"try_add({total}, {term})"
    half = f"pow(2D, 28 * {first}.{dim} - 37)"
    only = f"size({items}) = 1 and {first}.{dim} < {NAN}"
    return (
        f"coalesce(if({only}, cast({total} as double) * {half} * {half}, null), "
        f"double(raise_error('{TOO_WIDE}')))"
    )


def sum_of_doubles(items: str, dim: str, digits: Sequence[str]) -> str:
    """The exact sum, rounded once. `items`: an array of structs, sorted by `dim`, the block; with
    the sums of the digits per block."""
    nan, plus, minus = (
        f"exists({items}, e -> e.{dim} = {code})" for code in (NAN, PLUS_INF, MINUS_INF)
    )
    value = _scaled(*_leading("d"), f"56 * {items}[0].{dim} - {_SHIFT}")
    exact = let("d", _gathered(items, dim, digits, 2), _with_leading("d", value))
    return (
        f"case when {nan} or ({plus} and {minus}) then double('NaN') "
        f"when {plus} then double('Infinity') when {minus} then double('-Infinity') "
        f"else {exact} end"
    )


def _gathered(items: str, dim: str, digits: Sequence[str], per_block: int) -> str:
    """The digits of all blocks as one array; its first element is the first digit of the first
    block. A block starts `per_block` digits after the one before."""
    one = f"array({', '.join(f'{items}[0].{digit}' for digit in digits)})"
    cases = " ".join(f"when {place} then e.{digit}" for place, digit in enumerate(digits))
    first = f"{items}[0].{dim} * {per_block}"
    last = f"{items}[size({items}) - 1].{dim} * {per_block} + {len(digits) - 1}"
    added = (
        f"aggregate({items}, 0L, (s, e) -> s + case p - e.{dim} * {per_block} {cases} else 0L end)"
    )
    return f"if(size({items}) = 1, {one}, transform(sequence({first}, {last}), p -> {added}))"


def _carry(digits: str, zero: str, combined: str) -> str:
    """Bring digits, of up to 63 bits each, to 28 bits by carrying: struct of `c`, -1 for a negative
    number, and `o`, the digits combined, least significant first. Two more digits are added."""
    return (
        f"aggregate(concat({digits}, array(0L, 0L)), named_struct('c', 0L, 'o', {zero}), "
        f"(s, v) -> named_struct('c', shiftright(s.c + v, 28), 'o', {combined}))"
    )


def _absolute(digits: str) -> str:
    """The digits of the absolute value, which may need to be carried again."""
    negative = (
        f"aggregate(concat({digits}, array(0L, 0L)), 0L, (s, v) -> shiftright(s + v, 28)) < 0"
    )
    return f"if({negative}, transform({digits}, v -> -v), {digits})"


def _with_leading(digits: str, body: str) -> str:
    """`body`, in which `t` is the absolute value of the number in hexadecimal text."""
    text = _carry("a", "''", f"concat(lpad(hex((s.c + v) & {_MASK}), 7, '0'), s.o)")
    return let("a", _absolute(digits), let("t", f"ltrim('0', {text}.o)", body))


def _leading(digits: str) -> tuple[str, str]:
    """The number as m * 2**e with a double m, rounded once: SQL for m and e within `_with_leading`.

    The first 15 characters of `t` have 57 to 60 significant bits. The last of them is a sticky bit:
    it is set if any later character is not 0. The conversion of a long to a double rounds to the
    nearest.
    """
    top = "cast(conv(rpad(substr(t, 1, 15), 15, '0'), 16, 10) as bigint)"
    more = "if(substr(t, 16) rlike '[1-9A-F]', 1L, 0L)"
    return f"if(a = {digits}, 1D, -1D) * cast({top} | {more} as double)", "4 * (length(t) - 15)"


def _scaled(number: str, exponent: str, more: str) -> str:
    """number * 2**(exponent + more) in two steps: the power alone may exceed a double."""
    half = f"cast(({exponent} + {more}) div 2 as int)"
    return f"{number} * pow(2D, {half}) * pow(2D, {exponent} + {more} - {half})"


def variance_of_doubles(
    items: str, dim: str, digits: Sequence[str], squares: Sequence[str], n: str, wanted: str
) -> str:
    sums, totals = _gathered(items, dim, digits, 2), _gathered(items, dim, squares, 4)
    shift = f"112 * {items}[0].{dim} - {2 * _SHIFT}"
    special = f"exists({items}, e -> e.{dim} >= {NAN})"
    return f"if({special}, double('NaN'), {_variance(sums, totals, n, shift, wanted)})"


def variance_of_whole(digits: Sequence[str], squares: Sequence[str], n: str, wanted: str) -> str:
    arrays = (f"array({', '.join(names)})" for names in (digits, squares))
    return _variance(next(arrays), next(arrays), n, "0", wanted)


def _variance(sums: str, squares: str, n: str, shift: str, wanted: str) -> str:
    """`wanted` (stddev, stddev_pop, variance or var_pop) from the digits of sum(x) and sum(x * x).
    `shift`: exponent of the last digit of n * sum(x * x) - sum(x) ** 2, an even number."""
    normal = f"concat(s.o, array((s.c + v) & {_MASK}))"
    a, b = (
        f"{_carry(digits, 'cast(array() as array<bigint>)', normal)}.o"
        for digits in (_absolute("k"), squares)
    )
    product = "coalesce(get(x.a, p - i), 0L) * x.a[i]"
    square = f"aggregate(sequence(0, size(x.a) - 1), 0L, (s, i) -> s + {product})"
    difference = (
        "transform(sequence(0, greatest(2 * size(x.a), size(x.b))), p -> "
        f"{n} * coalesce(get(x.b, p), 0L) - {square})"
    )
    number, exponent = _leading("d")
    least = "0" if wanted.endswith("pop") else "1"
    quotient = f"({number} / (cast({n} as double) * cast({n} - {least} as double)))"
    if wanted.startswith("stddev"):
        value = _scaled(f"sqrt({quotient})", f"cast({exponent} div 2 as int)", f"({shift}) div 2")
    else:
        value = _scaled(quotient, exponent, shift)
    body = let("d", difference, _with_leading("d", value))
    return let("k", sums, let("x", f"struct({a} as a, {b} as b)", body))
