"""The canonical form of rows as Arrow tables: equal rows have the same bits on every replica.

Replicas and recovery rely on results that are the same to the bit (ARCHITECTURE.md). Equal rows can
differ in two ways: values with several encodings (-0.0, the many NaNs, units and zones of
timestamps, dictionaries) and the order of rows. This module defines one encoding and one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as at

from holdfast.errors import InputError
from holdfast.storage.hashing import as_list, hash_array, mix, starts_of, table_digest

#: The type that Spark calls `timestamp`. Times without a zone are taken as UTC.
TIMESTAMP = pa.timestamp("us", tz="UTC")


def canonical(table: pa.Table) -> pa.Table:
    """The same rows in the same order, in canonical encoding; one chunk per column, no metadata."""
    names, columns = table.column_names, []
    for name, column in zip(names, table.columns, strict=True):
        try:
            columns.append(_canonical(column.combine_chunks()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
            raise InputError(f"column {name!r} of type {column.type}: {err}") from err
    return pa.Table.from_arrays(columns, names=names)


def digest(table: pa.Table) -> str:
    """16 hex digits that are equal for tables with the same rows in any order."""
    return f"{table_digest(canonical(table)):016x}"


def sort_canonical(table: pa.Table, time: str) -> pa.Table:
    """The rows in canonical form and order: by time, then by every other column, nulls first.

    Nested columns, which have no order, are ordered by their hash. Rows that tie are equal, so any
    input order gives the same table.
    """
    table = canonical(table)
    _time_column(table, time)
    names = [time, *(name for name in table.column_names if name != time)]
    keys = {
        f"k{place}": hash_array(column) if at.is_nested(column.type) else column
        for place, column in enumerate(table.column(name).combine_chunks() for name in names)
        if not at.is_null(column.type)
    }
    order = pc.sort_indices(
        pa.table(keys),
        sort_keys=[(key, "ascending", "at_start") for key in keys],
    )
    return table.take(order).combine_chunks()


def parts_of(table: pa.Table, keys: Sequence[str], of: int) -> list[pa.Table]:
    """Splits the rows into `of` partitions by key, keeping their order."""
    partition = key_hashes(table, keys) % np.uint64(of)
    return [table.filter(pa.array(partition == number)) for number in range(of)]


def key_hashes(table: pa.Table, keys: Sequence[str]) -> npt.NDArray[np.uint64]:
    """A hash of the key of each row. A key has the same hash on every machine, whatever the order
    of `keys`, and in all types of a `family`."""
    hashes = np.zeros(table.num_rows, dtype=np.uint64)
    for key in sorted(keys):
        column = _widest(_canonical(table.column(key).combine_chunks()))
        hashes = mix(hashes + hash_array(column))
    return hashes


def family(kind: pa.DataType) -> pa.DataType:
    """The widest of the types whose equal values are routed to the same partition."""
    if at.is_integer(kind):
        return pa.int64()
    if at.is_floating(kind):
        return pa.float64()
    if at.is_decimal(kind):
        return pa.decimal256(76, 38)  # holds every decimal of Spark exactly
    if at.is_timestamp(kind):
        return TIMESTAMP
    if at.is_struct(kind):
        return pa.struct([item.with_type(family(item.type)) for item in kind])
    if at.is_list(kind) or at.is_large_list(kind):
        return pa.list_(family(kind.value_type))
    return _plain(kind)


#: Decimal digits of each integer type.
_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 20}


def compared_exactly(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether decimals, and decimals and integers, have a common type of 38 digits. Otherwise Spark
    compares them without their last digits. Other types are compared as Spark documents."""
    kinds = [pa.decimal128(_DIGITS[kind], 0) if kind in _DIGITS else kind for kind in (one, other)]
    if not (at.is_decimal(one) or at.is_decimal(other)) or not all(map(at.is_decimal, kinds)):
        return True
    whole = max(kind.precision - kind.scale for kind in kinds)
    return bool(whole + max(kind.scale for kind in kinds) <= 38)


