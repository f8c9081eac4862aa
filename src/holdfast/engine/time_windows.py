"""Time windows of a step: folds rows into panes, and panes into the results of due windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

import pyarrow as pa

from holdfast.engine import windows
from holdfast.engine.joins import Joins
from holdfast.engine.mergeable import AggregatePlan
from holdfast.engine.nullable import nullable
from holdfast.engine.recipe import Query, Read, Recipe, United, WindowFunction
from holdfast.engine.sql import select_from
from holdfast.engine.state import Chunk, runs_of_levels
from holdfast.engine.step_inputs import PANE_FILES, Folded, at_time, size_of, together_of
from holdfast.model import operators as ops

#: Most bytes of panes that the driver assigns to windows.
DUE_BYTES_MAX = 1 << 26
#: So many rows of open windows are folded at once; few buckets with fewer rows when a window ends.
FOLD_ROWS_MIN = 100_000
#: A window has at least so many chunks of panes with totals.
CHUNKS_MIN = 8


#: From this many panes per window on, chunks of panes have totals.
TOTAL_PANES_MIN = 64


def has_totals(op: ops.TimeWindow) -> bool:
    return op.size_us // windows.pane_us(op) >= TOTAL_PANES_MIN


def piece_us(op: ops.TimeWindow, width_us: int) -> int:
    """The longest time that one file of panes covers, a multiple of panes and of buckets."""
    both_us = lcm(windows.pane_us(op), width_us)
    return max(1, op.size_us // CHUNKS_MIN // both_us) * both_us


def to_merge(op: ops.TimeWindow, chunks: Sequence[Chunk], width_us: int) -> tuple[int, int] | None:
    """The chunks of panes that should become one: the number of the first one and the number after
    the last one. With totals, `PANE_FILES` chunks of one level are merged, as long as a window has
    several of them: it reads all panes of its oldest chunk."""
    if not has_totals(op):
        return (0, len(chunks)) if len(chunks) > PANE_FILES else None
    for first, end in runs_of_levels([chunk.level for chunk in chunks]):
        if end - first >= PANE_FILES:
            last = first + PANE_FILES
            span_us = (chunks[last - 1].hi + 1 - chunks[first].lo) * width_us
            if chunks[first].level == 0 or span_us <= piece_us(op, width_us):
                return first, last
    return None


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
        self._reads(sum(chunk.rows for chunk in chunks))
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
        if due is None and len(ends) == 1:
            self.engine.wide.add(op.name)
        return due

    def _due_panes(self, op: ops.TimeWindow, since: int, ends: list[int]) -> pa.Table | None:
        chunks = [chunk for chunk in self.panes.get(op.name, ()) if chunk.hi >= since]
        totals = [c.total for c in chunks if c.total and windows.are_in_all(op, c.panes_us, ends)]
        single = self._files(c for c in chunks if c.total not in totals or c.total is None)
        whole = self._files(totals)
        size = size_of(file.path for file in single)
        if size + len(ends) * size_of(file.path for file in whole) > DUE_BYTES_MAX:
            return None
        folded = self._fold(op, since)
        if folded is None and self._new_buckets(op, since):
            return None
        due = [windows.in_each(together_of(whole), ends)] if whole else []
        tables = [together_of(single)] if single else []
        if folded is not None:
            tables.append(folded.panes)
        if tables:
            of_panes = windows.due(op, pa.concat_tables(tables), ends, DUE_BYTES_MAX)
            if of_panes is None:
                return None
            due.append(of_panes)
        return pa.concat_tables(due)

    def _new_buckets(self, op: ops.TimeWindow, since: int) -> list[int]:
        """Buckets from `since` on with rows that are not in panes."""
        chunks = self.panes.get(op.name, ())
        return self._buckets(op, 0, max(since, chunks[-1].hi + 1) if chunks else since, self.hi)

    def _rows_to_fold(self, op: ops.TimeWindow, since: int) -> int:
        """Rows from bucket `since` on that are not in panes; perhaps some before it."""
        up, chunks = op.inputs[0], self.panes.get(op.name, ())
        assert up is not None
        since = max(since, chunks[-1].hi + 1) if chunks else since
        if self._by_reference(up):
            return sum(self._raw_counts(up, since).values())
        return sum(c.rows for c in self.edges.get(f"{op.name}:0", ()) if c.hi >= since)

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
        """Fold the rows of open windows into panes once enough buckets or rows have gathered; or
        write panes that were folded for results already. Forget panes of closed windows."""
        since = windows.needed_from(op, self.hi, self.width_us)
        chunks = tuple(
            c for c in self.panes.get(op.name, ()) if c.buckets and c.buckets[-1] >= since
        )
        enough = (
            len(self._new_buckets(op, since)) >= self._buckets_min
            or self._rows_to_fold(op, since) >= FOLD_ROWS_MIN
        )
        folded = self._fold(op, since) if enough or op.name in self.folded else None
        if folded is not None and folded.buckets[-1] >= since:
            chunks = (*chunks, *self._written_panes(op, folded, since))
        found = to_merge(op, chunks, self.width_us)
        merged = None if found is None else self._merge_panes(op, chunks[slice(*found)])
        if found is not None and merged is not None:
            chunks = (*chunks[: found[0]], merged, *chunks[found[1] :])
        self.panes[op.name] = chunks

    def _merge_panes(self, op: ops.TimeWindow, chunks: Sequence[Chunk]) -> Chunk | None:
        """Panes of several files in one file; None if they are too large."""
        since = windows.needed_from(op, self.hi, self.width_us)
        open_us = windows.needed_from_us(op, self.hi, self.width_us)
        stored = self._read(op.name, self._files(chunks), (open_us, 1 << 62), panes=True)
        text = self.compiled.plans[op.name].merge(select_from("panes"), "__p")
        merged = self._if_it_fits(lambda: self._panes(Query(text, (("panes", stored),))))
        if merged is None:
            return None
        buckets = sorted({b for chunk in chunks for b in chunk.buckets if b >= since})
        chunk = self._write(merged, op.name, buckets[0], buckets[-1])
        chunk = replace(chunk, buckets=tuple(buckets), level=chunks[0].level + 1)
        return self._with_total(op, chunk, merged) if has_totals(op) else chunk

    def _written_panes(self, op: ops.TimeWindow, folded: Folded, since: int) -> list[Chunk]:
        """Files of new panes. Those of many buckets are cut, so that a window contains most files
        as a whole. Those of closed windows, before bucket `since`, are not written."""
        span_us = piece_us(op, self.width_us)
        pieces = sorted(
            {bucket * self.width_us // span_us for bucket in folded.buckets if bucket >= since}
        )
        if not has_totals(op) or len(folded.buckets) < PANE_FILES:
            chunk = self._write(folded.panes, op.name, folded.buckets[0], folded.buckets[-1])
            return [replace(chunk, buckets=folded.buckets)]
        of_pane = folded.panes["__p"].to_numpy() // span_us
        chunks = []
        for number in pieces:
            panes = folded.panes.filter(pa.array(of_pane == number))
            buckets = tuple(b for b in folded.buckets if b * self.width_us // span_us == number)
            chunk = self._write(panes, op.name, buckets[0], buckets[-1])
            chunk = replace(chunk, buckets=buckets, level=1)
            chunks.append(self._with_total(op, chunk, panes))
        return chunks

    def _with_total(self, op: ops.TimeWindow, chunk: Chunk, panes: pa.Table) -> Chunk:
        if not panes.num_rows:
            return chunk
        starts = panes["__p"].to_numpy()
        first_us, last_us = int(starts.min()), int(starts.max())
        place = panes.column_names.index("__p")
        alike = panes.set_column(place, "__p", pa.repeat(first_us, panes.num_rows))
        text = self.compiled.plans[op.name].merge(select_from("panes"), "__p")
        with self._reading_once():
            file = self.prepared.write(nullable(alike), op.name, "panes")
            read = Read(op.name, (file,), self.one_task, "panes")
            total = self._if_it_fits(lambda: self._panes(Query(text, (("panes", read),))))
        if total is None:
            return chunk
        of_total = self._write(total, f"{op.name}.total", chunk.lo, chunk.hi)
        return replace(chunk, total=of_total, panes_us=(first_us, last_us))
