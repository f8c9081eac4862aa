"""The rows that a step reads: inputs and retained history, as recipes for any range of buckets.

If only stateless operators lie between an input and a stateful operator, the history of the
stateful operator is the input segments, which are read again (`by reference`). Otherwise rows are
retained in chunks. Many small files are merged into one.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from holdfast.engine.inputs import Inputs
from holdfast.engine.nullable import nullable
from holdfast.engine.prepared import Prepared
from holdfast.engine.recipe import (
    Applied,
    Builder,
    Filtered,
    Read,
    Recipe,
    Sharded,
    United,
    parts_of,
)
from holdfast.engine.spark_errors import is_too_large
from holdfast.engine.sql import quoted
from holdfast.engine.state import Chunk, Version, check_file, read_table, read_verified, write_rows
from holdfast.errors import InputError
from holdfast.model import operators as ops
from holdfast.model.fragments import Path
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import canonical, runs, sort_canonical, times_us
from holdfast.types import NO_UPKEEP, Upkeep

if TYPE_CHECKING:
    from holdfast.engine.engine import Engine

_log = logging.getLogger("holdfast.engine")

#: Number of buckets with rows after which the rows of open windows are folded into panes.
PANE_BUCKETS = 16
#: Most files of panes, or chunks of rows, per operator; more are merged into one.
PANE_FILES = 16
#: Most bytes of files that a job with one task reads; the driver holds them several times.
ONE_TASK_BYTES_MAX = 1 << 26


class File(NamedTuple):
    path: str
    #: CRC-32 of the content.
    crc: int


#: The times from the first to before the second, in microseconds.
Range = tuple[int, int]


def together_of(files: Sequence[File]) -> pa.Table:
    """The rows of several small files as one table."""
    return pa.concat_tables([nullable(read_table(*file)) for file in files])


def size_of(files: Iterable[str]) -> int:
    """Bytes of the files; missing ones are reported when they are read."""
    total = 0
    for file in files:
        with suppress(OSError):
            total += os.path.getsize(file)
    return total


def at_time(rows: pa.Table, time: str, at_us: int) -> pa.Table:
    """The rows with another time."""
    place = rows.column_names.index(time)
    instant = pa.scalar(at_us, pa.int64()).cast(rows.schema.field(place).type)
    return rows.set_column(place, rows.schema.field(place), pa.repeat(instant, rows.num_rows))


class MoreRows(Exception):
    """The step reads more rows than its jobs were planned for."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class NoTask(Exception):
    """No task of a keyed operator ran: Spark's optimizer has proved that its rows are empty, for
    example because a filter is never true."""

    def __init__(self, op: str) -> None:
        super().__init__(op)
        self.op = op


