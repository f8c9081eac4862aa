"""Expressions and conditions of random networks: as Spark SQL, and as Python over one row.

An expression is a list: its function, a column, further arguments. Conditions are comparisons of a
column with a literal, combined by `and`, `or` and `not`, with SQL's three truth values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engine.sql import quoted
from holdfast.verify.fuzz.case import Expression
from holdfast.verify.fuzz.kinds import TIMESTAMP, is_decimal, is_float, rank


def sql(expression: Expression, columns: Mapping[str, str]) -> str:
    """An expression as SQL text."""
    function, column = expression[0], quoted(expression[1])
    match function:
        case "column":
            return column
        case "modulo":
            return f"{column} % {expression[2]}"
        case "bigint" | "double" | "string":
            return f"cast({column} as {function})"
        case "negative":
            return f"-{column}"
        case "half":
            return f"{column} * 0.5D"
        case "length":
            return f"length({column})"
        case "is_null":
            return f"{column} is null"
        case "coalesce":
            return f"coalesce({column}, {literal(expression[2], columns[expression[1]])})"
    raise AssertionError(function)


def evaluated(expression: Expression, row: Mapping[str, Any]) -> Any:
    function, value = expression[0], row[expression[1]]
    if function == "is_null":
        return value is None
    if function == "coalesce":
        return expression[2] if value is None else value
    if value is None:
        return None
    match function:
        case "column" | "bigint":
            return value
        case "modulo":
            rest = abs(value) % expression[2]
            return rest if value >= 0 else -rest
        case "double":
            return float(value)
        case "string":
            return str(value)
        case "negative":
            return -value
        case "half":
            return value * 0.5
        case "length":
            return len(value)
    raise AssertionError(function)


def condition_sql(condition: Expression, columns: Mapping[str, str]) -> str:
    match condition:
        case ["and" | "or" as word, one, other]:
            return f"({condition_sql(one, columns)}) {word} ({condition_sql(other, columns)})"
        case ["not", one]:
            return f"not ({condition_sql(one, columns)})"
        case ["is_null", column]:
            return f"{quoted(column)} is null"
        case [comparison, column, value]:
            return f"{quoted(column)} {comparison} {literal(value, columns[column])}"
    raise AssertionError(condition)


def holds(condition: Expression, row: Mapping[str, Any]) -> bool | None:
    """True, False or None (unknown)."""
    match condition:
        case ["and", one, other]:
            sides = (holds(one, row), holds(other, row))
            return False if False in sides else None if None in sides else True
        case ["or", one, other]:
            sides = (holds(one, row), holds(other, row))
            return True if True in sides else None if None in sides else False
        case ["not", one]:
            side = holds(one, row)
            return None if side is None else not side
        case ["is_null", column]:
            return row[column] is None
        case [comparison, column, value]:
            if row[column] is None:
                return None
            left, right = rank(row[column]), rank(value)
            return {"=": left == right, "<": left < right, ">=": left >= right}[comparison]
    raise AssertionError(condition)


def literal(value: Any, kind: str) -> str:
    """A value as SQL text."""
    if value is None:
        return f"cast(null as {kind})"
    if kind == "boolean":
        return str(value).lower()
    if is_float(kind):
        return f"cast('{value!r}' as {kind})"
    if kind == "string":
        text = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{text}'"
    if kind == "binary":
        return f"X'{value.hex()}'"
    if kind == "date":
        return f"date_from_unix_date({value})"
    if kind == TIMESTAMP:
        return f"timestamp_micros({value}L)"
    if is_decimal(kind):
        return f"cast('{value:f}' as {kind})"
    return f"cast('{value}' as {kind})"
