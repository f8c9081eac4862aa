"""Finds the rows of a file that have one of some keys, so that a join reads only the history that
its new rows can match.

The driver remembers the hashes of the keys of each file, sorted. Files that are written here have
their rows in the order of these hashes, in small row groups, so that few bytes are read for few
keys. Any other Parquet file works, too, but is read as a whole.

Everything that is read is verified: a file as a whole when its hashes are computed, and later each
row group, by the CRC-32 that its bytes had then.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.engine.state import (
    compare_crc,
    encoded,
    present,
    read_table,
    read_verified,
    write_encoded,
)
from holdfast.storage.files import storage
from holdfast.storage.rows import key_hashes

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

#: Rows of a row group of a file in the order of hashes.
GROUP_ROWS = 2_048
#: Most bytes of hashes that are remembered, 8 or 16 bytes per row. The files that were used longest
#: ago are forgotten, and read again when they are needed.
BYTES_MAX = 1 << 28
#: Bytes of an entry besides its hashes, and those of the metadata of a column of a row group.
_ENTRY_BYTES, _COLUMN_BYTES = 1_024, 512


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group: its bytes and their CRC-32."""

    at: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Index:
    #: Sorted.
    hashes: U64
    #: The row of each hash; None if the rows of the file have the order of hashes.
    rows: I64 | None
    #: The row groups of a file in the order of hashes, which have `GROUP_ROWS` rows each; the last
    #: one may have fewer. Empty for other files.
    groups: tuple[_Group, ...]
    metadata: pq.FileMetaData | None
    file_bytes: int
    #: Bytes of all rows without compression.
    plain_bytes: int

    @property
    def bytes(self) -> int:
        columns = 0 if self.metadata is None else self.metadata.num_columns * len(self.groups)
        rows = 0 if self.rows is None else self.rows.nbytes
        return self.hashes.nbytes + rows + columns * _COLUMN_BYTES + _ENTRY_BYTES

    def places(self, wanted: U64) -> I64:
        """The places in `hashes` of the sorted hashes `wanted`."""
        first = np.searchsorted(self.hashes, wanted, side="left")
        count = np.searchsorted(self.hashes, wanted, side="right") - first
        ends = np.cumsum(count)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
        return np.asarray(np.repeat(first, count) + within, np.int64)


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of a file, before they are read."""

    path: str
    crc: int
    index: _Index
    #: Places in the hashes of the index, sorted.
    places: I64

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def bytes_read(self) -> int:
        """Bytes without compression that are decoded to get the rows."""
        if not len(self.places) or not self.index.groups:
            return self.index.plain_bytes if len(self.places) else 0
        return self.index.plain_bytes * len(self._groups()) // len(self.index.groups)

    def _groups(self) -> I64:
        of_row = self.places // GROUP_ROWS
        return np.asarray(of_row[np.r_[True, of_row[1:] != of_row[:-1]][: len(of_row)]])

    def read(self) -> pa.Table:
        index = self.index
        if index.rows is not None:
            return read_table(self.path, self.crc).take(pa.array(index.rows[self.places]))
        numbers = self._groups()
        rows = _read_groups(self.path, index, numbers.tolist())
        in_rows = np.searchsorted(numbers, self.places // GROUP_ROWS) * GROUP_ROWS
        return rows.take(pa.array(in_rows + self.places % GROUP_ROWS))


class KeyIndexes:
    """The hashes of the keys of files. Several threads may use them."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int, tuple[str, ...]], _Index] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self, path: str, crc: int, keys: tuple[str, ...], wanted: U64) -> Found:
        """The rows of a file that have a key with one of the sorted hashes `wanted`."""
        index = self._index(path, crc, keys)
        return Found(path, crc, index, index.places(wanted))

    def write(self, rows: pa.Table, keys: tuple[str, ...], path: str) -> int:
        """Write a file in the order of hashes; return its CRC-32."""
        hashes = key_hashes(rows, keys)
        order = np.argsort(hashes, kind="stable")
        data = encoded(rows.take(pa.array(order)), GROUP_ROWS, plain=True)
        crc = write_encoded(data, path)
        self._add((path, crc, keys), _index(data, hashes[order]))
        return crc

    def _index(self, path: str, crc: int, keys: tuple[str, ...]) -> _Index:
        with self._lock:
            if (held := self._held.get((path, crc, keys))) is not None:
                self._held.move_to_end((path, crc, keys))
                return held
        data = read_verified(path, crc)
        rows = pq.ParquetFile(pa.BufferReader(data)).read(columns=list(keys), use_threads=False)
        index = _index(data, key_hashes(rows, keys))
        self._add((path, crc, keys), index)
        return index

    def _add(self, key: tuple[str, int, tuple[str, ...]], index: _Index) -> None:
        with self._lock:
            if key in self._held:
                return
            self._held[key] = index
            self._bytes += index.bytes
            while self._bytes > BYTES_MAX and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                self._bytes -= oldest.bytes


def _index(data: bytes | memoryview, hashes: U64) -> _Index:
    metadata = pq.read_metadata(pa.BufferReader(data))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    plain_bytes = sum(group.total_byte_size for group in groups)
    in_order = bool(np.all(hashes[1:] >= hashes[:-1]))
    sizes = [group.num_rows for group in groups]
    full = [GROUP_ROWS] * (len(sizes) - 1)
    if in_order and sizes and sizes[:-1] == full and sizes[-1] <= GROUP_ROWS:
        spans = [_span(group) for group in groups]
        of_groups = tuple(_Group(at, end - at, crc32(data[at:end])) for at, end in spans)
        return _Index(hashes, None, of_groups, metadata, len(data), plain_bytes)
    order = np.argsort(hashes, kind="stable")
    return _Index(hashes[order], order, (), None, len(data), plain_bytes)


def _span(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """The first byte of a row group, and the one after its last."""
    columns = [group.column(number) for number in range(group.num_columns)]
    begins = [
        c.data_page_offset if c.dictionary_page_offset is None
        else min(c.data_page_offset, c.dictionary_page_offset)
        for c in columns
    ]  # fmt: skip
    ends = [at + c.total_compressed_size for at, c in zip(begins, columns, strict=True)]
    return min(begins), max(ends)


def _read_groups(path: str, index: _Index, numbers: Sequence[int]) -> pa.Table:
    # The bytes of other row groups are never touched, so they take no memory.
    content = np.zeros(index.file_bytes, np.uint8)
    with present(path), storage(path):
        file = os.open(path, os.O_RDONLY)
    try:
        for number in numbers:
            group = index.groups[number]
            with storage(path):
                data = os.pread(file, group.size, group.at)
            compare_crc(path, group.crc, crc32(data))
            content[group.at : group.at + group.size] = np.frombuffer(data, np.uint8)
    finally:
        os.close(file)
    reader = pq.ParquetFile(pa.BufferReader(pa.py_buffer(content)), metadata=index.metadata)
    return reader.read_row_groups(numbers, use_threads=False)
