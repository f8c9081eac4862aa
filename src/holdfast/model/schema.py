"""Schemas as Spark DDL text (`ts timestamp, src string`) and as Arrow schemas.

Sources, clients and the log run without a JVM, so this module parses DDL without Spark. Only types
with one canonical Arrow form are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import pyarrow as pa

from holdfast.errors import InputError

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(), "tinyint": pa.int8(), "byte": pa.int8(), "smallint": pa.int16(),
    "short": pa.int16(), "int": pa.int32(), "integer": pa.int32(), "bigint": pa.int64(),
    "long": pa.int64(), "float": pa.float32(), "real": pa.float32(), "double": pa.float64(),
    "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}  # fmt: skip
_CANONICAL = {pa.bool_(): "boolean", pa.int8(): "tinyint", pa.int16(): "smallint",
              pa.int32(): "int", pa.int64(): "bigint", pa.float32(): "float",
              pa.float64(): "double", pa.string(): "string", pa.large_string(): "string",
              pa.binary(): "binary", pa.large_binary(): "binary", pa.date32(): "date"}  # fmt: skip
#: Columns of dead letters and of `CorrectedTable`.
REJECTED_AT, REASON, STABILITY = _RESERVED = ("_rejected_at", "_reason", "_stability")
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|\w+|[<>(),:])")


class _Reader:
    """Recursive descent parser for one DDL text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        at = 0
        stripped = text.rstrip()
        while at < len(stripped):
            match = _TOKEN.match(stripped, at)
            if match is None:
                raise self.bad(f"unexpected character {stripped[at]!r}")
            self.tokens.append(match[1])
            at = match.end()
        self.at = 0

    def bad(self, why: str) -> InputError:
        return InputError(
            f"schema {self.text!r}: {why}; write it as 'name type, name type', for example "
            "'ts timestamp, src string, bytes long'"
        )

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise self.bad(
                f"expected {expected or 'more'} {'before ' + token if token else 'at the end'}"
            )
        self.at += 1
        return token

    def number(self) -> int:
        token = self.take()
        if not token.isdecimal():
            raise self.bad(f"expected a number instead of {token!r}")
        return int(token)

    def fields(self) -> list[pa.Field]:
        fields: list[pa.Field] = []
        while True:
            raw = self.take()
            name = raw[1:-1].replace("``", "`") if raw.startswith("`") else raw
            if self.peek() == ":":
                self.take()
            kind = self.type()
            nullable = True
            if self.peek().lower() == "not":
                self.take()
                if self.take().lower() != "null":
                    raise self.bad("expected NULL after NOT")
                nullable = False
            fields.append(pa.field(name, kind, nullable))
            if self.peek() != ",":
                return fields
            self.take(",")

    def type(self) -> pa.DataType:
        word = self.take().lower()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if word in ("decimal", "dec", "numeric"):
            precision, scale = 10, 0
            if self.peek() == "(":
                self.take("(")
                precision = self.number()
                if self.peek() == ",":
                    self.take(",")
                    scale = self.number()
                self.take(")")
            if not 1 <= precision <= 38 or scale > precision:
                raise self.bad(f"decimal({precision},{scale}) must have 1 to 38 digits, and at "
                               "most all of them after the point")  # fmt: skip
            return pa.decimal128(precision, scale)
        if word == "array":
            self.take("<")
            inner = self.type()
            self.take(">")
            return pa.list_(inner)
        if word == "map":
            self.take("<")
            key = self.type()
            self.take(",")
            value = self.type()
            self.take(">")
            return pa.map_(key, value)
        if word == "struct":
            self.take("<")
            fields = self.fields()
            self.take(">")
            return pa.struct(fields)
        if word == "timestamp_ntz":
            raise self.bad("timestamp_ntz does not define an instant; use timestamp")
        raise self.bad(f"unknown type {word!r}")


@lru_cache(maxsize=1024)
def arrow_schema(ddl: str) -> pa.Schema:
    reader = _Reader(ddl)
    if not reader.tokens:
        raise reader.bad("it is empty")
    fields = reader.fields()
    if reader.peek():
        raise reader.bad(f"unexpected {reader.peek()!r}")
    twice = columns_twice([field.name for field in fields])
    if twice:
        raise reader.bad(f"column {', '.join(twice)} occurs twice")
    return pa.schema([pa.field(f.name, f.type) for f in fields])


def ddl_of(schema: object, of: str) -> str:
    """The DDL text of a schema given as DDL, dict, Arrow schema or StructType."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, pa.Schema):
        return schema_ddl(schema)
    kinds: dict[object, object] | None = None
    if isinstance(schema, Mapping):
        kinds = dict(schema)
    elif hasattr(schema, "fields"):  # Spark's StructType, which is not imported here
        kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if not kinds or not all(isinstance(text, str) for pair in kinds.items() for text in pair):
        raise InputError(
            f"{of}: expected a schema as text such as 'ts timestamp, src string', a dict of column "
            "and type (both as text), a StructType or an Arrow schema, found "
            f"{type(schema).__name__} {repr(schema)[:80]}"
        )
    return ", ".join(f"{_quoted(str(name))} {kind}" for name, kind in kinds.items())


def columns_twice(names: list[str]) -> list[str]:
    """Duplicate names, in lower case: Spark's column names are case-insensitive."""
    lower = [name.lower() for name in names]
    return sorted({name for name in lower if lower.count(name) > 1})


def check_names(names: Iterable[str], *, of: str) -> None:
    """Raise InputError for column names that Holdfast needs itself."""
    _refuse([name for name in names if name.startswith("__")], of)


def check_edge_names(names: Iterable[str], *, of: str) -> None:
    """The same for sources and outputs, to whose rows Holdfast adds columns."""
    _refuse([name for name in names if name.startswith("__") or name.lower() in _RESERVED], of)


def _refuse(taken: list[str], of: str) -> None:
    if taken:
        raise InputError(
            f"{of}: column {taken[0]!r}: this name is reserved, as are all names that start with "
            "two underscores; rename the column"
        )


def type_ddl(kind: pa.DataType) -> str:
    if kind in _CANONICAL:
        return _CANONICAL[kind]
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_map(kind):
        return f"map<{type_ddl(kind.key_type)},{type_ddl(kind.item_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{type_ddl(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ",".join(f"{_quoted(f.name)}:{type_ddl(f.type)}" for f in kind) + ">"
    if pa.types.is_null(kind):
        return "void"
    raise InputError(f"Arrow type {kind} is not supported in a Holdfast schema; cast it first")


def schema_ddl(schema: pa.Schema) -> str:
    """The canonical DDL text: equal schemas have equal texts."""
    return ", ".join(f"{_quoted(field.name)} {type_ddl(field.type)}" for field in schema)


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else "`" + name.replace("`", "``") + "`"


def check_time(schema: pa.Schema, time: str, *, of: str, option: str = "time") -> str | None:
    """The reason why `time` cannot be the time column of `schema`; None if it can. `option`: the
    one that names the column."""
    if time not in schema.names:
        return (
            f"{of}: no time column {time!r} among the columns {', '.join(schema.names)}; name one "
            f"of the timestamp columns with {option}="
        )
    kind = schema.field(time).type
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return f"{of}: time column {time!r} is {type_ddl(kind)}; it must be a timestamp"
    return None
