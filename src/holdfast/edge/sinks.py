"""Sinks: folders of Parquet files that any engine can read."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.edge.client import BucketInfo
from holdfast.storage.files import put_file


@dataclass(frozen=True, slots=True)
class CorrectedTable:
    """A folder of Parquet files that always holds the best there is: stable buckets, and tentative
    ones until they are corrected. Any engine can read it at any time: each bucket is one file,
    which its correction replaces in one move; nothing is kept in memory.

    The column `_stability` tells the rows apart.
    """

    folder: str
    #: A client that feeds it wants to be given what is tentative.
    tentative = True

    def __call__(self, table: pa.Table, info: BucketInfo) -> None:
        if info.rows:
            marked = table.append_column(
                "_stability", pa.array([info.stability.value] * table.num_rows)
            )
            _write_bucket(marked, self._file(info.bucket))
        elif info.replaces:
            with suppress(FileNotFoundError):  # a crash came between this and the client's position
                os.unlink(self._file(info.bucket))

    def read(self) -> pa.Table:
        """All of it, by bucket; without columns while there are no rows."""
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
    """A folder of Parquet files, one per bucket, named by the bucket: writing one again replaces it
    by the same rows, so a restart can never double them."""

    folder: str

    def __call__(self, table: pa.Table, info: BucketInfo) -> None:
        _write_bucket(table, os.path.join(self.folder, f"bucket-{info.bucket:+020d}.parquet"))
