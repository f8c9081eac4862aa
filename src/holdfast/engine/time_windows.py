"""Time windows of a step: folds rows into panes, and panes into the results of due windows."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from holdfast.engine import windows
from holdfast.engine.joins import Joins
from holdfast.engine.mergeable import AggregatePlan
from holdfast.engine.nullable import nullable
from holdfast.engine.recipe import Query, Read, Recipe, United, WindowFunction
from holdfast.engine.sql import select_from
from holdfast.engine.step_inputs import PANE_FILES, Folded, at_time, size_of, together_of
from holdfast.model import operators as ops

#: Most bytes of panes that the driver assigns to windows.
DUE_BYTES_MAX = 1 << 26


class TimeWindows(Joins):
    def _plan(self, op: ops.TimeWindow | ops.CountWindow) -> AggregatePlan:
        plan = self.compiled.plans[op.name]
        return plan.general if op.name in self.engine.general and plan.general is not None else plan

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
