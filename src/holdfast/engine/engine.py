"""The engine: deterministic Spark jobs over buckets (DESIGN section 4).

`Engine.run(path, version, lo, hi, inputs)` computes every output of a path for buckets lo..hi from
the inputs and the state after lo-1, and gives the state after hi. Several buckets in one job give
the same bits as one by one. Work is done only where a result is due: rows of an open window stay
where they are, in the durable input segments, until the window closes or many have gathered and
are folded into panes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from holdfast.engine import keyed, windows
from holdfast.engine.compiled import (
    Compiled,
    compile_network,
    finish_count_window,
    finish_window,
    join,
    stamp,
)
from holdfast.engine.sample import sample_rows
from holdfast.engine.session import LARGE_JOB_ROWS, Sessions
from holdfast.engine.state import Chunk, Shard, Version, release, write_rows
from holdfast.errors import HoldfastError, InputError
from holdfast.log.rows import canonical, runs, sort_canonical, times_us
from holdfast.model import operators as ops
from holdfast.model.fragments import Path
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema

#: Fold the raw rows of open windows into panes once so many buckets with rows have gathered.
PANE_BUCKETS = 16
#: Merge panes once a window has so many files of them.
PANE_FILES = 16


#: Rows of a history that are put together through the driver; larger ones stay as they are.
FOLD_ROWS_MAX = 500_000


@dataclass(frozen=True, slots=True)
class InputFile:
    bucket: int
    path: str
    rows: int


class Inputs(Protocol):
    """Where a path finds the stable input segments it may read."""

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    #: For each output stream the tables of the buckets that have rows, in bucket order.
    outputs: dict[str, list[tuple[int, pa.Table]]]
    version: Version
    #: Spark jobs this step needed: buckets without results need none.
    jobs: int


class Engine:
    """Compiled once per node; `run` may be called from one thread per path."""

    def __init__(
        self,
        network: Network,
        sessions: Sessions,
        folder: str,
        *,
        pane_buckets: int = PANE_BUCKETS,
        compiled: Compiled | None = None,
    ) -> None:
        self.network = network
        self.sessions = sessions
        #: Where state files live; executors must be able to write there.
        self.folder = os.path.abspath(folder)
        self.pane_buckets = pane_buckets
        self.compiled = compiled or compile_network(network, sessions.small)
        self._made: dict[str, set[str]] = {}
        self._readers: dict[tuple[int, str], Any] = {}
        os.makedirs(self.folder, exist_ok=True)

    def plan_hash(self, path: Path) -> str:
        """Changes when the query changes in a way the state can feel."""
        text = [self.network.name, str(self.network.width_us), str(self.network.partitions)]
        for op in path.operators:
            shape = [getattr(op, name, None) for name in
                     ("size_us", "slide_us", "keys", "within_us", "on", "size", "slide", "state",
                      "out", "timer")]  # fmt: skip
            aggregates = {key: str(value) for key, value in getattr(op, "aggregates", {}).items()}
            text.append(repr((op.name, op.kind, self.compiled.schema[op.name], shape, aggregates)))
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def empty(self, path: Path, bucket: int) -> Version:
        """The state before anything: after `bucket`, nothing is known."""
        return Version(path.name, bucket, needs_from=bucket + 1, plan=self.plan_hash(path))

    def run(self, path: Path, version: Version, lo: int, hi: int, inputs: Inputs) -> StepResult:
        assert lo == version.bucket + 1 and lo <= hi, (version.bucket, lo, hi)
        step = _Step(self, path, version, lo, hi, inputs)
        try:
            return step.run()
        except PySparkException as err:
            raise _told(err, path, lo, hi) from err

    def warm_up(self, path: Path, *, rounds: int = 3) -> None:
        """Run the path over made-up rows and forget the results: the first real bucket should not
        pay for class loading. What user functions make of such rows does not matter."""
        folder = tempfile.mkdtemp(prefix="holdfast-warm-")
        scratch = Engine(self.network, self.sessions, folder, pane_buckets=2, compiled=self.compiled)
        try:
            version = scratch.empty(path, -1)
            reach = max(1, -(-path.extent_us() // self.network.width_us))
            for number in range(rounds):
                made = _MadeUp(self, path, folder, number * reach)
                version = scratch.run(
                    path, version, version.bucket + 1, (number + 1) * reach - 1, made
                ).version
        except HoldfastError:
            pass
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def adopt(self, version: Version) -> None:
        """Know the files of a version that was recovered or imported."""
        self._made.setdefault(version.path, set()).update(version.files())

    def release(self, path: Path, kept: Sequence[Version]) -> None:
        """Old versions nothing can roll back to give their files back."""
        release(self.folder, kept, self._made.setdefault(path.name, set()))

    def made(self, path: str, file: str) -> None:
        self._made.setdefault(path, set()).add(file)

    def reader(self, spark: SparkSession, ddl: str) -> Any:
        key = (id(spark), ddl)
        if key not in self._readers:
            self._readers[key] = spark.read.schema(ddl)
        return self._readers[key]


class _MadeUp:
    """A bucket of sample rows on every input."""

    def __init__(self, engine: Engine, path: Path, folder: str, bucket: int) -> None:
        self._held = {}
        for stream in path.inputs:
            schema = arrow_schema(engine.compiled.schema[stream])
            rows, time = sample_rows(schema, 64), engine.compiled.time[stream]
            at = pa.scalar(bucket * engine.network.width_us, pa.int64()).cast(schema.field(time).type)
            rows = rows.set_column(
                rows.column_names.index(time), schema.field(time), pa.repeat(at, rows.num_rows)
            )
            file = os.path.join(folder, f"{stream}.{bucket}.parquet")
            write_rows(rows, file)
            self._held[stream] = InputFile(bucket, file, rows.num_rows)

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        file = self._held[stream]
        return [file] if lo <= file.bucket <= hi else []


_RAISED = re.compile(r"^([A-Za-z_][\w.]*): (.+)$")


def _told(err: PySparkException, path: Path, lo: int, hi: int) -> HoldfastError:
    """Spark's error as one message: what a worker's Python raised, or the first line of Spark's."""
    lines = [line.strip() for line in str(err).strip().splitlines() if line.strip()]
    raised = [match for line in lines if (match := _RAISED.match(line))]
    told = lines[0][:400]
    if "Python worker" in str(err) and raised:
        name, text = raised[-1].groups()
        told = text if name.startswith("holdfast.errors.") else f"{name}: {text}"
    return InputError(f"path {path.name!r}, buckets {lo} to {hi}: {told}")


