"""A step: runs the operators of a path over buckets lo..hi and creates the next state version."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

import pyarrow as pa

from holdfast.engine import keyed
from holdfast.engine.compiled import count_results, count_windows
from holdfast.engine.inputs import OnResults, StepResult
from holdfast.engine.recipe import Query, Read, Recipe, Sharded
from holdfast.engine.sql import contains, select_from
from holdfast.engine.state import Version
from holdfast.engine.step_inputs import NoTask
from holdfast.engine.time_windows import TimeWindows
from holdfast.errors import InputError
from holdfast.model import operators as ops
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import parts_of

_log = logging.getLogger("holdfast.engine")

#: The buckets that have rows, with their tables.
Rows = list[tuple[int, pa.Table]]
#: Lines other than the stable one have no merges beside their steps.
UNLIMITED = 1 << 62


class Step(TimeWindows):
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
            self.path.name, self.hi, self.panes, self.edges, self.shards, self._refers_from(),
            self.before.plan,
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

    # -- keyed state -----------------------------------------------------------------------------

    def _keyed(self, op: ops.CountWindow | ops.Stateful, rows: Recipe | None) -> Recipe:
        up = op.inputs[0]
        assert up is not None
        folder = f"{self.path.name}/{op.name}.{self.hi}.{uuid.uuid4().hex[:8]}"
        tasks = 1 if self.one_task else self.engine.network.partitions
        self.folders.append((op.name, folder, tasks))
        merging, shards, fixed = self.engine.merging, dict(self.shards.get(op.name, {})), {}
        merge_max = UNLIMITED
        if self.is_stable:
            merge_max = self._merge_max
            for number, shard in shards.items():
                shards[number], fixed[number] = merging.begin(op.name, number, shard)
        state = keyed.StepState(
            self.engine.folder, folder, self.hi, shards, fixed, merge_max, self.upkeep.merges
        )
        if not self.one_task:  # shards are processed in parallel
            return Sharded(op.name, rows, state, one_task=False)
        if rows is None:
            rows = self._nothing(up)
        if self.engine.sessions.is_local:
            file = self.prepared.write_text(state.text(), op.name)
            return Sharded(op.name, rows, file, one_task=True)
        return Sharded(op.name, rows, state, one_task=True)

    def _keyed_rows(self, op: ops.CountWindow | ops.Stateful) -> Recipe | None:
        """The rows that an operator processes in this step."""
        up = op.inputs[0]
        assert up is not None
        rows = self._stateless(up, self.lo, self.hi)
        if rows is not None and op.name in self.engine.never_empty:
            return self._united((rows, self._nothing(up)))
        return rows

    def _nothing(self, op: ops.Operator) -> Recipe:
        """No rows of an operator."""
        none = arrow_schema(self.compiled.schema[op.name]).empty_table()
        return Read(op.name, (self.prepared.write(none, op.name),), one_task=self.one_task)

    def _count_window(self, op: ops.CountWindow) -> Recipe | None:
        up = op.inputs[0]
        assert up is not None
        rows = self._keyed_rows(op)
        if rows is None:
            return None
        plan, time = self._plan(op), self.compiled.time[op.name]
        if op.name in self.compiled.totals:
            columns = arrow_schema(self.compiled.schema[up.name]).names
            each = plan.of_each_row(select_from("rows"), columns)
            assert each is not None
            rows = self._keyed(op, Query(each, (("rows", rows),)))
            return Query(count_results(plan, select_from("rows"), time), (("rows", rows),))
        text = count_windows(plan, select_from("rows"), time)
        return Query(text, (("rows", self._keyed(op, rows)),))

    def _stateful(self, op: ops.Stateful) -> Recipe | None:
        rows = self._keyed_rows(op)
        end_us = (self.hi + 1) * self.width_us
        shards = self.shards.get(op.name, {}).values()
        due = any(shard.timer is not None and shard.timer[0] < end_us for shard in shards)
        if rows is None and not due:
            return None
        return self._keyed(op, rows)

    def _take_shards(self) -> None:
        for name, folder, tasks in self.folders:
            path = os.path.join(self.engine.folder, folder)
            shards = keyed.read_notes(path, tasks)
            if shards is None:
                # Spark runs no task if its optimizer proves that the results are never read.
                frames = (self.builder.build(recipe) for recipe in self.executed)
                if any(contains(frame, keyed.name_of(name)) for frame in frames):
                    if name not in self.engine.never_empty:
                        raise NoTask(name)
                    raise keyed.lost_note(path, 0)
                continue
            layers = (layer for shard in shards.values() for layer in shard.layers)
            made = {layer.file for layer in layers if os.path.dirname(layer.file) == folder}
            keyed.clean_up(path, {os.path.basename(file) for file in made})
            for file in made:
                self._made(file)
            self.shards[name] = {**self.shards.get(name, {}), **shards}

    @property
    def _merge_max(self) -> int:
        """Most entries of a shard that a step merges. One task merges all shards."""
        partitions = self.engine.network.partitions if self.one_task else 1
        return self.engine.merging.step_max // partitions

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
            merging.start(
                name, shards, held.state, held.timer, self.path.name, self._merge_max,
                self.upkeep.merges,
            )  # fmt: skip
