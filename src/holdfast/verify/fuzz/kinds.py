"""Column types as DDL text, their values, and how Spark compares them.

A value is held as plain Python: timestamps as microseconds and dates as days since 1970, decimals
as Decimal, structs as dicts, arrays as lists, everything else as itself.
"""

from __future__ import annotations

import math
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.model.schema import arrow_schema

TIMESTAMP = "timestamp"
WHOLE = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_DOUBLES = (0.0, -0.0, 1.0, -1.0, 0.1, 0.5, 1e16, -1e16, 1e300, -1e300, 5e-324, 1e-30, math.nan,
            math.inf, -math.inf, 2.0**-20, 3.0, 1e30)  # fmt: skip
_TEXTS = ("a", "b", "", "A", "ключ", "🔑", "Straße", "it's", "a\\b", " a", "0", "null")
_STRUCT, _ARRAY = "struct<p:int,q:string>", "array<int>"
DECIMALS = ("decimal(5,2)", "decimal(12,3)", "decimal(38,10)", "decimal(20,0)", "decimal(38,38)")
#: Types of the columns of sources.
ALL = (
    "boolean", *WHOLE, "float", "double", *DECIMALS, "string", "binary", "date", TIMESTAMP, _STRUCT,
    _ARRAY,
)  # fmt: skip
#: Types of key columns that are drawn more often than others.
COMMON_KEYS = ("string", "int", "bigint", "double")


def is_float(kind: str) -> bool:
    return kind in ("float", "double")


def is_decimal(kind: str) -> bool:
    return kind.startswith("decimal")


def is_number(kind: str) -> bool:
    return kind in WHOLE or is_float(kind) or is_decimal(kind)


def is_nested(kind: str) -> bool:
    return "<" in kind


def digits(kind: str) -> tuple[int, int]:
    """Precision and scale of a decimal."""
    precision, scale = kind[len("decimal(") : -1].split(",")
    return int(precision), int(scale)


def label(kind: str) -> str:
    """The name of a type in reports."""
    return kind.split("<")[0].split("(")[0]


def pool(kind: str) -> list[Any]:
    """Values that are drawn for a column. A few values, so that equal keys are frequent."""
    if kind == "boolean":
        return [True, False]
    if kind in WHOLE:
        most = 2 ** (WHOLE[kind] - 1) - 1
        return [0, 1, 2, 3, 7, -1, -5, 100, most, -most - 1]
    if is_float(kind):
        return [as_float(value, kind) for value in _DOUBLES]
    if is_decimal(kind):
        precision, scale = digits(kind)
        most = 10**precision - 1
        wholes = [0, 1, 2, -1, 5, 10, 99, most, -most, 10 ** min(scale, precision - 1)]
        return [Decimal(f"{whole}E-{scale}") for whole in wholes]
    if kind == "string":
        return list(_TEXTS)
    if kind == "binary":
        return [b"", b"\x00", b"a", b"\xff\xfe"]
    if kind == "date":
        return [0, 1, -1, 19_000]
    if kind == TIMESTAMP:
        return [0, 1, -1, 1_700_000_000_000_000]
    if kind == _STRUCT:
        return [{"p": 1, "q": "a"}, {"p": None, "q": "a"}, {"p": 1, "q": None}, {"p": 2, "q": ""}]
    if kind == _ARRAY:
        return [[], [1], [1, 2], [None], [2, 1]]
    raise AssertionError(kind)


def value(rng: random.Random, kind: str, few: list[Any]) -> Any:
    """A random value of a column: null, one of a few, or for numbers any other."""
    luck = rng.random()
    if luck < 0.1:
        return None
    if luck < 0.8 or not (kind in WHOLE or is_float(kind)):
        return rng.choice(few)
    if is_float(kind):
        return as_float(rng.gauss(0.0, 1.0) * 10.0 ** rng.randint(-6, 6), kind)
    return rng.randint(-100, 100)


def as_float(number: float, kind: str) -> float:
    """The nearest value of a floating type."""
    if kind == "double":
        return number
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def arrow_of(values: list[Any], kind: str) -> pa.Array:
    wanted = arrow_schema(f"x {kind}").field(0).type
    if kind == "date":
        return pa.array(values, pa.int32()).cast(wanted)
    if is_float(kind):
        return pa.array(values, wanted, from_pandas=False)
    return pa.array(values, wanted)


def plain(column: pa.ChunkedArray) -> list[Any]:
    """The values of an Arrow column in plain Python."""
    values: list[Any] = column.cast(_numeric(column.type)).to_pylist()
    return values


def _numeric(kind: pa.DataType) -> pa.DataType:
    """The type with times and dates as integers."""
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_date(kind):
        return pa.int32()
    if pa.types.is_list(kind):
        return pa.list_(_numeric(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([of.with_type(_numeric(of.type)) for of in kind])
    return kind


def rank(value: Any) -> tuple[Any, ...]:
    """A sort key by Spark's order of values: null first, NaN greatest, text by its bytes."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (2,) if math.isnan(value) else (1, value + 0.0)
    if isinstance(value, str):
        return (1, value.encode())
    return (1, value)


def same(value: Any) -> Any:
    """A hashable form that is equal for values that Spark groups together."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, Decimal):
        return ("decimal", Fraction(value))
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, list):
        return ("list", *map(same, value))
    if isinstance(value, dict):
        return ("struct", *((name, same(item)) for name, item in value.items()))
    return value