class Folded(NamedTuple):
    """New rows of a time window, as panes."""

    panes: pa.Table
    #: The buckets of the rows.
    buckets: tuple[int, ...]


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
        prepared: Prepared,
        rows_min: int = 0,
        upkeep: Upkeep = NO_UPKEEP,
    ) -> None:
        #: The line (`line_of`) that owns the files of this step.
        self.line = line
        self.is_stable = line == path.name
        self.upkeep = upkeep
        self.engine, self.path, self.before = engine, path, version
        self.lo, self.hi, self.inputs = lo, hi, inputs
        self.width_us = engine.network.width_us
        self.compiled = engine.compiled
        self.mine = {op.name for op in path.operators}
        self.panes = dict(version.panes)
        self.edges = dict(version.edges)
        self.shards = dict(version.shards)
        self.jobs = 0
        self.recipes: dict[str, Recipe | None] = {}
        #: Results that were computed already: the recipe that stands for them, and the rows.
        self.tables: dict[str, tuple[Recipe, pa.Table]] = {}
        #: New panes of each time window; None if there are none.
        self.folded: dict[str, Folded | None] = {}
        #: Operators with keyed state, the folders of their new files and the number of tasks.
        self.folders: list[tuple[str, str, int]] = []
        #: The state files of this step.
        self.made: set[str] = set()
        #: The recipes of the jobs with keyed state that ran.
        self.executed: list[Recipe] = []
        # Upper bound of the rows that a job may read: new rows, rows that open windows and joins
        # still need, and panes. Rows that a join selects by key are counted by the join; if they
        # are too many, the step is repeated with their number as `rows_min`.
        since = min(lo, version.needs_from)
        raw = sum(f.rows for s in path.inputs for f in inputs.files(s, since, hi))
        rows = max(rows_min, raw + version.rows_read(engine.whole, engine.by_key))
        #: Whether jobs are interpreted, and whether they have one task and a plan that may run
        #: again.
        self.interpreted = rows < engine.job_rows.compiled
        self.one_task = self.interpreted or (
            rows < engine.job_rows.distributed
            and engine.sessions.is_local
            and not any(isinstance(op, ops.Stateful) for op in path.operators)
            and self._bytes(since) < ONE_TASK_BYTES_MAX
        )
        spark = engine.sessions.small if self.interpreted else engine.sessions.large
        self.builder = Builder(engine.network, engine.compiled, spark)
        self.prepared = prepared
        self._read_already: dict[tuple[str, int, int, Range | None], Recipe | None] = {}

    def _reads(self, rows: int) -> None:
        """Raise MoreRows if the job is too small for so many rows."""
        limits = self.engine.job_rows
        if self.one_task and rows >= (limits.compiled if self.interpreted else limits.distributed):
            raise MoreRows(rows)

    def _bytes(self, since: int) -> int:
        """Bytes of the files that a job may read."""
        inputs = [f.path for s in self.path.inputs for f in self.inputs.files(s, since, self.hi)]
        chunks = self._files(self.before.chunks_read(self.engine.by_key))
        return size_of([*inputs, *(file.path for file in chunks)])

    # -- jobs --------------------------------------------------------------------------------

    def _execute(self, recipe: Recipe) -> pa.Table:
        self.jobs += 1
        if any(isinstance(part, Sharded) for part in parts_of(recipe)):
            self.executed.append(recipe)
        if self.one_task:
            return self.prepared.collect(recipe, self.builder)
        return self.builder.build(recipe).toArrow()

    # -- rows --------------------------------------------------------------------------------

    def _read(
        self, of: str, files: Sequence[File], within: Range | None = None, *, panes: bool = False
    ) -> Recipe:
        """The rows of files, or those `within` a range of time; or panes, or those that start
        within it."""
        kind: Literal["rows", "panes"] = "panes" if panes else "rows"
        if self.one_task and len(files) == 1 and within is None:
            data = read_verified(*files[0])
            return Read(of, (self.prepared.copy(data, of, kind),), one_task=True, kind=kind)
        if self.one_task:
            rows = self._together(of, files, within, panes=panes)
            return Read(of, (self.prepared.write(rows, of, kind),), one_task=True, kind=kind)
        for file in files:
            check_file(*file)
        read = Read(of, tuple(file.path for file in files), one_task=False, kind=kind)
        if within is None:
            return read
        time = "__p" if panes else f"unix_micros({quoted(self.compiled.time[of])})"
        return Filtered(read, f"{time} >= {within[0]}L and {time} < {within[1]}L")

    def _together(
        self, of: str, files: Sequence[File], within: Range | None, *, panes: bool = False
    ) -> pa.Table:
        """The rows of `_read` in the driver."""
        rows = together_of(files)
        if within is None:
            return rows
        times = rows["__p"].to_numpy() if panes else times_us(rows, self.compiled.time[of])
        return rows.filter(pa.array((times >= within[0]) & (times < within[1])))

    def _files(self, chunks: Iterable[Chunk]) -> list[File]:
        return [File(os.path.join(self.engine.folder, chunk.file), chunk.crc) for chunk in chunks]

    def _input(self, op: ops.Operator, lo: int, hi: int, within: Range | None) -> Recipe | None:
        """Rows of inputs of the path: of one stream, or of a union of streams."""
        key = (op.name, lo, hi, within)
        if key not in self._read_already:
            files = self._input_files(op, lo, hi)
            self._read_already[key] = self._read(op.name, files, within) if files else None
        return self._read_already[key]

    def _input_files(self, op: ops.Operator, lo: int, hi: int) -> list[File]:
        return [
            File(file.path, file.crc)
            for stream in self._streams(op)
            for file in self.inputs.files(stream, lo, hi)
        ]

    def _is_input(self, op: ops.Operator) -> bool:
        """Whether the rows are those of inputs of the path, of one stream or of a union."""
        if op.name not in self.mine:
            return True
        # All inputs of a union have the same schema.
        return isinstance(op, ops.Union) and all(
            up is not None and up.name not in self.mine for up in op.inputs
        )

    def _stateless(
        self, op: ops.Operator, lo: int, hi: int, within: Range | None = None
    ) -> Recipe | None:
        """Rows of an operator in buckets lo..hi. Buckets before this step are possible only if all
        operators upstream are stateless."""
        if op.name not in self.mine:
            return self._input(op, lo, hi, within)
        if within is None and (lo, hi) == (self.lo, self.hi) and op.name in self.recipes:
            return self.recipes[op.name]
        if isinstance(op, ops.Apply):
            up = op.inputs[0]
            assert up is not None
            rows = self._stateless(up, lo, hi, within)
            return None if rows is None else Applied(op.name, rows)
        assert isinstance(op, ops.Union)
        if self._is_input(op):
            return self._input(op, lo, hi, within)
        ups = [up for up in op.inputs if up is not None]
        return self._united([self._stateless(up, lo, hi, within) for up in ups])

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

    def _history(
        self, op: ops.Operator, port: int, lo: int, hi: int, within: Range | None = None
    ) -> Recipe | None:
        """Rows of an input edge in buckets lo..hi; lo may be before this step."""
        up = op.inputs[port]
        assert up is not None
        chunks = self.edges.get(f"{op.name}:{port}", ())
        parts = [self._chunk_rows(up, chunks, lo, hi, within)]
        if self._by_reference(up):
            raw_from = max(lo, chunks[-1].hi + 1) if chunks else lo
            parts.append(self._stateless(up, raw_from, hi, within) if raw_from <= hi else None)
        return self._united(parts)

    def _chunk_rows(
        self, up: ops.Operator, chunks: Sequence[Chunk], lo: int, hi: int, within: Range | None
    ) -> Recipe | None:
        overlapping = [chunk for chunk in chunks if chunk.hi >= lo and chunk.lo <= hi]
        if not overlapping:
            return None
        if within is None and (
            min(chunk.lo for chunk in overlapping) < lo
            or max(chunk.hi for chunk in overlapping) > hi
        ):
            within = (lo * self.width_us, (hi + 1) * self.width_us)
        return self._read(up.name, self._files(overlapping), within)

    def _united(self, parts: Sequence[Recipe | None]) -> Recipe | None:
        present = tuple(part for part in parts if part is not None)
        if len(present) < 2:
            return present[0] if present else None
        return United(present, one_task=self.one_task)

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

    def _materialise(self, op: ops.Operator, recipe: Recipe) -> Recipe | None:
        table = self._arrow(recipe, op.name)
        if table.num_rows == 0:
            return None
        chunk = self._write(table, op.name, self.lo, self.hi, op)
        for reader in self.path.operators:
            for port, up in enumerate(reader.inputs):
                if up is op and isinstance(reader, ops.TimeWindow | ops.Join):
                    edge = f"{reader.name}:{port}"
                    self.edges[edge] = (*self.edges.get(edge, ()), chunk)
        return self._read(op.name, self._files([chunk]))

    def _write(
        self,
        table: pa.Table,
        name: str,
        lo: int,
        hi: int,
        up: ops.Operator | None = None,
        keys: tuple[str, ...] = (),
    ) -> Chunk:
        """Write a state file. `up`: the stream of the rows, to record which buckets have rows.
        `keys`: the columns by which joins select the rows."""
        # Spark would take a file whose name begins with an underscore for a hidden one.
        file = f"{self.path.name}/state.{name}.{lo}-{hi}.{uuid.uuid4().hex[:8]}.parquet"
        path = os.path.join(self.engine.folder, file)
        crc = self.engine.indexes.write(table, keys, path) if keys else write_rows(table, path)
        self._made(file)
        buckets: tuple[int, ...] = ()
        if up is not None:
            times = times_us(table, self.compiled.time[up.name])
            buckets = tuple(map(int, np.unique(times // self.width_us)))
        return Chunk(file, lo, hi, table.num_rows, buckets, crc)

    def _made(self, file: str) -> None:
        self.made.add(file)
        self.engine.made(self.line, file)

    @contextmanager
    def _reading_once(self) -> Iterator[None]:
        """Rows that are read meanwhile are not used afterwards."""
        read_already = dict(self._read_already)
        with self.prepared.rewriting():
            yield
        self._read_already = read_already

    def _arrow(self, recipe: Recipe, name: str) -> pa.Table:
        computed = self.tables.get(name)
        if computed is not None and computed[0] is recipe:
            return computed[1]
        table = self._execute(recipe)
        schema = arrow_schema(self.compiled.schema[name])
        return canonical(table.select(schema.names).cast(schema))

    def _collect(self, recipe: Recipe | None, output: str) -> list[tuple[int, pa.Table]]:
        if recipe is None:
            return []
        time = self.compiled.time[output]
        table = sort_canonical(self._arrow(recipe, output), time)
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

    def _if_it_fits(self, collect: Callable[[], pa.Table]) -> pa.Table | None:
        """Rows that would only be stored in another form; None if they are too large for that. The
        job must not write state: its tasks may continue after it has failed."""
        try:
            return collect()
        except (PySparkException, Py4JJavaError) as err:
            if not is_too_large(err, can_be_split=True):
                raise
            _log.info("path %s: not folded, because the rows are too large", self.path.name)
            return None