def routed_alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether values of both types that Spark compares as equal are routed to the same
    partition."""
    if at.is_decimal(one) and at.is_decimal(other):
        return compared_exactly(one, other)
    if at.is_struct(one) and at.is_struct(other) and one.num_fields == other.num_fields:
        pairs = zip(one, other, strict=True)
        return all(routed_alike(left.type, right.type) for left, right in pairs)
    if at.is_list(one) and at.is_list(other):
        return routed_alike(one.value_type, other.value_type)
    return bool(family(one) == family(other))


def _widest(array: pa.Array) -> pa.Array:
    wanted = family(array.type)
    return array if array.type == wanted else array.cast(wanted)


def times_us(table: pa.Table, time: str) -> npt.NDArray[np.int64]:
    """The rows' times in microseconds since 1970."""
    column = _canonical(_time_column(table, time).combine_chunks())
    if column.null_count:
        raise InputError(
            f"time column {time!r} is null in {column.null_count} of {len(column)} rows; "
            "every row needs a time: fill in the times, or drop these rows"
        )
    result: npt.NDArray[np.int64] = column.cast(pa.int64()).to_numpy()
    return result


def _time_column(table: pa.Table, time: str) -> pa.ChunkedArray:
    if table.column_names.count(time) != 1:
        raise InputError(
            f"expected exactly one column {time!r}, found the columns {table.column_names}; add or "
            "rename a column"
        )
    column = table.column(time)
    if not at.is_timestamp(column.type):
        raise InputError(
            f"time column {time!r}: expected type timestamp, found {column.type}; cast the column"
        )
    return column


#: Type ids of types with a single encoding of each value. Ids, because hashing an Arrow type is
#: slow: its hash is computed from its text.
_PLAIN = frozenset(
    kind.id
    for kind in (
        pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.string(), pa.binary(),
        pa.date32(),
    )
)  # fmt: skip


def _canonical(array: pa.Array) -> pa.Array:
    kind = array.type
    if kind.id in _PLAIN or kind == TIMESTAMP:
        return array
    if isinstance(kind, pa.ExtensionType):
        return _canonical(array.storage)
    if at.is_dictionary(kind):
        return _canonical(array.dictionary_decode())
    if at.is_float64(kind) or at.is_float32(kind):
        return _canonical_floats(array)
    if at.is_timestamp(kind):
        return _canonical_times(array)
    if at.is_nested(kind):
        return _canonical_nested(array)
    return array.cast(_plain(kind))


def _plain(kind: pa.DataType) -> pa.DataType:
    """The canonical type among the types that hold the same values and are the same to Spark."""
    if at.is_large_string(kind) or at.is_string_view(kind):
        return pa.string()
    if at.is_large_binary(kind) or at.is_binary_view(kind) or at.is_fixed_size_binary(kind):
        return pa.binary()
    if at.is_decimal32(kind) or at.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if at.is_date64(kind):
        return pa.date32()
    if at.is_time32(kind):
        return pa.time64("us")
    return pa.float32() if at.is_float16(kind) else kind


def _canonical_floats(array: pa.Array) -> pa.Array:
    nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    with np.errstate(invalid="ignore"):
        values = array.to_numpy(zero_copy_only=False) + 0.0  # -0.0 + 0.0 is 0.0
    values[np.isnan(values)] = np.nan
    return pa.array(values, mask=nulls, from_pandas=False)


def _canonical_times(array: pa.Array) -> pa.Array:
    """Nanoseconds are rounded down to microseconds, the resolution of Spark."""
    if array.type.unit == "ns":
        array = pc.floor_temporal(array.cast(pa.timestamp("ns", tz="UTC")), unit="microsecond")
        return array.cast(TIMESTAMP, safe=False)
    return array.cast(TIMESTAMP)


def _canonical_nested(array: pa.Array) -> pa.Array:
    """Rebuilt from canonical children, without values hidden under nulls or outside a slice."""
    kind = array.type
    nulls = array.is_null() if array.null_count else None
    if at.is_struct(kind):
        names = [kind.field(index).name for index in range(kind.num_fields)]
        children = [_canonical(child) for child in array.flatten()]
        if not children:
            return array
        return pa.StructArray.from_arrays(children, names=names, mask=nulls)
    array = as_list(array)
    offsets = pa.array(starts_of(array), type=pa.int32())
    entries = array.flatten()
    if at.is_map(kind):
        keys, items = (_canonical(child) for child in entries.flatten())
        return pa.MapArray.from_arrays(offsets, keys, items, mask=nulls)
    return pa.ListArray.from_arrays(offsets, _canonical(entries), mask=nulls)


def runs(values: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Runs of equal values in a sorted array: (value, first index, index after the last)."""
    if not len(values):
        return []
    if values[0] == values[-1]:
        return [(int(values[0]), 0, len(values))]
    changes = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    starts, ends = [0, *changes], [*changes, len(values)]
    return [(int(values[lo]), lo, hi) for lo, hi in zip(starts, ends, strict=True)]
