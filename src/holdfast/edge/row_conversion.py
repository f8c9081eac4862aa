"""Converts rows of an application into a table of the declared schema.

A time is accepted only if it identifies one instant without doubt. Arrow itself would read a local
time without a zone as UTC, and `time.time()` as microseconds; the rows would silently land in
another hour or year.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.errors import InputError
from holdfast.model.schema import schema_ddl, type_ddl
from holdfast.storage.rows import canonical

#: Types of a single value, given where a column is expected.
_SINGLE = (str, bytes, int, float, bool, datetime)
#: The years 2001 to 2099, in microseconds since 1970.
_THIS_CENTURY_US = (978_307_200_000_000, 4_102_444_800_000_000)


def fit(data: Any, schema: pa.Schema, source: str, *, real_time: bool = False) -> pa.Table:
    """Convert an Arrow table, a pandas DataFrame, a list of dicts or a dict of columns to the
    schema, in canonical form. Raises `InputError`, which names the column. With `real_time`,
    integers in a time column that look like seconds or milliseconds of this century are refused."""
    try:
        table = _table(data, schema, real_time)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as err:
        raise InputError(f"source {source!r}: cannot convert the rows: {err}") from None
    if table.schema == schema:
        return canonical(table)
    unknown = [name for name in table.column_names if name not in schema.names]
    missing = [name for name in schema.names if name not in table.column_names]
    if unknown or missing:
        problem = " and ".join(
            text for text in (
                f"unknown column {', '.join(unknown)}" if unknown else "",
                f"missing column {', '.join(missing)}" if missing else "",
            ) if text
        )  # fmt: skip
        raise InputError(
            f"source {source!r}: {problem}; expected the declared columns ({schema_ddl(schema)})"
        )
    try:
        for name in schema.names:
            _certain(name, table.schema.field(name).type, schema.field(name).type)
            if real_time and pa.types.is_timestamp(schema.field(name).type):
                column = table.column(name)
                if pa.types.is_integer(column.type) and (first := column.drop_null().slice(0, 1)):
                    _check_unit(name, first[0].as_py())
        return canonical(table.select(schema.names).cast(schema))
    except (pa.ArrowException, ValueError) as err:
        raise InputError(
            f"source {source!r}: cannot convert the rows to ({schema_ddl(schema)}): {err}"
        ) from None


def without_zone(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is None)


def _certain(name: str, kind: pa.DataType, wanted: pa.DataType) -> None:
    if pa.types.is_timestamp(wanted) and without_zone(kind):
        raise ValueError(
            f"column {name!r}: expected times with a time zone, found times without a zone; attach "
            f"the zone, for example with df[{name!r}].dt.tz_localize('UTC') in pandas or "
            "pc.assume_timezone in Arrow"
        )
    if pa.types.is_timestamp(wanted) and pa.types.is_floating(kind):
        raise ValueError(_floats(name))


def _floats(name: str) -> str:
    return (
        f"column {name!r}: expected times, found floating-point numbers; pass datetimes with a "
        "time zone, or integer microseconds since 1970, such as int(time.time() * 1e6)"
    )


def _table(data: Any, schema: pa.Schema, real_time: bool) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if hasattr(data, "iloc"):
        return pa.Table.from_pandas(data, preserve_index=False)
    if isinstance(data, Mapping):
        if single := [n for n, v in data.items() if v is None or isinstance(v, _SINGLE)]:
            shown = _shown(data[single[0]])
            raise TypeError(
                f"column {single[0]!r}: expected a list of values, found {shown}; "
                "to push a single row, pass a list with one dict: [{...}]"
            )
        return pa.table(
            {name: _column(name, values, schema, real_time) for name, values in data.items()}
        )
    if isinstance(data, Iterable):
        rows = [_named(row, schema) for row in data]
        names = dict.fromkeys(name for row in rows for name in row) if rows else schema.names
        for number, row in enumerate(rows):
            if absent := [name for name in names if name in schema.names and name not in row]:
                raise TypeError(
                    f"row {number} has no {absent[0]!r}, which other rows have; write None for a "
                    "missing value"
                )
        columns = {name: [row.get(name) for row in rows] for name in names}
        return _table(columns, schema, real_time)
    raise TypeError(
        "expected an Arrow table, a pandas DataFrame, a list of dicts or a dict of columns, found "
        f"{type(data).__name__}"
    )


def _named(row: Any, schema: pa.Schema) -> Mapping[str, Any]:
    """A row as a mapping of column names; the values of a tuple follow the order of the schema."""
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "asDict"):  # Spark's Row
        named: Mapping[str, Any] = row.asDict()
        return named
    if isinstance(row, tuple | list) and len(row) == len(schema.names):
        return dict(zip(schema.names, row, strict=True))
    length = f" of {len(row)} values" if isinstance(row, tuple | list) else ""
    raise TypeError(
        f"expected rows as dicts, or as tuples of {len(schema.names)} values "
        f"({', '.join(schema.names)}), found {_shown(row)}{length}; list every column, with None "
        "for a missing value"
    )


def _column(name: str, values: Any, schema: pa.Schema, real_time: bool) -> pa.Array:
    """Build a column. NumPy arrays keep their type until the cast to the schema; Python values get
    the type of the schema at once."""
    if isinstance(values, np.ndarray) or name not in schema.names:
        array = pa.array(values)
        if isinstance(values, np.ndarray) and without_zone(array.type):
            # NumPy has no time zones: its times are UTC by definition.
            array = array.cast(pa.timestamp(array.type.unit, tz="UTC"))
        return array
    kind, listed = schema.field(name).type, list(values)
    if pa.types.is_timestamp(kind):
        for value in listed:
            if isinstance(value, float | np.floating):
                raise TypeError(_floats(name))
            if isinstance(value, str):
                raise TypeError(
                    f"column {name!r}: expected a datetime with a time zone or integer "
                    f"microseconds since 1970, found {_shown(value)}; use "
                    "datetime.fromisoformat(text), and make sure that the text includes an offset"
                )
            if real_time and isinstance(value, int):
                _check_unit(name, value)
            missing = value is None or value != value  # NaT of pandas is a datetime, too
            if isinstance(value, datetime) and not missing and value.utcoffset() is None:
                raise ValueError(
                    f"column {name!r}: expected a datetime with a time zone, found "
                    f"{value.isoformat(sep=' ')} without a zone; use datetime.now(timezone.utc), "
                    "or attach the zone with value.replace(tzinfo=...)"
                )
    try:
        return _array(listed, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise TypeError(_misfit(name, listed, kind)) from None


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind):
        for value in values:  # Arrow would truncate
            if isinstance(value, float | np.floating) and not value.is_integer():
                raise ValueError(value)
    return pa.array(values, kind, from_pandas=pa.types.is_timestamp(kind))


def _misfit(name: str, values: list[Any], kind: pa.DataType) -> str:
    """Describe the first value that does not fit the type of its column."""
    for number, value in enumerate(values):
        try:
            _array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return (
                f"column {name!r}: expected {type_ddl(kind)}, found {_shown(value)} in row "
                f"{number}; convert the value, or declare the column with another type"
            )
    return (
        f"column {name!r}: expected {type_ddl(kind)}, found values of several types; convert them"
    )


def _check_unit(name: str, number: int) -> None:
    """Refuse a number that is a time of this century in seconds or milliseconds. Read as
    microseconds, the number would be a time in the first weeks of 1970."""
    for unit, factor in (("seconds", 1_000_000), ("milliseconds", 1_000)):
        if _THIS_CENTURY_US[0] <= number * factor < _THIS_CENTURY_US[1]:
            raise ValueError(
                f"column {name!r}: expected microseconds since 1970, found {number}, which looks "
                f"like {unit}; multiply the values by {factor:_}"
            )


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
