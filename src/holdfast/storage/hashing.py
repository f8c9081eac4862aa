"""A 64-bit hash per row, computed column by column; equal rows have equal hashes.

Replicas compare segments by digest, and a segment that is read is checked against the digest from
when it was written. The hash must therefore depend on values only: not on chunks, slices, the bytes
under a null or the width of offsets. The hash detects bugs and bad disks; it is not secure against
an adversary.

Every value is mixed to 64 pseudorandom bits (splitmix64). The hash of a string or list is a sum
over its elements, each mixed with its position, so that cumulative sums over the flat child array
give the hashes of all rows at once. Input must be in the form that `rows.canonical` returns.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types as at

from holdfast.errors import InputError

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_POSITION = np.uint64(0xD6E8FEB86659FD93)
_NULL = np.uint64(0xA0761D6478BD642F)
#: Rows hashed at a time. Bounds memory and keeps temporary arrays in the CPU cache.
_BLOCK_ROWS = 32_768


def table_digest(table: pa.Table) -> int:
    """Sum of the row hashes mod 2^64, mixed with the schema. The digest depends on how often a row
    occurs, but not on the order of rows."""
    salts = [
        _salt(f"{index}/{field.name!r}:{type_name(field.type)}")
        for index, field in enumerate(table.schema)
    ]
    total = np.array([_salt(f"{salts}")], dtype=np.uint64)
    for start in range(0, table.num_rows, _BLOCK_ROWS):
        block = table.slice(start, _BLOCK_ROWS)
        hashes = np.zeros(block.num_rows, dtype=np.uint64)
        for column, salt in zip(block.columns, salts, strict=True):
            hashes += mix(hash_array(column.combine_chunks()) ^ np.uint64(salt))
            hashes = mix(hashes)
        total += hashes.sum(dtype=np.uint64)
    return int(mix(total)[0])


def hash_array(array: pa.Array) -> U64:
    """One hash per value. Nulls of all types have the same hash; the caller mixes in the type."""
    if len(array) == 0:
        return np.zeros(0, dtype=np.uint64)
    kind = array.type
    if at.is_null(kind):
        return np.full(len(array), _NULL)
    if at.is_struct(kind):
        hashes = np.zeros(len(array), dtype=np.uint64)
        for index in range(kind.num_fields):
            hashes = mix(hashes + hash_array(array.field(index)))
    elif at.is_string(kind) or at.is_binary(kind):
        hashes = _hash_bytes(array)
    elif at.is_list(kind) or at.is_map(kind):
        array = as_list(array)
        hashes = _hash_ragged(hash_array(array.flatten()), starts_of(array))
    elif at.is_boolean(kind):
        hashes = mix(array.cast(pa.uint8()).fill_null(0).to_numpy().astype(np.uint64))
    else:
        hashes = _hash_fixed(array)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return hashes


def type_name(kind: pa.DataType) -> str:
    """The name of a type for digests, independent of how Arrow spells nested types."""
    if at.is_struct(kind):
        fields = (kind.field(index) for index in range(kind.num_fields))
        return f"struct<{','.join(f'{f.name!r}:{type_name(f.type)}' for f in fields)}>"
    if at.is_map(kind):
        return f"map<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    if at.is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    return str(kind)


def _salt(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(values: U64) -> U64:
    """splitmix64: a bijection in which every input bit affects every output bit."""
    z = values + _GOLDEN
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def as_list(array: pa.Array) -> pa.Array:
    """Any kind of list as a plain list array; a map as a list of its entries."""
    kind = array.type
    entry = pa.struct([kind.key_field, kind.item_field]) if at.is_map(kind) else kind.value_type
    return array.cast(pa.list_(entry))


def starts_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """Start of each list in `array.flatten()`, which omits the elements hidden under nulls."""
    lengths = np.diff(array.offsets.to_numpy())
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _hash_ragged(elements: U64, starts: npt.NDArray[np.int64]) -> U64:
    """Hashes of variable-length values; value i has the elements `starts[i]:starts[i + 1]`.

    A hash covers the elements, their positions and their number. Differences of one running sum
    give the hashes of all values; overflow of the sum cancels out.
    """
    lengths = np.diff(starts)
    positions = np.arange(len(elements), dtype=np.int64)
    positions -= np.repeat(starts[:-1], lengths)
    mixed = positions.view(np.uint64)
    mixed *= _POSITION
    mixed += elements
    running = np.zeros(len(elements) + 1, dtype=np.uint64)
    np.cumsum(mix(mixed), out=running[1:])
    sums: U64 = running[starts[1:]] - running[starts[:-1]]
    return mix(sums + mix(lengths.view(np.uint64)))


def _hash_bytes(array: pa.Array) -> U64:
    _, offsets, data = array.buffers()
    starts = np.frombuffer(offsets, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    starts = starts.astype(np.int64)
    content = np.frombuffer(data if data is not None else b"", dtype=np.uint8)
    content = content[starts[0] : starts[-1]]
    return _hash_ragged(content.astype(np.uint64), starts - starts[0])


def _hash_fixed(array: pa.Array) -> U64:
    """Hashes of fixed-width values: 1, 2, 4 or 8 bytes, or several 8-byte words (decimals)."""
    if not (at.is_primitive(array.type) or at.is_decimal(array.type)):
        raise InputError(f"columns of type {array.type} are not supported; cast them first")
    width = array.type.bit_width // 8
    words = max(width // 8, 1)
    raw = np.frombuffer(array.buffers()[1], dtype=f"u{min(width, 8)}")
    raw = raw[array.offset * words : (array.offset + len(array)) * words].astype(np.uint64)
    hashes = mix(raw[::words])
    for word in range(1, words):
        hashes = mix(hashes + raw[word::words])
    return hashes
