"""Sinks: folders of Parquet files that any engine can read."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.edge.client import BucketInfo
from holdfast.model.schema import STABILITY
from holdfast.storage.files import put_file


@dataclass(frozen=True, slots=True)
class CorrectedTable:
    """A folder of Parquet files with the best available results: stable buckets, and tentative
    buckets until they are corrected. Any engine can read the folder at any time: each bucket is one
    file, and its correction replaces the file atomically. The sink keeps nothing in memory.

    The column `_stability` distinguishes stable and tentative rows.
    """

    folder: str
    #: The client that feeds this sink must also deliver tentative buckets.
    tentative = True

    def __call__(self, table: pa.Table, info: BucketInfo) -> None:
        if info.rows:
            marked = table.append_column(
                STABILITY, pa.array([info.stability.value] * table.num_rows)
            )
            _write_bucket(marked, self._file(info.bucket))
        elif info.replaces:
            with suppress(FileNotFoundError):  # deleted before a crash, delivered again after it
                os.unlink(self._file(info.bucket))

    def read(self) -> pa.Table:
        """All rows, in the order of buckets; a table without columns if there are no files."""
        tables = [pq.read_table(self._file(bucket)) for bucket in self._files()]
        return pa.concat_tables(tables) if tables else pa.table({})

    def _files(self) -> list[int]:
        if not os.path.isdir(self.folder):
            return []
        names = [name for name in os.listdir(self.folder) if name.endswith(".parquet")]
        return sorted(int(name.split(".")[0].removeprefix("bucket-")) for name in names)

    def _file(self, bucket: int) -> str:
        return os.path.join(self.folder, f"bucket-{bucket:+020d}.parquet")


def _write_bucket(table: pa.Table, path: str) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    put_file(path, memoryview(sink.getvalue()), fsync=True)


@dataclass(frozen=True, slots=True)
class ParquetSink:
    """A folder of Parquet files, one per bucket, named by the bucket. Writing a bucket again
    replaces its file with the same rows, so a restart never duplicates rows."""

    folder: str

    def __call__(self, table: pa.Table, info: BucketInfo) -> None:
        _write_bucket(table, os.path.join(self.folder, f"bucket-{info.bucket:+020d}.parquet"))
