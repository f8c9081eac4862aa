"""What a step retains for later steps: rows of windows and joins that no log holds, or that would
be many small files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from holdfast.engine import windows
from holdfast.engine.state import Chunk, runs_of_levels
from holdfast.engine.step_inputs import (
    ONE_TASK_BYTES_MAX,
    PANE_FILES,
    History,
    size_of,
    together_of,
)
from holdfast.model import operators as ops

#: Most rows of a history that are merged into one file through the driver; a larger history is
#: not merged.
FOLD_ROWS_MAX = 500_000
#: The same for a history whose rows are selected by key. It has more files, because most of them
#: need not be read.
KEYED_ROWS_MAX = 1 << 18
#: Most bytes of rows that are folded at once.
FOLD_BYTES_MAX = 1 << 29
#: Most files that one step writes for each side of a join.
PIECES_MAX = 2


def piece(
    rows: Mapping[int, int], buckets_min: int, last: int, *, also_large: bool = False
) -> int | None:
    """The last bucket that is folded, given the rows of each bucket. None if there are fewer than
    `buckets_min` buckets, if most are large, unless `also_large`, or if the first one is too large.
    `last`: the last bucket, which may have no rows."""
    are_large = sum(rows.values()) > len(rows) * KEYED_ROWS_MAX // 4
    if len(rows) < buckets_min or (are_large and not also_large):
        return None
    total, end = 0, None
    for bucket, count in rows.items():
        total += count
        if total > (FOLD_ROWS_MAX if end is None else KEYED_ROWS_MAX):
            return end
        end = bucket
    return last


def to_merge(chunks: Sequence[Chunk]) -> tuple[int, int] | None:
    """The consecutive chunks of one level that should become one: the number of the first one and
    the number after the last one. A level is merged when it has `PANE_FILES` chunks, as far as they
    have at most `KEYED_ROWS_MAX` rows together."""
    for first, end in runs_of_levels([chunk.level for chunk in chunks]):
        if end - first < PANE_FILES:
            continue
        for start in range(first, end - 1):
            last, rows = start, chunks[start].rows
            while last + 1 < end and rows + chunks[last + 1].rows <= KEYED_ROWS_MAX:
                last += 1
                rows += chunks[last].rows
            if last > start:
                return start, last + 1
    return None


class Retained(History):
    def _alive_from(self, op: ops.Operator) -> int | None:
        """First input bucket that later steps may need; None if the operator has no history."""
        if isinstance(op, ops.TimeWindow):
            alive = windows.needed_from(op, self.hi, self.width_us)
            panes = self.panes.get(op.name, ())
            return max(alive, panes[-1].hi + 1) if panes else alive
        if isinstance(op, ops.Join):
            return ((self.hi + 1) * self.width_us - op.within_us) // self.width_us
        return None

    @property
    def _buckets_min(self) -> int:
        """The number of buckets with rows from which on they are folded."""
        return 1 if self.upkeep.folds else self.engine.pane_buckets

    def _forget(self) -> None:
        """Drop chunks that no later step needs, and merge small files."""
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

    def _refers_from(self) -> int:
        """The first bucket of the inputs that the next version refers to."""
        first = self.hi + 1
        for op in self.path.operators:
            alive = self._alive_from(op)
            for port, up in enumerate(op.inputs):
                assert up is not None
                if alive is not None and self._by_reference(up):
                    chunks = self.edges.get(f"{op.name}:{port}", ())
                    raw_from = max(alive, chunks[-1].hi + 1) if chunks else alive
                    first = min([first, *self._raw_counts(up, raw_from)])
        return first

    def _fold_rows(
        self, op: ops.Operator, port: int, up: ops.Operator, chunks: tuple[Chunk, ...], alive: int
    ) -> tuple[Chunk, ...]:
        """Merge a history of many small files into one file, because every step reads it again."""
        if keys := self.engine.join_keys.get(op.name, ()):
            if self._by_reference(up):
                chunks = self._fold_by_key(f"{op.name}.{port}", up, chunks, alive, keys)
            return self._merge_by_level(f"{op.name}.{port}", up, chunks, keys)
        if self._by_reference(up):
            raw_from = max(alive, chunks[-1].hi + 1) if chunks else alive
            rows = self._raw_counts(up, raw_from)
            last: int | None = self.hi
            if self.upkeep.folds:
                last = piece(rows, 1, self.hi, also_large=True)
            elif len(rows) < self.engine.pane_buckets or sum(rows.values()) > FOLD_ROWS_MAX:
                last = None
            table = None if last is None else self._raw_rows(up, raw_from, last)
            if last is not None and table is not None:
                chunks = (*chunks, self._write(table, f"{op.name}.{port}", raw_from, last, up))
        if len(chunks) > PANE_FILES and sum(chunk.rows for chunk in chunks) <= FOLD_ROWS_MAX:
            span = max(alive, chunks[0].lo), chunks[-1].hi
            table = self._merged_rows(up, chunks, *span)
            if table is not None:
                chunks = (self._write(table, f"{op.name}.{port}", *span, up),)
        return chunks

    def _fold_by_key(
        self, name: str, up: ops.Operator, chunks: tuple[Chunk, ...], alive: int,
        keys: tuple[str, ...],
    ) -> tuple[Chunk, ...]:  # fmt: skip
        """Fold input segments, the oldest first. After large steps, this takes several steps."""
        for _ in range(PIECES_MAX):
            raw_from = max(alive, chunks[-1].hi + 1) if chunks else alive
            rows = self._raw_counts(up, raw_from)
            hi = piece(rows, self._buckets_min, self.hi, also_large=self.upkeep.folds)
            table = None if hi is None else self._raw_rows(up, raw_from, hi)
            if hi is None or table is None or table.nbytes > FOLD_BYTES_MAX:
                break
            chunks = (*chunks, replace(self._write(table, name, raw_from, hi, up, keys), level=1))
        return chunks

    def _raw_counts(self, up: ops.Operator, since: int, upto: int | None = None) -> dict[int, int]:
        """The number of rows of each bucket of the inputs, up to the end of the step or `upto`."""
        rows: dict[int, int] = {}
        for stream in self._streams(up):
            for file in self.inputs.files(stream, since, self.hi if upto is None else upto):
                rows[file.bucket] = rows.get(file.bucket, 0) + file.rows
        return dict(sorted(rows.items()))

    def _merge_by_level(
        self, name: str, up: ops.Operator, chunks: tuple[Chunk, ...], keys: tuple[str, ...]
    ) -> tuple[Chunk, ...]:
        """Merge chunks of one level into one of the next level."""
        found = to_merge(chunks)
        if found is None:
            return chunks
        first, end = found
        files = self._files(chunks[first:end])
        sizes = np.cumsum([size_of([file.path]) for file in files])
        end = first + int(np.searchsorted(sizes, ONE_TASK_BYTES_MAX))
        if end - first < 2:
            return chunks  # few rows, but large ones
        old = chunks[first:end]
        table = together_of(files[: end - first])
        new = self._write(table, name, old[0].lo, old[-1].hi, up, keys)
        return (*chunks[:first], replace(new, level=old[0].level + 1), *chunks[end:])

    def _raw_rows(self, up: ops.Operator, lo: int, hi: int) -> pa.Table | None:
        """Rows that can be read from the inputs of the path; None if there are none, or too
        many."""
        files = self._input_files(up, lo, hi) if self._is_input(up) else []
        if files and size_of(file.path for file in files) < ONE_TASK_BYTES_MAX:
            return self._together(up.name, files, None)  # without a job
        rows = self._stateless(up, lo, hi)
        return None if rows is None else self._if_it_fits(lambda: self._arrow(rows, up.name))

    def _merged_rows(
        self, up: ops.Operator, chunks: tuple[Chunk, ...], lo: int, hi: int
    ) -> pa.Table | None:
        """The rows of all chunks from bucket `lo` on; None if they are too many."""
        files = self._files(chunks)
        if size_of(file.path for file in files) < ONE_TASK_BYTES_MAX:
            return self._together(up.name, files, (lo * self.width_us, (hi + 1) * self.width_us))
        rows = self._chunk_rows(up, chunks, lo, hi, None)
        return None if rows is None else self._if_it_fits(lambda: self._arrow(rows, up.name))
