"""A step: runs the operators of a path over buckets lo..hi and creates the next state version."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from typing import Any

import pyarrow as pa

from holdfast.engine import keyed, windows
from holdfast.engine.compiled import count_windows
from holdfast.engine.inputs import OnResults, StepResult
from holdfast.engine.joins import Joins
from holdfast.engine.mergeable import AggregatePlan
from holdfast.engine.nullable import nullable
from holdfast.engine.recipe import Query, Read, Recipe, Sharded, United, WindowFunction
from holdfast.engine.sql import contains, select_from
from holdfast.engine.state import Version
from holdfast.engine.step_inputs import (
    PANE_FILES,
    Folded,
    at_time,
    size_of,
    together_of,
)
from holdfast.errors import InputError
from holdfast.model import operators as ops
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import parts_of

#: The buckets that have rows, with their tables.
Rows = list[tuple[int, pa.Table]]
#: Lines other than the stable one have no merges beside their steps.
UNLIMITED = 1 << 62
#: Most bytes of panes that the driver assigns to windows.
DUE_BYTES_MAX = 1 << 26


class Step(Joins):
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
            recipe = self._recipe(op)
            fans_out = readers.get(op.name, 0) > 1 and not self._by_reference(op)
            splits = isinstance(op, ops.Stateful) and self._into_union(op)
            if recipe is not None and (fans_out or splits or self._feeds_history(op)):
                recipe = self._materialise(op, recipe)
            self.recipes[op.name] = recipe
        collected = {
            name: self._collect(self.recipes[name], name)
            if name in self.recipes
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
        self._merge_layers()
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

    def _recipe(self, op: ops.Operator) -> Recipe | None:
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

    def _window(self, op: ops.TimeWindow) -> Recipe | None:
        since = (self.lo * self.width_us + 1 - op.size_us) // self.width_us
        chunks = self.panes.get(op.name, ())
        in_panes = {bucket for chunk in chunks for bucket in chunk.buckets}
        buckets = sorted(in_panes.union(self._new_buckets(op, since)))
        ends = windows.ends_due(op, self.lo, self.hi, buckets, self.width_us)
        if not ends:
            return None
        if op.fn is not None:
            return self._window_functions(op, ends)
        plan, stamp_as = self._plan(op), self.compiled.time[op.name]
        oldest = (ends[0] - op.size_us) // self.width_us
        newest = (ends[-1] - 1) // self.width_us
        raw_from = max(oldest, chunks[-1].hi + 1) if chunks else oldest
        chunks = tuple(chunk for chunk in chunks if chunk.hi >= oldest)
        if op.size_us == op.slide_us and not chunks:
            rows = self._history(op, 0, raw_from, newest, (ends[0] - op.size_us, ends[-1]))
            if rows is None:
                return None
            text = windows.direct(plan, op, select_from("rows"), stamp_as)
            return Query(text, (("rows", rows),))
        if not chunks and not self._new_buckets(op, oldest):
            return None
        if op.name not in self.engine.wide and (due := self._due(op, oldest, ends)) is not None:
            read = Read(op.name, (self.prepared.write(due, op.name, "due"),), True, "due")
            return Query(windows.results(plan, op, select_from("due"), stamp_as), (("due", read),))
        frames: list[tuple[str, Recipe]] = []
        parts = []
        rows = self._history(op, 0, raw_from, newest)
        if rows is not None:
            frames.append(("rows", rows))
            parts.append(windows.partials(plan, op, select_from("rows"), self._time_of(op)))
        if chunks:
            frames.append(("panes", self._read(op.name, self._files(chunks), panes=True)))
            parts.append(select_from("panes"))
        if not parts:
            return None
        panes = " UNION ALL ".join(parts)
        if self.one_task and len(parts) > 1:
            panes = f"SELECT /*+ COALESCE(1) */ * FROM ({panes})"
        text = windows.results(plan, op, windows.per_window(op, panes, ends), stamp_as)
        return Query(text, tuple(frames), recurs=False)

    def _time_of(self, op: ops.TimeWindow) -> str:
        """The time column of the rows of a window."""
        up = op.inputs[0]
        assert up is not None
        return self.compiled.time[up.name]

    def _rows_of_window(self, op: ops.TimeWindow, end: int) -> Recipe | None:
        start = end - op.size_us
        return self._history(
            op, 0, start // self.width_us, (end - 1) // self.width_us, (start, end)
        )

    def _window_functions(self, op: ops.TimeWindow, ends: list[int]) -> Recipe | None:
        """Call the window function on each window."""
        if self.one_task:
            return self._window_functions_one_by_one(op, ends)
        results: list[Recipe] = []
        for end in ends:
            rows = self._rows_of_window(op, end)
            if rows is not None:
                results.append(WindowFunction(op.name, rows, end))
        if len(results) < 2:
            return results[0] if results else None
        return United(tuple(results), one_task=False)

    def _window_functions_one_by_one(self, op: ops.TimeWindow, ends: list[int]) -> Recipe | None:
        """One job for each window, whose recipes recur."""
        results = []
        for end in ends:
            with self._reading_once():
                rows = self._rows_of_window(op, end)
                if rows is not None:
                    result = self._arrow(WindowFunction(op.name, rows, None), op.name)
                    results.append(at_time(result, self.compiled.time[op.name], end - 1))
        if not results:
            return None
        table = pa.concat_tables(results)
        recipe = Read(op.name, (self.prepared.write(table, op.name),), one_task=True)
        self.tables[op.name] = (recipe, table)
        return recipe

    def _due(self, op: ops.TimeWindow, since: int, ends: list[int]) -> pa.Table | None:
        """The panes of due windows, with new rows folded into panes. Folding and the rest are two
        jobs whose recipes recur. None if the panes are too large for the driver."""
        due = self._due_panes(op, since, ends)
        if due is None:
            self.engine.wide.add(op.name)
        return due

    def _due_panes(self, op: ops.TimeWindow, since: int, ends: list[int]) -> pa.Table | None:
        files = self._files(c for c in self.panes.get(op.name, ()) if c.hi >= since)
        if size_of(file.path for file in files) > DUE_BYTES_MAX:
            return None
        folded = self._fold(op, since)
        if folded is None and self._new_buckets(op, since):
            return None
        tables = [together_of(files)] if files else []
        if folded is not None:
            tables.append(folded.panes)
        return windows.due(op, pa.concat_tables(tables), ends, DUE_BYTES_MAX)

    def _new_buckets(self, op: ops.TimeWindow, since: int) -> list[int]:
        """Buckets from `since` on with rows that are not in panes."""
        chunks = self.panes.get(op.name, ())
        return self._buckets(op, 0, max(since, chunks[-1].hi + 1) if chunks else since, self.hi)

    def _fold(self, op: ops.TimeWindow, since: int) -> Folded | None:
        """Fold rows that are not in panes, once in a step. None without rows, or if the panes are
        too large."""
        if op.name not in self.folded:
            buckets = self._new_buckets(op, since)
            rows = self._history(op, 0, buckets[0], self.hi) if buckets else None
            panes = None
            if rows is not None:
                plan = self.compiled.plans[op.name]
                text = windows.partials(plan, op, select_from("rows"), self._time_of(op))
                recipe = Query(text, (("rows", rows),))
                panes = self._if_it_fits(lambda: self._panes(recipe))
            self.folded[op.name] = None if panes is None else Folded(panes, tuple(buckets))
        return self.folded[op.name]

    def _panes(self, recipe: Recipe) -> pa.Table:
        return nullable(self._execute(recipe))

    def _fold_panes(self, op: ops.TimeWindow) -> None:
        """Fold the rows of open windows into panes once enough buckets have gathered, unless they
        were folded for results already. Forget panes of closed windows."""
        since = windows.needed_from(op, self.hi, self.width_us)
        chunks = tuple(
            c for c in self.panes.get(op.name, ()) if c.buckets and c.buckets[-1] >= since
        )
        enough = len(self._new_buckets(op, since)) >= self.engine.pane_buckets
        folded = self._fold(op, since) if enough or op.name in self.folded else None
        if folded is not None and folded.buckets[-1] >= since:
            chunk = self._write(folded.panes, op.name, folded.buckets[0], folded.buckets[-1])
            chunks = (*chunks, replace(chunk, buckets=folded.buckets))
        if len(chunks) > PANE_FILES:
            open_us = windows.needed_from_us(op, self.hi, self.width_us)
            stored = self._read(op.name, self._files(chunks), (open_us, 1 << 62), panes=True)
            text = self.compiled.plans[op.name].merge(select_from("panes"), "__p")
            merge = Query(text, (("panes", stored),))
            merged = self._if_it_fits(lambda: self._panes(merge))
            if merged is not None:
                buckets = sorted({b for chunk in chunks for b in chunk.buckets if b >= since})
                chunk = self._write(merged, op.name, buckets[0], buckets[-1])
                chunks = (replace(chunk, buckets=tuple(buckets)),)
        self.panes[op.name] = chunks

    # -- keyed state -----------------------------------------------------------------------------

    def _keyed(self, op: ops.CountWindow | ops.Stateful, rows: Recipe | None) -> Recipe:
        up = op.inputs[0]
        assert up is not None
        folder = f"{self.path.name}/{op.name}.{self.hi}.{uuid.uuid4().hex[:8]}"
        tasks = 1 if self.interpreted else self.engine.network.partitions
        self.folders.append((op.name, folder, tasks))
        merging, shards, fixed = self.engine.merging, dict(self.shards.get(op.name, {})), {}
        merge_max = UNLIMITED
        if self.is_stable:
            merge_max = merging.step_max // (self.engine.network.partitions if tasks == 1 else 1)
            for number, shard in shards.items():
                shards[number], fixed[number] = merging.begin(op.name, number, shard)
        state = keyed.StepState(self.engine.folder, folder, self.hi, shards, fixed, merge_max)
        if not self.interpreted:  # shards are processed in parallel
            return Sharded(op.name, rows, state, one_task=False)
        if rows is None:
            none = arrow_schema(self.compiled.schema[up.name]).empty_table()
            rows = Read(up.name, (self.prepared.write(none, up.name),), one_task=True)
        if self.engine.sessions.is_local:
            file = self.prepared.write_text(state.text(), op.name)
            return Sharded(op.name, rows, file, one_task=True)
        return Sharded(op.name, rows, state, one_task=True)

    def _count_window(self, op: ops.CountWindow) -> Recipe | None:
        up = op.inputs[0]
        assert up is not None
        rows = self._stateless(up, self.lo, self.hi)
        if rows is None:
            return None
        # All rows of a key are in one task already, so the groups are complete there.
        text = count_windows(self._plan(op), select_from("rows"), self.compiled.time[op.name])
        return Query(text, (("rows", self._keyed(op, rows)),))

    def _stateful(self, op: ops.Stateful) -> Recipe | None:
        up = op.inputs[0]
        assert up is not None
        rows = self._stateless(up, self.lo, self.hi)
        end_us = (self.hi + 1) * self.width_us
        shards = self.shards.get(op.name, {}).values()
        due = any(shard.timer is not None and shard.timer[0] < end_us for shard in shards)
        return None if rows is None and not due else self._keyed(op, rows)

    def _take_shards(self) -> None:
        for name, folder, tasks in self.folders:
            path = os.path.join(self.engine.folder, folder)
            written = keyed.read_notes(path, tasks)
            if written is None:
                # Spark runs no task if its optimizer proves that the results are never read.
                frames = (self.builder.build(recipe) for recipe in self.executed)
                if any(contains(frame, keyed.name_of(name)) for frame in frames):
                    raise keyed.lost_note(path, 0)
                continue
            layers = (layer for shard in written.values() for layer in shard.layers)
            made = {layer.file for layer in layers if os.path.dirname(layer.file) == folder}
            keyed.clean_up(path, {os.path.basename(file) for file in made})
            for file in made:
                self._made(file)
            self.shards[name] = {**self.shards.get(name, {}), **written}

    def _merge_layers(self) -> None:
        """Use complete merges of layers, and start others. The last act of a step, which cannot
        fail."""
        merging = self.engine.merging
        for name, _, _ in self.folders if self.is_stable else ():
            operator: Any = self.engine.network.named(name)
            held, _, _ = self.builder.operator(operator)
            shards = self.shards.get(name, {})
            for number, shard in shards.items():
                for file in merging.end(name, number, shard):
                    self.engine.made(self.line, file)
            merging.start(name, shards, held.state, held.timer, self.path.name)
