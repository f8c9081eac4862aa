"""Reads tables from CSV, JSON-lines and Parquet files."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from holdfast.edge.row_conversion import without_zone
from holdfast.errors import InputError

#: Bytes that are read to check whether a file is readable.
_HEAD_BYTES = 1 << 20


def read_table(path: str, schema: pa.Schema, zone: str | None, *, head: bool = False) -> pa.Table:
    """The rows of a file; with `head` only the first rows (CSV, JSON) or the schema (Parquet).
    Times that are written without a zone are interpreted in `zone`."""
    kind = os.path.splitext(path)[1].lower()
    times = [field.name for field in schema if pa.types.is_timestamp(field.type)]
    text_schema = schema
    for name in times:  # Arrow's JSON reader would read every time as UTC
        text_schema = text_schema.set(
            text_schema.get_field_index(name), pa.field(name, pa.string())
        )
    try:
        if kind == ".parquet":
            table = pq.read_schema(path).empty_table() if head else pq.read_table(path)
        elif kind in (".json", ".jsonl", ".ndjson"):
            options = pa_json.ParseOptions(explicit_schema=text_schema)
            table = pa_json.read_json(_opened(path, head), parse_options=options)
        elif kind in (".csv", ".tsv"):
            convert = pa_csv.ConvertOptions(
                column_types={field.name: field.type for field in text_schema},
                strings_can_be_null=True,
            )
            parse = pa_csv.ParseOptions(delimiter="\t" if kind == ".tsv" else ",")
            table = pa_csv.read_csv(
                _opened(path, head), convert_options=convert, parse_options=parse
            )
        else:
            raise InputError(
                f"{path}: expected a .csv, .tsv, .json, .jsonl, .ndjson or .parquet file, found "
                f"{kind!r}; convert the file"
            )
    except (pa.ArrowException, OSError, KeyError) as err:
        raise InputError(f"{path} cannot be read: {err}") from None
    for name in times:
        if name in table.column_names:
            index = table.column_names.index(name)
            column = _with_zone(table.column(index), zone, f"{path}, column {name!r}")
            table = table.set_column(index, name, column)
    return table


def _opened(path: str, head: bool) -> pa.NativeFile | str:
    if not head:
        return path
    with open(path, "rb") as file:
        data = file.read(_HEAD_BYTES)
        if file.read(1):
            data = data[: data.rfind(b"\n") + 1]
    return pa.BufferReader(data)


def _with_zone(column: pa.ChunkedArray, zone: str | None, where: str) -> pa.ChunkedArray:
    try:
        if pa.types.is_string(column.type):
            column = column.cast(pa.timestamp("us", tz="UTC" if zone is None else None))
        if not without_zone(column.type):
            return column
        if zone is not None:
            return pc.assume_timezone(column, zone)
    except pa.ArrowException as err:
        if "expected no zone offset" in str(err):
            raise InputError(
                f"{where}: the times already have an offset; remove timezone={zone!r}"
            ) from None
        if "expected a zone offset" not in str(err):
            raise InputError(f"{where}: {err}") from None
    raise InputError(
        f"{where}: expected times with a zone, found times without a zone; declare the zone, for "
        "example hf.Replay(path, timezone='UTC')"
    )
