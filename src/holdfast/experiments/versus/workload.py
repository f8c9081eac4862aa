"""Queries and rows that both sides of the comparison process.

All rows are written as Parquet before the measurement, once for all repeats. A file holds one
bucket. Its modification time follows the bucket number, because the file source of Structured
Streaming takes files in the order of these times.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WIDTH_US = 100_000
#: Rows of a count window.
COUNT_SIZE = 10
WITHIN_MS = 300
#: Start of event time: a multiple of every window length, so that the first window is complete.
EPOCH_US = 1_767_225_600_000_000
FIRST = EPOCH_US // WIDTH_US
SCHEMA = pa.schema(
    [("ts", pa.timestamp("us", tz="UTC")), ("src", pa.string()), ("bytes", pa.int64())]
)
_SEED = 20260101
_OLDEST_S = 1_700_000_000

Kind = Literal["tumbling", "sliding", "join", "stateless", "count"]


@dataclass(frozen=True, slots=True)
class Query:
    """A query over buckets, with the number of its steps."""

    name: str
    kind: Kind
    #: Rows of a bucket. The right side of a join has a tenth.
    rows: int
    keys: int
    #: Steps before the measurement, and measured steps.
    warm: int
    steps: int
    #: Buckets of a step: one, or several that one job processes.
    group: int = 1
    #: Buckets that the first step processes together, so that the state has its final size.
    prefill: int = 0
    #: Number of the first bucket. With groups of ten buckets and windows of ten buckets, groups
    #: that begin with bucket 5 do not end with a window.
    start: int = 0

    def __post_init__(self) -> None:
        if self.prefill and self.group != 1:
            raise ValueError(f"{self.name}: a prefill needs steps of one bucket")

    @property
    def buckets(self) -> int:
        return self.prefill + (self.warm + self.steps) * self.group

    def ranges(self) -> list[tuple[int, int]]:
        """First and last bucket of each step, counted from the start of event time."""
        begin = self.start + self.prefill
        steps = [
            (begin + at * self.group, begin + (at + 1) * self.group - 1)
            for at in range(self.warm + self.steps)
        ]
        return [(self.start, begin - 1), *steps] if self.prefill else steps


def make_bucket(bucket: int, rows: int, keys: int, seed: int = 0) -> pa.Table:
    """Generate the rows of one bucket in time order, the same for every side and repeat."""
    rng = np.random.default_rng([_SEED, seed, bucket])
    ts = np.sort(rng.integers(0, WIDTH_US, rows)) + (EPOCH_US + bucket * WIDTH_US)
    names = pa.array(np.char.mod("src-%06d", np.arange(keys)))
    return pa.table(
        [
            pa.array(ts, pa.int64()).cast(SCHEMA.field("ts").type),
            names.take(pa.array(rng.integers(0, keys, rows))),
            pa.array(rng.integers(40, 1_500, rows), pa.int64()),
        ],
        schema=SCHEMA,
    )


def write_buckets(folder: Path, count: int, rows: int, keys: int) -> list[str]:
    """Write the first buckets, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"bucket-{bucket:06d}.parquet" for bucket in range(count)]
    for bucket, file in enumerate(files):
        _write(make_bucket(bucket, rows, keys), file, bucket)
    return [str(file) for file in files]


@dataclass(frozen=True, slots=True)
class Buckets:
    """Files of the buckets of all queries below one folder."""

    folder: Path

    def left(self, query: Query, bucket: int) -> Path:
        return self._folder(query) / f"bucket-{bucket:06d}.parquet"

    def right(self, query: Query, bucket: int) -> Path:
        return self._folder(query) / f"right-{bucket:06d}.parquet"

    def sides(self, query: Query, bucket: int) -> list[Path]:
        """The files of a bucket: two for a join, one otherwise."""
        left = self.left(query, bucket)
        return [left, self.right(query, bucket)] if query.kind == "join" else [left]

    def prefill(self, query: Query) -> list[Path]:
        """The buckets of the first step in one file per side, for a source that counts files."""
        ending = f"{query.start}-{query.prefill}.parquet"
        names = ("left", "right") if query.kind == "join" else ("left",)
        return [self._folder(query) / f"prefill-{name}-{ending}" for name in names]

    def _folder(self, query: Query) -> Path:
        return self.folder / f"{query.rows}-{query.keys}{'-join' * (query.kind == 'join')}"

    def write(self, query: Query) -> None:
        """Write the missing files of a query."""
        self._folder(query).mkdir(parents=True, exist_ok=True)
        tables: list[list[pa.Table]] = [[], []]
        for bucket in range(query.start, query.start + query.buckets):
            rows = [(query.rows, query.keys), (max(1, query.rows // 10), query.keys)]
            for number, path in enumerate(self.sides(query, bucket)):
                in_prefill = bucket < query.start + query.prefill
                if path.exists() and not in_prefill:
                    continue
                table = make_bucket(bucket, *rows[number], seed=number)
                if number:
                    table = table.rename_columns(["ts", "src", "level"])
                if in_prefill:
                    tables[number].append(table)
                if not path.exists():
                    _write(table, path, bucket)
        if query.prefill:
            for number, path in enumerate(self.prefill(query)):
                if not path.exists():
                    _write(pa.concat_tables(tables[number]), path, query.start)


def _write(table: pa.Table, path: Path, bucket: int) -> None:
    """Write two row groups, so that two cores can read the file."""
    pq.write_table(table, path, row_group_size=max(1, -(-table.num_rows // 2)))
    os.utime(path, (_OLDEST_S + bucket, _OLDEST_S + bucket))
