"""Schemas whose fields may all be null."""

from __future__ import annotations

import pyarrow as pa


def nullable(rows: pa.Table) -> pa.Table:
    """The rows with all fields nullable. Spark derives other nullability for new panes than for
    merged ones."""
    schema = nullable_schema(rows.schema)
    return rows if rows.schema.equals(schema) else rows.cast(schema)


def nullable_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, _nullable(f.type)) for f in schema])


def _nullable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _nullable(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _nullable(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _nullable(kind.item_type))
    return kind
