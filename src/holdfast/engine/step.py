"""A step: runs the operators of a path over buckets lo..hi and creates the next state version."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from holdfast.engine import determinism, keyed, windows
from holdfast.engine.compiled import count_windows, join, stamp
from holdfast.engine.inputs import OnResults, StepResult
from holdfast.engine.mergeable import AggregatePlan
from holdfast.engine.sql import contains, query, quoted, select_from
from holdfast.engine.state import Chunk, Version
from holdfast.engine.step_inputs import PANE_FILES, History
from holdfast.errors import InputError
from holdfast.model import operators as ops
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import parts_of

#: The buckets that have rows, with their tables.
Rows = list[tuple[int, pa.Table]]


class Step(History):
    # -- the run ---------------------------------------------------------------------------

    def run(self, on_results: OnResults | None = None) -> StepResult:
        ends = {output: self._end(output) for output in self.path.outputs}
        end_operators = {end.name: end for end in ends.values()}
        operators = [op for op in self.path.operators if not isinstance(op, ops.Part)]
        if all(self._passed_on(end) for end in ends.values()):
            operators = []
        readers: dict[str, int] = {}
        for op in operators:
            for up in op.inputs:
                assert up is not None
                readers[up.name] = readers.get(up.name, 0) + 1
        for name in end_operators:
            readers[name] = readers.get(name, 0) + 1
        for op in operators:
            frame = self._frame(op)
            fans_out = readers.get(op.name, 0) > 1 and not self._by_reference(op)
            splits = isinstance(op, ops.Stateful) and self._into_union(op)
            if frame is not None and (fans_out or splits or self._feeds_history(op)):
                frame = self._materialise(op, frame)
            self.frames[op.name] = frame
        collected = {
            name: self._collect(self.frames[name], name)
            if name in self.frames
            else self._pass_on(end)
            for name, end in end_operators.items()
        }
        outputs = self._routed({output: collected[end.name] for output, end in ends.items()})
        if on_results is not None:
            on_results(outputs)  # folding does not delay the results
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

    def _end(self, output: str) -> ops.Operator:
        """The operator whose rows an output stream contains, all rows or one partition's part."""
        op = self.engine.network.named(output)
        end = op.inputs[0] if isinstance(op, ops.Output | ops.Part) else op
        assert end is not None
        return end

    def _routed(self, outputs: dict[str, Rows]) -> dict[str, Rows]:
        """Split rows that are routed to partitions, once for all partitions."""
        split: dict[tuple[int, tuple[str, ...], int], list[tuple[int, list[pa.Table]]]] = {}
        routed = {}
        for output, rows in outputs.items():
            op = self.engine.network.named(output)
            if isinstance(op, ops.Part):
                key = (id(rows), op.keys, op.of)
                if key not in split:
                    split[key] = [(bucket, parts_of(t, op.keys, op.of)) for bucket, t in rows]
                parts = [(bucket, tables[op.number]) for bucket, tables in split[key]]
                rows = [(bucket, table) for bucket, table in parts if table.num_rows]
            routed[output] = rows
        return routed

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
        raise InputError(f"{op.name}: operators of kind {op.kind} cannot run")

    def _plan(self, op: ops.TimeWindow | ops.CountWindow) -> AggregatePlan:
        plan = self.compiled.plans[op.name]
        return plan.general if op.name in self.engine.general and plan.general is not None else plan

    # -- time windows ----------------------------------------------------------------------------

    def _window(self, op: ops.TimeWindow) -> DataFrame | None:
        up = op.inputs[0]
        assert up is not None
        time = self.compiled.time[up.name]
        since = (self.lo * self.width_us + 1 - op.size_us) // self.width_us
        chunks = self.panes.get(op.name, ())
        raw_from = chunks[-1].hi + 1 if chunks else since
        raw = self._buckets(op, 0, raw_from, self.hi)
        buckets = sorted({b for chunk in chunks for b in chunk.buckets} | set(raw))
        ends = windows.ends_due(op, self.lo, self.hi, buckets, self.width_us)
        if not ends:
            return None
        oldest = (ends[0] - op.size_us) // self.width_us
        newest = (ends[-1] - 1) // self.width_us
        if op.fn is not None:
            return self._window_function(op, ends, time)
        plan, stamp_as = self._plan(op), self.compiled.time[op.name]
        files = self._files([chunk for chunk in chunks if chunk.hi >= oldest])
        rows = self._history(op, 0, max(oldest, raw_from), newest)
        if rows is not None and not files and op.size_us == op.slide_us:
            text = windows.direct(plan, op, select_from("rows"), ends, stamp_as)
            return query(text, rows=rows)
        frames: dict[str, DataFrame] = {}
        parts = []
        if rows is not None:
            frames["rows"] = rows
            parts.append(windows.partials(plan, op, select_from("rows"), time))
        if files:
            frames["panes"] = self._read(self.compiled.panes[op.name], files)
            parts.append(select_from("panes"))
        if not parts:
            return None
        panes = " UNION ALL ".join(parts)
        if self.small and len(parts) > 1:
            panes = f"SELECT /*+ COALESCE(1) */ * FROM ({panes})"
        return query(windows.results(plan, op, panes, ends, stamp_as), **frames)

    def _window_function(self, op: ops.TimeWindow, ends: list[int], time: str) -> DataFrame | None:
        """Call the window function on each window. The rows are in one Spark partition and in
        canonical order, so that even a sum of doubles has a fixed order."""
        assert op.fn is not None
        united: DataFrame | None = None
        for end in ends:
            lo, hi = (end - op.size_us) // self.width_us, (end - 1) // self.width_us
            rows = self._history(op, 0, lo, hi)
            if rows is None:
                continue
            micros = f"unix_micros({quoted(time)})"
            rows = rows.filter(f"{micros} >= {end - op.size_us}L and {micros} < {end}L")
            rows = rows.coalesce(1).sortWithinPartitions(*_sortable(rows, time))
            result = determinism.apply(op.fn, rows, op.name)
            result = stamp(result, self.compiled.time[op.name], end)
            if op.name in self.compiled.from_nothing:
                # A window without rows has no result, even if the function returns rows for it.
                result = result.join(rows.select(F.lit(1).alias("__any")).limit(1)).drop("__any")
            united = result if united is None else united.unionByName(result)
        return united

    def _fold_panes(self, op: ops.TimeWindow) -> None:
        """Fold the rows of open windows into panes once enough buckets have gathered."""
        up = op.inputs[0]
        assert up is not None
        alive_from = windows.needed_from(op, self.hi, self.width_us)
        chunks = tuple(c for c in self.panes.get(op.name, ()) if c.hi >= alive_from)
        raw_from = max(alive_from, chunks[-1].hi + 1 if chunks else alive_from)
        raw = self._buckets(op, 0, raw_from, self.hi)
        if len(raw) >= self.engine.pane_buckets:
            rows = self._history(op, 0, raw_from, self.hi)
            if rows is not None:
                plan, time = self.compiled.plans[op.name], self.compiled.time[up.name]
                text = windows.partials(plan, op, select_from("rows"), time)
                panes = query(text, rows=rows)
                folded = self._pane_chunk(op, panes, raw_from, self.hi, raw)
                chunks = (*chunks, folded) if folded is not None else chunks
        if len(chunks) > PANE_FILES:
            stored = self._read(self.compiled.panes[op.name], self._files(chunks))
            merged = query(
                self.compiled.plans[op.name].merge(select_from("panes"), "__p"), panes=stored
            )
            buckets = sorted({b for chunk in chunks for b in chunk.buckets})
            folded = self._pane_chunk(op, merged, chunks[0].lo, chunks[-1].hi, buckets)
            chunks = (folded,) if folded is not None else chunks
        self.panes[op.name] = chunks

    def _pane_chunk(
        self, op: ops.TimeWindow, panes: DataFrame, lo: int, hi: int, buckets: list[int]
    ) -> Chunk | None:
        self.jobs += 1
        rows = self._if_it_fits(panes.toArrow)
        if rows is None:
            return None
        return replace(self._write(rows, op.name, lo, hi), buckets=tuple(buckets))

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
        micros = f"unix_micros({quoted(times[0])})"
        return joined.filter(self._within(micros, self.lo, self.hi))

    # -- keyed state -----------------------------------------------------------------------------

    def _keyed(
        self, op: ops.CountWindow | ops.Stateful, rows: DataFrame | None, step: keyed.Step,
        out: pa.Schema, ddl: str,
    ) -> DataFrame:  # fmt: skip
        up = op.inputs[0]
        assert up is not None
        schema = arrow_schema(self.compiled.schema[up.name])
        shards = self.engine.network.partitions
        # A single shard needs no shuffle, except without rows: coalesce would then create no task.
        together = shards == 1 and rows is not None
        if rows is None:
            rows = self.spark.createDataFrame([], self.compiled.schema[up.name])
        spread = (
            rows.coalesce(1)
            if together
            else rows.repartition(shards, *(F.col(quoted(key)) for key in op.keys))
        )
        folder = f"{self.path.name}/{op.name}.{self.hi}.{uuid.uuid4().hex[:8]}"
        shard_files = {
            number: (os.path.join(self.engine.folder, shard.file), shard.crc)
            for number, shard in self.shards.get(op.name, {}).items()
        }
        task = keyed.ShardTask(
            step, shard_files, os.path.join(self.engine.folder, folder), schema, out
        )
        self.folders.append((op.name, folder))
        if any("." in name or "`" in name for name in schema.names):
            # `mapInArrow` takes a dot in a name for the field of a struct.
            spread = spread.toDF(*(f"c{place}" for place in range(len(schema))))
        return spread.mapInArrow(task, ddl)

    def _count_window(self, op: ops.CountWindow) -> DataFrame | None:
        up = op.inputs[0]
        assert up is not None
        rows = self._stateless(up, self.lo, self.hi)
        if rows is None:
            return None
        time = self.compiled.time[up.name]
        schema = arrow_schema(self.compiled.schema[up.name])
        out = schema.append(pa.field("__seq", pa.int64())).append(pa.field("__last", pa.int64()))
        ddl = self.compiled.schema[up.name] + ", __seq bigint, __last bigint"
        assigned = self._keyed(
            op, rows, keyed.CountWindowStep(op.keys, time, op.size, op.slide), out, ddl
        )
        plan = self._plan(op)
        # All rows of a key are in one task already, so the groups are complete there.
        text = count_windows(plan, select_from("rows"), self.compiled.time[op.name])
        return query(text, rows=assigned)

    def _stateful(self, op: ops.Stateful) -> DataFrame | None:
        up = op.inputs[0]
        assert up is not None
        rows = self._stateless(up, self.lo, self.hi)
        timers = [
            s.timer_us for s in self.shards.get(op.name, {}).values() if s.timer_us is not None
        ]
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
            path = os.path.join(self.engine.folder, folder)
            written = keyed.read_shards(path, self.engine.network.partitions)
            if written is None:
                # Spark runs no task if its optimizer proves that the results are never read.
                if any(contains(frame, keyed.name_of(folder)) for frame in self.executed):
                    raise keyed.lost_shard(path, 0)
                continue
            keyed.clean_up(path, written.values())
            shards = dict(self.shards.get(name, {}))
            for number, shard in written.items():
                file = f"{folder}/{shard.file}"
                self.engine.made(self.line, file)
                shards[number] = replace(shard, file=file)
            self.shards[name] = shards


def _sortable(df: DataFrame, time: str) -> list[Column]:
    """The columns in canonical order: the time first, without maps, which have no order."""
    others = [
        f.name
        for f in df.schema.fields
        if f.name != time and "map<" not in f.dataType.simpleString()
    ]
    return [F.col(quoted(name)) for name in (time, *others)]