class _Step:
    """One run: DataFrames for buckets lo..hi, operator by operator, upstream first."""

    def __init__(
        self, engine: Engine, path: Path, version: Version, lo: int, hi: int, inputs: Inputs
    ) -> None:
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
        self.folders: list[tuple[str, str]] = []
        rows = sum(f.rows for s in path.inputs for f in inputs.files(s, lo, hi)) + version.rows()
        large = rows >= LARGE_JOB_ROWS
        self.spark = engine.sessions.large if large else engine.sessions.small
        self.small = not large

    # -- the run ---------------------------------------------------------------------------

    def run(self) -> StepResult:
        readers: dict[str, int] = {}
        for op in self.path.operators:
            for up in op.inputs:
                assert up is not None
                readers[up.name] = readers.get(up.name, 0) + 1
        for output in self.path.outputs:
            op = self.engine.network.named(output)
            up = op.inputs[0] if isinstance(op, ops.Output) else op
            assert up is not None
            readers[up.name] = readers.get(up.name, 0) + 1
        for op in self.path.operators:
            frame = self._frame(op)
            fans_out = readers.get(op.name, 0) > 1 and not self._by_reference(op)
            splits = isinstance(op, ops.Stateful) and self._into_union(op)
            if frame is not None and (fans_out or splits or self._feeds_history(op)):
                frame = self._materialise(op, frame)
            self.frames[op.name] = frame
        outputs = {}
        for output in self.path.outputs:
            op = self.engine.network.named(output)
            source = op.inputs[0] if isinstance(op, ops.Output) else op
            assert source is not None
            outputs[output] = self._collect(self.frames[source.name], output)
        self._take_shards()
        for op in self.path.operators:
            if isinstance(op, ops.TimeWindow) and op.fn is None:
                self._fold_panes(op)
        self._forget()
        version = Version(
            self.path.name, self.hi, self.panes, self.edges, self.shards,
            min(self.needs_from, self.hi + 1), self.before.plan,
        )  # fmt: skip
        return StepResult(outputs, version, self.jobs)

    def _frame(self, op: ops.Operator) -> DataFrame | None:
        match op:
            case ops.Apply() | ops.Union():
                return self._stateless(op, self.lo, self.hi)
            case ops.TimeWindow():
                return self._window(op)
            case ops.Join():
                return self._join(op)
            case ops.CountWindow():
                return self._count_window(op)
            case ops.Stateful():
                return self._stateful(op)
        raise InputError(f"{op.name}: {op.kind} cannot be run")

    # -- rows --------------------------------------------------------------------------------

    def _read(self, ddl: str, files: list[str]) -> DataFrame:
        df: DataFrame = self.engine.reader(self.spark, ddl).parquet(*files)
        return df.coalesce(1) if self.small else df

    def _input(self, stream: str, lo: int, hi: int) -> DataFrame | None:
        files = [f.path for f in self.inputs.files(stream, lo, hi)]
        return self._read(self.compiled.schema[stream], files) if files else None

    def _stateless(self, op: ops.Operator, lo: int, hi: int) -> DataFrame | None:
        """Rows of a stateless operator, in lo..hi: of the past too, where all above is stateless."""
        current = (lo, hi) == (self.lo, self.hi)
        if op.name not in self.mine:
            return self._input(op.name, lo, hi)
        if current and op.name in self.frames:
            return self.frames[op.name]
        if isinstance(op, ops.Apply):
            up = op.inputs[0]
            assert up is not None
            df = self._stateless(up, lo, hi)
            return None if df is None else op.fn(df)
        assert isinstance(op, ops.Union)
        ups = [up for up in op.inputs if up is not None]
        if all(up.name not in self.mine for up in ups):
            # Straight from inputs of one schema: one scan of all files.
            files = [f.path for up in ups for f in self.inputs.files(up.name, lo, hi)]
            return self._read(self.compiled.schema[op.name], files) if files else None
        return self._united(
            [df for up in ups if (df := self._stateless(up, lo, hi)) is not None]
        )

    def _by_reference(self, op: ops.Operator) -> bool:
        """Between this stream and the inputs stands nothing that keeps state."""
        if op.name not in self.mine:
            return True
        return not op.stateful and all(
            self._by_reference(up) for up in op.inputs if up is not None
        )

    def _buckets(self, op: ops.Operator, port: int, lo: int, hi: int) -> list[int]:
        """Buckets in lo..hi in which the edge may have rows, sorted."""
        up = op.inputs[port]
        assert up is not None
        chunks = self.edges.get(f"{op.name}:{port}", ())
        found = {b for chunk in chunks for b in chunk.buckets if lo <= b <= hi}
        if self._by_reference(up):
            raw_from = max(lo, chunks[-1].hi + 1) if chunks else lo
            for stream in self._streams(up):
                found.update(f.bucket for f in self.inputs.files(stream, raw_from, hi))
        return sorted(found)

    def _streams(self, op: ops.Operator) -> list[str]:
        if op.name not in self.mine:
            return [op.name]
        return [s for up in op.inputs if up is not None for s in self._streams(up)]

    def _history(self, op: ops.Operator, port: int, lo: int, hi: int) -> DataFrame | None:
        """Rows of an input edge in lo..hi, where lo may lie before this step."""
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
        held = [chunk for chunk in chunks if chunk.hi >= lo and chunk.lo <= hi]
        if not held:
            return None
        df = self._read(
            self.compiled.schema[up.name],
            [os.path.join(self.engine.folder, chunk.file) for chunk in held],
        )
        time = f"unix_micros(`{self.compiled.time[up.name]}`)"
        if min(chunk.lo for chunk in held) < lo or max(chunk.hi for chunk in held) > hi:
            df = df.filter(
                f"{time} >= {lo * self.width_us}L and {time} < {(hi + 1) * self.width_us}L"
            )
        return df

    def _united(self, parts: list[DataFrame]) -> DataFrame | None:
        if not parts:
            return None
        united = parts[0]
        for part in parts[1:]:
            united = united.unionByName(part)
        return united.coalesce(1) if self.small and len(parts) > 1 else united

    def _feeds_history(self, op: ops.Operator) -> bool:
        """Its rows must outlive the step: a window or join reads them, and they are not inputs."""
        if self._by_reference(op):
            return False
        return any(
            up is op and isinstance(reader, ops.TimeWindow | ops.Join)
            for reader in self.path.operators
            for up in reader.inputs
        )

    def _into_union(self, op: ops.Operator) -> bool:
        """A shard is known by the number of its task, which a union in the same job would change."""
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
        return self._read(
            self.compiled.schema[op.name], [os.path.join(self.engine.folder, chunk.file)]
        )

    def _write(
        self, table: pa.Table, name: str, lo: int, hi: int, up: ops.Operator | None = None
    ) -> Chunk:
        """A state file; where its rows are those of the stream `up`, with the buckets in it."""
        file = f"{self.path.name}/{name}.{lo}-{hi}.{uuid.uuid4().hex[:8]}.parquet"
        write_rows(table, os.path.join(self.engine.folder, file))
        self.engine.made(self.path.name, file)
        buckets: tuple[int, ...] = ()
        if up is not None:
            times = times_us(table, self.compiled.time[up.name])
            buckets = tuple(map(int, np.unique(times // self.width_us)))
        return Chunk(file, lo, hi, table.num_rows, buckets)

    def _arrow(self, frame: DataFrame, name: str) -> pa.Table:
        self.jobs += 1
        table = frame.toArrow()
        schema = arrow_schema(self.compiled.schema[name])
        return canonical(table.select(schema.names).cast(schema))

    def _collect(self, frame: DataFrame | None, output: str) -> list[tuple[int, pa.Table]]:
        if frame is None:
            return []
        time = self.compiled.time[output]
        table = sort_canonical(self._arrow(frame, output), time)
        found = runs(times_us(table, time) // self.width_us)
        if found and (found[0][0] < self.lo or found[-1][0] > self.hi):
            raise InputError(
                f"{output}: a result in bucket {found[0][0]} or {found[-1][0]} came out of buckets "
                f"{self.lo} to {self.hi}"
            )
        return [(bucket, table.slice(start, end - start)) for bucket, start, end in found]

    # -- time windows ----------------------------------------------------------------------------

    def _window(self, op: ops.TimeWindow) -> DataFrame | None:
        up = op.inputs[0]
        assert up is not None
        time = self.compiled.time[up.name]
        since = (self.lo * self.width_us + 1 - op.size_us) // self.width_us
        chunks = self.panes.get(op.name, ())
        raw_from = chunks[-1].hi + 1 if chunks else since
        raw = self._buckets(op, 0, raw_from, self.hi)
        known = sorted({b for chunk in chunks for b in chunk.buckets} | set(raw))
        ends = windows.ends_due(op, self.lo, self.hi, known, self.width_us)
        if not ends:
            return None
        oldest = (ends[0] - op.size_us) // self.width_us
        newest = (ends[-1] - 1) // self.width_us
        if op.fn is not None:
            return self._window_function(op, ends, time)
        plan = self.compiled.plans[op.name]
        parts = []
        rows = self._history(op, 0, max(oldest, raw_from), newest)
        if rows is not None:
            parts.append(windows.partials(plan, op, rows, time))
        files = [
            os.path.join(self.engine.folder, chunk.file) for chunk in chunks if chunk.hi >= oldest
        ]
        if files:
            parts.append(self._read(self._pane_ddl(op), files))
        if not parts:
            return None
        panes = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
        if self.small and len(parts) > 1:
            panes = panes.coalesce(1)
        merged = len(parts) == 1 and not files
        found = windows.results(plan, op, panes, ends, merged=merged)
        return finish_window(found, op.size_us, self.compiled.time[op.name])

    def _window_function(self, op: ops.TimeWindow, ends: list[int], time: str) -> DataFrame | None:
        """User code on each window, its rows in one partition and canonical order, so that even a
        sum of doubles inside has one order."""
        assert op.fn is not None
        united: DataFrame | None = None
        for end in ends:
            lo, hi = (end - op.size_us) // self.width_us, (end - 1) // self.width_us
            rows = self._history(op, 0, lo, hi)
            if rows is None:
                continue
            micros = f"unix_micros(`{time}`)"
            rows = rows.filter(f"{micros} >= {end - op.size_us}L and {micros} < {end}L")
            rows = rows.coalesce(1).sortWithinPartitions(time, *_sortable(rows, time))
            result = stamp(op.fn(rows), self.compiled.time[op.name], end)
            united = result if united is None else united.unionByName(result)
        return united

    def _pane_ddl(self, op: ops.TimeWindow) -> str:
        up = op.inputs[0]
        assert up is not None
        key = (0, f"panes of {op.name}")
        if key not in self.engine._readers:
            stub = self.engine.sessions.small.createDataFrame([], self.compiled.schema[up.name])
            partial = windows.partials(
                self.compiled.plans[op.name], op, stub, self.compiled.time[up.name]
            )
            self.engine._readers[key] = partial.schema
        return self.engine._readers[key]  # type: ignore[no-any-return]

    def _fold_panes(self, op: ops.TimeWindow) -> None:
        """Raw rows of open windows become panes once enough buckets have gathered."""
        up = op.inputs[0]
        assert up is not None
        alive_from = windows.needed_from(op, self.hi, self.width_us)
        chunks = tuple(c for c in self.panes.get(op.name, ()) if c.hi >= alive_from)
        raw_from = max(alive_from, chunks[-1].hi + 1 if chunks else alive_from)
        raw = self._buckets(op, 0, raw_from, self.hi)
        if len(raw) >= self.engine.pane_buckets:
            rows = self._history(op, 0, raw_from, self.hi)
            if rows is not None:
                panes = windows.partials(
                    self.compiled.plans[op.name], op, rows, self.compiled.time[up.name]
                )
                chunks = (*chunks, self._pane_chunk(op, panes, raw_from, self.hi, raw))
        if len(chunks) > PANE_FILES:
            held = self._read(
                self._pane_ddl(op), [os.path.join(self.engine.folder, c.file) for c in chunks]
            )
            merged = self.compiled.plans[op.name].merge(held, "_p")
            buckets = sorted({b for chunk in chunks for b in chunk.buckets})
            chunks = (self._pane_chunk(op, merged, chunks[0].lo, chunks[-1].hi, buckets),)
        self.panes[op.name] = chunks

    def _pane_chunk(
        self, op: ops.TimeWindow, panes: DataFrame, lo: int, hi: int, buckets: list[int]
    ) -> Chunk:
        self.jobs += 1
        chunk = self._write(panes.toArrow(), op.name, lo, hi)
        return Chunk(chunk.file, lo, hi, chunk.rows, tuple(buckets))

    # -- joins ---------------------------------------------------------------------------------

    def _join(self, op: ops.Join) -> DataFrame | None:
        since = (self.lo * self.width_us - op.within_us) // self.width_us
        fresh = [self._buckets(op, port, self.lo, self.hi) for port in (0, 1)]
        if not fresh[0] and not fresh[1]:
            return None
        left, right = (self._history(op, port, since, self.hi) for port in (0, 1))
        if left is None or right is None:
            return None
        times = [self.compiled.time[up.name] for up in op.inputs if up is not None]
        joined = join(left, right, op, times[0], times[1])
        micros = f"unix_micros(`{times[0]}`)"
        return joined.filter(
            f"{micros} >= {self.lo * self.width_us}L and {micros} < {(self.hi + 1) * self.width_us}L"
        )

    # -- keyed state -----------------------------------------------------------------------------

    def _keyed(
        self, op: ops.CountWindow | ops.Stateful, rows: DataFrame | None, step: keyed.Step,
        out: pa.Schema, ddl: str,
    ) -> DataFrame:  # fmt: skip
        up = op.inputs[0]
        assert up is not None
        schema = arrow_schema(self.compiled.schema[up.name])
        if rows is None:
            rows = self.spark.createDataFrame([], self.compiled.schema[up.name])
        folder = f"{self.path.name}/{op.name}.{self.hi}.{uuid.uuid4().hex[:8]}"
        held = {
            number: os.path.join(self.engine.folder, shard.file)
            for number, shard in self.shards.get(op.name, {}).items()
        }
        task = keyed.ShardTask(step, held, os.path.join(self.engine.folder, folder), schema, out)
        self.folders.append((op.name, folder))
        return rows.repartition(self.engine.network.partitions, *op.keys).mapInArrow(task, ddl)

    def _count_window(self, op: ops.CountWindow) -> DataFrame | None:
        up = op.inputs[0]
        assert up is not None
        rows = self.frames.get(up.name) if up.name in self.mine else self._stateless(up, self.lo, self.hi)
        if rows is None:
            return None
        time = self.compiled.time[up.name]
        schema = arrow_schema(self.compiled.schema[up.name])
        out = schema.append(pa.field("_seq", pa.int64())).append(pa.field("_last", pa.int64()))
        ddl = self.compiled.schema[up.name] + ", _seq bigint, _last bigint"
        assigned = self._keyed(
            op, rows, keyed.CountWindowStep(op.keys, time, op.size, op.slide), out, ddl
        )
        plan = self.compiled.plans[op.name]
        # All rows of a key are in one task already, so the groups are whole there.
        found = plan.finish(plan.first(plan.prepare(assigned), "_seq", "_last"), "_seq", "_last")
        return finish_count_window(found, self.compiled.time[op.name])

    def _stateful(self, op: ops.Stateful) -> DataFrame | None:
        up = op.inputs[0]
        assert up is not None
        rows = self.frames.get(up.name) if up.name in self.mine else self._stateless(up, self.lo, self.hi)
        timers = [s.timer_us for s in self.shards.get(op.name, {}).values() if s.timer_us is not None]
        due = any(timer < (self.hi + 1) * self.width_us for timer in timers)
        if rows is None and not due:
            return None
        out = arrow_schema(op.out)
        step = keyed.StatefulStep(
            op.fn, op.name, self.compiled.time[op.name], op.timer, arrow_schema(op.state), out,
            self.width_us, self.hi,
        )  # fmt: skip
        return self._keyed(op, rows, step, out, self.compiled.schema[op.name])

    def _take_shards(self) -> None:
        for name, folder in self.folders:
            found = keyed.read_shards(os.path.join(self.engine.folder, folder))
            held = dict(self.shards.get(name, {}))
            for number, shard in found.items():
                file = f"{folder}/{os.path.basename(shard['file'])}"
                self.engine.made(self.path.name, file)
                held[number] = Shard(file, shard["rows"], shard["timer_us"])
            self.shards[name] = held

    # -- what the next step still needs --------------------------------------------------------------

    def _alive_from(self, op: ops.Operator) -> int | None:
        """First bucket of its inputs that a later step can still need; None without history."""
        if isinstance(op, ops.TimeWindow):
            alive = windows.needed_from(op, self.hi, self.width_us)
            panes = self.panes.get(op.name, ())
            return max(alive, panes[-1].hi + 1) if panes else alive
        if isinstance(op, ops.Join):
            return ((self.hi + 1) * self.width_us - op.within_us) // self.width_us
        return None

    def _forget(self) -> None:
        """Drop chunks out of reach, put small files together, and say from which bucket on raw
        inputs are still referred to."""
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
        """A history of many small files is read again in every step: put them into one."""
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
            held = self._chunk_rows(up, chunks, lo, chunks[-1].hi)
            chunks = self._row_chunk(op, port, up, (), held, lo)
        return chunks

    def _row_chunk(
        self, op: ops.Operator, port: int, up: ops.Operator, chunks: tuple[Chunk, ...],
        rows: DataFrame | None, lo: int,
    ) -> tuple[Chunk, ...]:  # fmt: skip
        if rows is None:
            return chunks
        chunk = self._write(self._arrow(rows, up.name), f"{op.name}.{port}", lo, self.hi, up)
        return (*chunks, chunk)


def _sortable(df: DataFrame, time: str) -> list[str]:
    return [f.name for f in df.schema.fields if f.name != time and "map<" not in f.dataType.simpleString()]
