"""The rows that a step reads: inputs and retained history, as DataFrames for any range of buckets.

If only stateless operators lie between an input and a stateful operator, the history of the
stateful operator is the input segments, which are read again (`by reference`). Otherwise rows are
retained in chunks. Many small files are merged into one.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from holdfast.engine import determinism, windows
from holdfast.engine.inputs import Inputs
from holdfast.engine.spark_errors import is_too_large
from holdfast.engine.sql import quoted, read_parquet
from holdfast.engine.state import Chunk, Version, check_file, read_table, write_rows
from holdfast.errors import InputError, LogError
from holdfast.model import operators as ops
from holdfast.model.fragments import Path
from holdfast.model.schema import arrow_schema
from holdfast.storage.files import storage
from holdfast.storage.rows import canonical, runs, sort_canonical, times_us

if TYPE_CHECKING:
    from holdfast.engine.engine import Engine

_log = logging.getLogger("holdfast.engine")

#: Number of buckets with rows after which the rows of open windows are folded into panes.
PANE_BUCKETS = 16
#: Most files of panes, or chunks of rows, per operator; more are merged into one.
PANE_FILES = 16


#: Most rows of a history that are merged into one file through the driver; a larger history is
#: not merged.
FOLD_ROWS_MAX = 500_000


class File(NamedTuple):
    path: str
    #: CRC-32 of the content.
    crc: int


def together_of(files: Sequence[File]) -> pa.Table:
    """The rows of several small files as one table."""
    # Schemas differ in nullability: counts are nullable in merged panes, but not in new ones.
    return pa.concat_tables([read_table(*file) for file in files], promote_options="default")


def put_together(files: Sequence[File], into: str) -> None:
    """Merge files into the file `into`. The file is deleted if the write fails."""
    together = together_of(files)
    try:
        with storage(into):
            pq.write_table(
                together, into, compression="none", use_dictionary=False, write_statistics=False
            )
    except LogError:
        with suppress(OSError):
            os.unlink(into)
        raise


class History:
    """The rows and state that a step over buckets lo..hi reads, and the next state."""

    def __init__(
        self,
        engine: Engine,
        path: Path,
        version: Version,
        lo: int,
        hi: int,
        inputs: Inputs,
        *,
        line: str,
    ) -> None:
        #: The line (`line_of`) that owns the files of this step.
        self.line = line
        self.engine, self.path, self.before = engine, path, version
        self.lo, self.hi, self.inputs = lo, hi, inputs
        self.width_us = engine.network.width_us
        self.compiled = engine.compiled
        self.mine = {op.name for op in path.operators}
        self.panes = dict(version.panes)
        self.edges = dict(version.edges)
        self.shards = dict(version.shards)
        self.jobs = 0
        self.needs_from = hi + 1
        self.frames: dict[str, DataFrame | None] = {}
        #: Operators with keyed state and the folders of their new shards.
        self.folders: list[tuple[str, str]] = []
        #: The DataFrames that were executed.
        self.executed: list[DataFrame] = []
        self.scratch: list[str] = []
        # Upper bound of the rows that a job may read: new rows, rows that open windows and joins
        # still need, and state.
        since = min(lo, version.needs_from)
        raw = sum(f.rows for s in path.inputs for f in inputs.files(s, since, hi))
        large = raw + version.rows() >= engine.large_rows
        self.spark = engine.sessions.large if large else engine.sessions.small
        self.small = not large

    # -- rows --------------------------------------------------------------------------------

    def _read(self, ddl: Any, files: Sequence[File]) -> DataFrame:
        reader = self.engine.reader(self.spark, ddl)
        if self.small and len(files) > 2:
            # Spark takes about 2 ms to open a file, Arrow a fifth of that.
            return read_parquet(self.spark, reader, [self._together(files)]).coalesce(1)
        for file in files:
            check_file(*file)
        frame = read_parquet(self.spark, reader, [file.path for file in files])
        return frame.coalesce(1) if self.small else frame

    def _files(self, chunks: Iterable[Chunk]) -> list[File]:
        return [File(os.path.join(self.engine.folder, chunk.file), chunk.crc) for chunk in chunks]

    def _together(self, files: Sequence[File]) -> str:
        """Merge small files into one temporary file, which is deleted after the step."""
        file = os.path.join(self.engine.folder, f"{self.path.name}.{uuid.uuid4().hex[:8]}.tmp")
        put_together(files, file)
        self.scratch.append(file)
        return file

    def _input(self, stream: str, lo: int, hi: int) -> DataFrame | None:
        files = [File(f.path, f.crc) for f in self.inputs.files(stream, lo, hi)]
        return self._read(self.compiled.schema[stream], files) if files else None

    def _stateless(self, op: ops.Operator, lo: int, hi: int) -> DataFrame | None:
        """Rows of an operator in buckets lo..hi. Buckets before this step are possible only if all
        operators upstream are stateless."""
        current = (lo, hi) == (self.lo, self.hi)
        if op.name not in self.mine:
            return self._input(op.name, lo, hi)
        if current and op.name in self.frames:
            return self.frames[op.name]
        if isinstance(op, ops.Apply):
            up = op.inputs[0]
            assert up is not None
            df = self._stateless(up, lo, hi)
            return None if df is None else determinism.apply(op.fn, df, op.name)
        assert isinstance(op, ops.Union)
        ups = [up for up in op.inputs if up is not None]
        if all(up.name not in self.mine for up in ups):
            # All inputs of the union have the same schema: read all files in one scan.
            files = [File(f.path, f.crc) for up in ups for f in self.inputs.files(up.name, lo, hi)]
            return self._read(self.compiled.schema[op.name], files) if files else None
        return self._united([df for up in ups if (df := self._stateless(up, lo, hi)) is not None])

    def _by_reference(self, op: ops.Operator) -> bool:
        """Whether no stateful operator lies between the inputs and this stream."""
        if op.name not in self.mine:
            return True
        return not op.stateful and all(self._by_reference(up) for up in op.inputs if up is not None)

    def _buckets(self, op: ops.Operator, port: int, lo: int, hi: int) -> list[int]:
        """Buckets in lo..hi in which an input edge may have rows, sorted."""
        up = op.inputs[port]
        assert up is not None
        chunks = self.edges.get(f"{op.name}:{port}", ())
        buckets = {b for chunk in chunks for b in chunk.buckets if lo <= b <= hi}
        if self._by_reference(up):
            raw_from = max(lo, chunks[-1].hi + 1) if chunks else lo
            for stream in self._streams(up):
                buckets.update(f.bucket for f in self.inputs.files(stream, raw_from, hi))
        return sorted(buckets)

    def _streams(self, op: ops.Operator) -> list[str]:
        if op.name not in self.mine:
            return [op.name]
        return [s for up in op.inputs if up is not None for s in self._streams(up)]

    def _history(self, op: ops.Operator, port: int, lo: int, hi: int) -> DataFrame | None:
        """Rows of an input edge in buckets lo..hi; lo may be before this step."""
        up = op.inputs[port]
        assert up is not None
        chunks = self.edges.get(f"{op.name}:{port}", ())
        parts = [self._chunk_rows(up, chunks, lo, hi)]
        if self._by_reference(up):
            raw_from = max(lo, chunks[-1].hi + 1) if chunks else lo
            parts.append(self._stateless(up, raw_from, hi) if raw_from <= hi else None)
        return self._united([part for part in parts if part is not None])

    def _chunk_rows(
        self, up: ops.Operator, chunks: Sequence[Chunk], lo: int, hi: int
    ) -> DataFrame | None:
        overlapping = [chunk for chunk in chunks if chunk.hi >= lo and chunk.lo <= hi]
        if not overlapping:
            return None
        df = self._read(self.compiled.schema[up.name], self._files(overlapping))
        time = f"unix_micros({quoted(self.compiled.time[up.name])})"
        if (
            min(chunk.lo for chunk in overlapping) < lo
            or max(chunk.hi for chunk in overlapping) > hi
        ):
            df = df.filter(self._within(time, lo, hi))
        return df

    def _within(self, time: str, lo: int, hi: int) -> str:
        """SQL condition: `time`, in microseconds, lies in buckets lo..hi."""
        start, end = lo * self.width_us, (hi + 1) * self.width_us
        return f"{time} >= {start}L and {time} < {end}L"

    def _united(self, parts: list[DataFrame]) -> DataFrame | None:
        if not parts:
            return None
        united = parts[0]
        for part in parts[1:]:
            united = united.unionByName(part)
        return united.coalesce(1) if self.small and len(parts) > 1 else united

    def _feeds_history(self, op: ops.Operator) -> bool:
        """Whether the rows must be retained after the step: a window or join reads them, and they
        cannot be read from the inputs again."""
        if self._by_reference(op):
            return False
        return any(
            up is op and isinstance(reader, ops.TimeWindow | ops.Join)
            for reader in self.path.operators
            for up in reader.inputs
        )

    def _into_union(self, op: ops.Operator) -> bool:
        """Whether the rows flow into a union. The shard number is the number of the task, which a
        union in the same job would change."""
        return any(
            isinstance(reader, ops.Union)
            or (isinstance(reader, ops.Apply) and self._into_union(reader))
            for reader in self.path.operators
            if op in reader.inputs
        )

    def _materialise(self, op: ops.Operator, frame: DataFrame) -> DataFrame | None:
        table = self._arrow(frame, op.name)
        if table.num_rows == 0:
            return None
        chunk = self._write(table, op.name, self.lo, self.hi, op)
        for reader in self.path.operators:
            for port, up in enumerate(reader.inputs):
                if up is op and isinstance(reader, ops.TimeWindow | ops.Join):
                    edge = f"{reader.name}:{port}"
                    self.edges[edge] = (*self.edges.get(edge, ()), chunk)
        return self._read(self.compiled.schema[op.name], self._files([chunk]))

    def _write(
        self, table: pa.Table, name: str, lo: int, hi: int, up: ops.Operator | None = None
    ) -> Chunk:
        """Write a state file. `up`: the stream of the rows, to record which buckets have rows."""
        file = f"{self.path.name}/{name}.{lo}-{hi}.{uuid.uuid4().hex[:8]}.parquet"
        crc = write_rows(table, os.path.join(self.engine.folder, file))
        self.engine.made(self.line, file)
        buckets: tuple[int, ...] = ()
        if up is not None:
            times = times_us(table, self.compiled.time[up.name])
            buckets = tuple(map(int, np.unique(times // self.width_us)))
        return Chunk(file, lo, hi, table.num_rows, buckets, crc)

    def _arrow(self, frame: DataFrame, name: str) -> pa.Table:
        self.jobs += 1
        self.executed.append(frame)
        table = frame.toArrow()
        schema = arrow_schema(self.compiled.schema[name])
        return canonical(table.select(schema.names).cast(schema))

    def _collect(self, frame: DataFrame | None, output: str) -> list[tuple[int, pa.Table]]:
        if frame is None:
            return []
        time = self.compiled.time[output]
        table = sort_canonical(self._arrow(frame, output), time)
        slices = runs(times_us(table, time) // self.width_us)
        if slices and (slices[0][0] < self.lo or slices[-1][0] > self.hi):
            raise InputError(
                f"{output}: expected results in buckets {self.lo} to {self.hi}, found results in "
                f"buckets {slices[0][0]} to {slices[-1][0]}"
            )
        return [(bucket, table.slice(start, end - start)) for bucket, start, end in slices]

    def _passed_on(self, op: ops.Operator) -> bool:
        """Whether only unions lie between the inputs and this stream."""
        plain = op.name not in self.mine or isinstance(op, ops.Union)
        ups = op.inputs if op.name in self.mine else []
        return plain and all(self._passed_on(up) for up in ups if up is not None)

    def _pass_on(self, end: ops.Operator) -> list[tuple[int, pa.Table]]:
        """The rows of the inputs, unchanged, bucket by bucket, without a Spark job."""
        time = self.compiled.time[end.name]
        files: dict[int, list[File]] = {}
        for stream in self._streams(end):
            for file in self.inputs.files(stream, self.lo, self.hi):
                files.setdefault(file.bucket, []).append(File(file.path, file.crc))
        return [
            (bucket, sort_canonical(together_of(held), time))
            for bucket, held in sorted(files.items())
        ]

    # -- history for later steps -------------------------------------------------------------------

    def _alive_from(self, op: ops.Operator) -> int | None:
        """First input bucket that later steps may need; None if the operator has no history."""
        if isinstance(op, ops.TimeWindow):
            alive = windows.needed_from(op, self.hi, self.width_us)
            panes = self.panes.get(op.name, ())
            return max(alive, panes[-1].hi + 1) if panes else alive
        if isinstance(op, ops.Join):
            return ((self.hi + 1) * self.width_us - op.within_us) // self.width_us
        return None

    def _forget(self) -> None:
        """Drop chunks that no later step needs, merge small files, and set `needs_from`, the first
        bucket of the inputs that the next version refers to."""
        for op in self.path.operators:
            alive = self._alive_from(op)
            if alive is None:
                continue
            for port, up in enumerate(op.inputs):
                assert up is not None
                edge = f"{op.name}:{port}"
                chunks = tuple(c for c in self.edges.get(edge, ()) if c.hi >= alive)
                if isinstance(op, ops.Join) or op.fn is not None:  # type: ignore[attr-defined]
                    chunks = self._fold_rows(op, port, up, chunks, alive)
                if chunks or edge in self.edges:
                    self.edges[edge] = chunks
                if self._by_reference(up):
                    raw_from = max(alive, chunks[-1].hi + 1) if chunks else alive
                    raw = self._raw_buckets(up, raw_from)
                    self.needs_from = min(self.needs_from, raw[0] if raw else self.hi + 1)

    def _raw_buckets(self, up: ops.Operator, since: int) -> list[int]:
        streams = self._streams(up)
        return sorted({f.bucket for s in streams for f in self.inputs.files(s, since, self.hi)})

    def _fold_rows(
        self, op: ops.Operator, port: int, up: ops.Operator, chunks: tuple[Chunk, ...], alive: int
    ) -> tuple[Chunk, ...]:
        """Merge a history of many small files into one file, because every step reads it again."""
        if self._by_reference(up):
            raw_from = max(alive, chunks[-1].hi + 1) if chunks else alive
            few = len(self._raw_buckets(up, raw_from)) < self.engine.pane_buckets
            rows = sum(
                f.rows for s in self._streams(up) for f in self.inputs.files(s, raw_from, self.hi)
            )
            if not few and rows <= FOLD_ROWS_MAX:
                raw = self._stateless(up, raw_from, self.hi)
                chunks = self._row_chunk(op, port, up, chunks, raw, raw_from)
        if len(chunks) > PANE_FILES and sum(chunk.rows for chunk in chunks) <= FOLD_ROWS_MAX:
            lo = max(alive, chunks[0].lo)
            merged = self._chunk_rows(up, chunks, lo, chunks[-1].hi)
            one = self._row_chunk(op, port, up, (), merged, lo)
            chunks = one if one or merged is None else chunks
        return chunks

    def _row_chunk(
        self, op: ops.Operator, port: int, up: ops.Operator, chunks: tuple[Chunk, ...],
        rows: DataFrame | None, lo: int,
    ) -> tuple[Chunk, ...]:  # fmt: skip
        table = None if rows is None else self._if_it_fits(lambda: self._arrow(rows, up.name))
        if table is None:
            return chunks
        return (*chunks, self._write(table, f"{op.name}.{port}", lo, self.hi, up))

    def _if_it_fits(self, collect: Callable[[], pa.Table]) -> pa.Table | None:
        """Rows that would only be stored in another form; None if they are too large for that."""
        try:
            return collect()
        except (PySparkException, Py4JJavaError) as err:
            if not is_too_large(err, can_be_split=True):
                raise
            _log.info("path %s: not folded, because the rows are too large", self.path.name)
            return None
