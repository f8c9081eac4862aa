"""Segments as Parquet files. A read detects every change of a file since it was written.

One row group, so that one task reads the file and its partial results have one order
(ARCHITECTURE.md). Snappy, because every Spark reads it: for 200,000 rows, writing took as long as
with lz4 (16 ms, against 11 ms uncompressed) and halved the bytes to sync; zstd and dictionaries
took longer. No statistics: they save no work in a file of one row group, and a wrong bit in them
would make Spark skip existing rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import InputError, LogCorrupted, ProtocolViolation
from holdfast.frozen import dataclass
from holdfast.storage.disk import OS_DISK, Disk
from holdfast.storage.files import put_file, storage
from holdfast.storage.rows import canonical, digest, times_us

#: Also for logs of sources and clients, which nothing rebuilds.
REMEDY = (
    "restore the folder of this log from a backup. Delete it only if it belongs to a node with "
    "recovery='replay' or to a replica of a pair: such a node is then rebuilt"
)
#: Below this number of rows, decoding columns in several threads costs more than it saves.
_THREADS_FROM_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The properties of a segment file that the manifest records."""

    rows: int
    checksum: str
    t_max_us: int
    size_bytes: int
    crc: int


class Segments(Protocol):
    """Writes and reads segment files. The simulator uses a cheaper encoding than Parquet."""

    def write(
        self, table: pa.Table, path: str, *, time: str, fsync: bool, disk: Disk
    ) -> SegmentFile: ...

    def read(self, path: str, *, rows: int, checksum: str, disk: Disk) -> pa.Table: ...


class _Parquet:
    def write(
        self, table: pa.Table, path: str, *, time: str, fsync: bool, disk: Disk
    ) -> SegmentFile:
        return write_segment(table, path, time=time, fsync=fsync, disk=disk)

    def read(self, path: str, *, rows: int, checksum: str, disk: Disk) -> pa.Table:
        return read_segment(path, rows=rows, checksum=checksum, disk=disk)


PARQUET: Segments = _Parquet()


def write_segment(
    table: pa.Table, path: str | Path, *, time: str, fsync: bool, disk: Disk = OS_DISK
) -> SegmentFile:
    """Writes the rows in canonical form, atomically."""
    if table.num_rows == 0:
        raise ProtocolViolation(
            f"{path}: expected a segment with rows, found none; an empty bucket has no segment"
        )
    table = canonical(table)
    t_max_us = int(times_us(table, time).max())
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(
            table,
            sink,
            row_group_size=table.num_rows,
            compression="snappy",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
    except pa.ArrowException as err:
        raise InputError(f"{path}: Parquet cannot hold these rows: {err}") from err
    data = memoryview(sink.getvalue())
    put_file(path, data, fsync=fsync, disk=disk)
    return SegmentFile(table.num_rows, digest(table), t_max_us, data.nbytes, crc32(data))


def read_segment(path: str | Path, *, rows: int, checksum: str, disk: Disk = OS_DISK) -> pa.Table:
    """The rows exactly as they were written. A missing or changed file raises `LogCorrupted`."""
    try:
        with storage(path):
            data = disk.read(str(path))
    except Exception as err:
        if isinstance(err.__cause__, FileNotFoundError):
            raise LogCorrupted(f"{path}: the segment file is missing; {REMEDY}") from err
        raise
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        # Checked first: a damaged row count must not cause a huge memory allocation.
        if file.metadata.num_rows == rows:
            table = canonical(file.read(use_threads=rows >= _THREADS_FROM_ROWS))
            content = (table.num_rows, digest(table))
        else:
            content = (file.metadata.num_rows, "")
    except Exception as err:  # a damaged file may cause any exception in the Parquet reader
        raise LogCorrupted(f"{path}: not readable as Parquet ({err}); {REMEDY}") from err
    if content != (rows, checksum):
        raise LogCorrupted(
            f"{path}: expected {rows} rows with checksum {checksum}, found "
            f"{content[0]} rows{f' with checksum {content[1]}' if content[1] else ''}; {REMEDY}"
        )
    return table
