"""Rows as an application has them, as a table of the declared schema.

A time is taken only if it is certain which instant is meant: Arrow itself would read a local time
without a zone as UTC and `time.time()` as microseconds, and the rows would lie in another hour or
year without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.errors import InputError
from holdfast.model.schema import schema_ddl
from holdfast.storage.rows import canonical


def fit(data: Any, schema: pa.Schema, source: str) -> pa.Table:
    """An Arrow table, a pandas DataFrame, a list of dicts or a dict of columns in the schema and in
    canonical form. Raises `InputError`, which names the column."""
    try:
        table = _table(data, schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as err:
        raise InputError(f"source {source!r}: rows do not fit ({err})") from None
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
        raise InputError(f"source {source!r}: {problem}; it was declared as ({schema_ddl(schema)})")
    try:
        for name in schema.names:
            _certain(name, table.schema.field(name).type, schema.field(name).type)
        return canonical(table.select(schema.names).cast(schema))
    except (pa.ArrowException, ValueError) as err:
        raise InputError(
            f"source {source!r}: rows do not fit ({schema_ddl(schema)}): {err}"
        ) from None


def without_zone(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is None)


def _certain(name: str, kind: pa.DataType, wanted: pa.DataType) -> None:
    if pa.types.is_timestamp(wanted) and without_zone(kind):
        raise ValueError(
            f"column {name!r} holds times without a time zone; say which is meant, for example "
            f"df[{name!r}].dt.tz_localize('UTC') in pandas or pc.assume_timezone in Arrow"
        )
    if pa.types.is_timestamp(wanted) and pa.types.is_floating(kind):
        raise ValueError(_floats(name))


def _floats(name: str) -> str:
    return (
        f"column {name!r} holds floating-point numbers where times are expected; give datetimes "
        "with a time zone, or whole microseconds since 1970, such as int(time.time() * 1e6)"
    )


def _table(data: Any, schema: pa.Schema) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if hasattr(data, "iloc"):
        return pa.Table.from_pandas(data, preserve_index=False)
    if isinstance(data, Mapping):
        return pa.table({name: _column(name, values, schema) for name, values in data.items()})
    if isinstance(data, Iterable):
        rows = [_named(row, schema) for row in data]
        names = dict.fromkeys(name for row in rows for name in row) if rows else schema.names
        return _table({name: [row.get(name) for row in rows] for name in names}, schema)
    raise TypeError(f"{type(data).__name__} is not a table, a DataFrame, a list of dicts or a dict")


def _named(row: Any, schema: pa.Schema) -> Mapping[str, Any]:
    """A row by the names of its columns; of a tuple they are those of the schema, in order."""
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "asDict"):  # Spark's Row
        named: Mapping[str, Any] = row.asDict()
        return named
    if isinstance(row, tuple | list) and len(row) == len(schema.names):
        return dict(zip(schema.names, row, strict=True))
    raise TypeError(
        f"expected rows as dicts, or as tuples of {len(schema.names)} values "
        f"({', '.join(schema.names)}), found {type(row).__name__} {repr(row)[:80]}"
    )


def _column(name: str, values: Any, schema: pa.Schema) -> pa.Array:
    """Arrays keep their type until the cast to the schema; Python values are given its type."""
    if isinstance(values, np.ndarray) or name not in schema.names:
        array = pa.array(values)
        if isinstance(values, np.ndarray) and without_zone(array.type):
            # NumPy knows no zones: its times are UTC by definition.
            array = array.cast(pa.timestamp(array.type.unit, tz="UTC"))
        return array
    kind, listed = schema.field(name).type, list(values)
    if pa.types.is_timestamp(kind):
        for value in listed:
            if isinstance(value, float | np.floating):
                raise TypeError(_floats(name))
            missing = value is None or value != value  # pandas' NaT is a datetime, too
            if isinstance(value, datetime) and not missing and value.utcoffset() is None:
                raise ValueError(
                    f"column {name!r}: {value.isoformat(sep=' ')} has no time zone; give "
                    "datetime.now(timezone.utc), or attach the zone that is meant with "
                    "value.replace(tzinfo=...)"
                )
    return pa.array(listed, kind, from_pandas=pa.types.is_timestamp(kind))
