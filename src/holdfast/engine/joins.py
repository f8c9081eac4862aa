"""Joins of a step: pairs with at least one new row.

A join on columns selects the earlier rows that its new rows can match by key (`key_index.py`), so
that the cost of a step does not grow with the history. Other joins, and large steps, read all of
the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from holdfast.engine.key_index import U64, Found
from holdfast.engine.nullable import nullable
from holdfast.engine.recipe import Joined, Read, Recipe
from holdfast.engine.retained import Retained
from holdfast.engine.state import Chunk
from holdfast.engine.step_inputs import (
    ONE_TASK_BYTES_MAX,
    File,
    MoreRows,
    size_of,
    together_of,
)
from holdfast.model import operators as ops
from holdfast.storage.rows import key_hashes

#: Most bytes of files with the new rows of a join that are sent to all tasks.
BROADCAST_BYTES_MAX = 1 << 22
#: Most bytes of files, without compression, from which rows are selected in the driver.
DECODED_BYTES_MAX = 4 * ONE_TASK_BYTES_MAX
#: Most earlier rows of a join whose keys are remembered. All joins of a node share
#: `key_index.BYTES_MAX`.
HISTORY_ROWS_MAX = 1 << 24


def _hashes(rows: pa.Table, keys: tuple[str, ...]) -> U64:
    """The different hashes of keys, sorted, without those of null keys, which match no row."""
    rows = rows.select(list(dict.fromkeys(keys))).drop_null()
    return np.unique(key_hashes(rows, keys))


class Joins(Retained):
    def _join(self, op: ops.Join) -> Recipe | None:
        """Pairs with at least one new row: new rows of the left side with all of the right side,
        and earlier rows of the left side with new rows of the right side."""
        since = (self.lo * self.width_us - op.within_us) // self.width_us
        keys = self.engine.join_keys.get(op.name, ())
        if keys and self.one_task:
            rows = self._history_rows(op, since)
            if rows > HISTORY_ROWS_MAX:
                raise MoreRows(max(rows, self.engine.job_rows.distributed))
            if rows >= self.engine.job_rows.selected:
                return self._join_by_key(op, since, keys)
        new = [self._history(op, port, self.lo, self.hi) for port in (0, 1)]
        if new[0] is None and new[1] is None:
            return None
        earlier = [self._history(op, port, since, self.lo - 1) for port in (0, 1)]
        return self._pairs(op, new, earlier, self._united((earlier[1], new[1])))

    def _pairs(
        self, op: ops.Join, new: Sequence[Recipe | None], earlier: Sequence[Recipe | None],
        everything: Recipe | None,
    ) -> Recipe | None:  # fmt: skip
        pairs: list[Recipe] = []
        if new[0] is not None and everything is not None:
            side = self._broadcast_side(op, 0)
            pairs.append(Joined(op.name, new[0], everything, side))
        if earlier[0] is not None and new[1] is not None:
            side = self._broadcast_side(op, 1)
            pairs.append(Joined(op.name, earlier[0], new[1], side))
        return self._united(pairs)

    def _history_rows(self, op: ops.Join, since: int) -> int:
        """How many earlier rows both sides have."""
        rows = 0
        for port, up in enumerate(op.inputs):
            assert up is not None
            chunks, raw_from = self._earlier(op, port, since)
            rows += sum(chunk.rows for chunk in chunks)
            if self._by_reference(up):
                rows += sum(self._raw_counts(up, raw_from, self.lo - 1).values())
        return rows

    def _earlier(self, op: ops.Join, port: int, since: int) -> tuple[list[Chunk], int]:
        """The chunks of a side of a join before this step, and the first bucket that is in none of
        them."""
        chunks = [c for c in self.edges.get(f"{op.name}:{port}", ()) if c.lo < self.lo]
        return chunks, max(since, chunks[-1].hi + 1) if chunks else since

    def _join_by_key(self, op: ops.Join, since: int, keys: tuple[str, ...]) -> Recipe | None:
        """Of the earlier rows, only those are read whose key a new row of the other side has."""
        new = [self._new_rows(op, port) for port in (0, 1)]
        if new[0] is None and new[1] is None:
            return None
        wanted = [None if rows is None else _hashes(rows, keys) for rows in new]
        files = [self._earlier_files(op, port, since) for port in (0, 1)]
        parts = self._matching(new, files, wanted, keys)
        others = [self._earlier_functions(op, port, since) for port in (0, 1)]
        everything = [nullable(table) for table in (parts[1], new[1]) if table is not None]
        right = pa.concat_tables(everything) if everything else None
        return self._pairs(
            op,
            [self._prepared(op, port, new[port]) for port in (0, 1)],
            [self._united((self._prepared(op, 0, parts[0]), others[0])), None],
            self._united((self._prepared(op, 1, right), others[1])),
        )

    def _prepared(self, op: ops.Join, port: int, rows: pa.Table | None) -> Recipe | None:
        up = op.inputs[port]
        assert up is not None
        if rows is None:
            return None
        return Read(up.name, (self.prepared.write(rows, up.name),), one_task=True)

    def _new_rows(self, op: ops.Join, port: int) -> pa.Table | None:
        """The new rows of a side of a join, in the driver."""
        up = op.inputs[port]
        assert up is not None
        if self._is_input(up):
            files = self._input_files(up, self.lo, self.hi)
        elif not self._by_reference(up):
            chunks = self.edges.get(f"{op.name}:{port}", ())
            files = self._files(chunk for chunk in chunks if chunk.lo >= self.lo)
        else:
            rows = self._stateless(up, self.lo, self.hi)
            return None if rows is None else self._arrow(rows, up.name)
        return together_of(files) if files else None

    def _earlier_files(self, op: ops.Join, port: int, since: int) -> list[File]:
        """The files with earlier rows of a side of a join, from which rows are selected."""
        up = op.inputs[port]
        assert up is not None
        chunks, raw_from = self._earlier(op, port, since)
        files = self._files(chunk for chunk in chunks if chunk.hi >= since)
        if self._is_input(up):
            files += self._input_files(up, raw_from, self.lo - 1)
        return files

    def _earlier_functions(self, op: ops.Join, port: int, since: int) -> Recipe | None:
        """Earlier rows of a side of a join that are still results of functions of inputs. There are
        few: they are folded after `pane_buckets` buckets."""
        up = op.inputs[port]
        assert up is not None
        if self._is_input(up) or not self._by_reference(up):
            return None
        _, raw_from = self._earlier(op, port, since)
        return self._stateless(up, raw_from, self.lo - 1) if raw_from < self.lo else None

    def _matching(
        self, new: Sequence[pa.Table | None], files: Sequence[Sequence[File]],
        wanted: Sequence[U64 | None], keys: tuple[str, ...],
    ) -> list[pa.Table | None]:  # fmt: skip
        """The earlier rows of each side of a join that may match new rows of the other side. Raise
        MoreRows if the job is too large for one task."""
        limits = self.engine.job_rows
        found: list[list[Found]] = [[], []]
        for port in (0, 1):
            if (hashes := wanted[1 - port]) is not None:
                found[port] = [
                    self.engine.indexes.find(*file, keys, hashes) for file in files[port]
                ]
        rows = sum(each.rows for side in found for each in side)
        rows += sum(table.num_rows for table in new if table is not None)
        if sum(each.bytes_read for side in found for each in side) >= DECODED_BYTES_MAX:
            rows = max(rows, limits.distributed)
        self._reads(rows)
        size = sum(table.nbytes for table in new if table is not None)
        matching: list[pa.Table | None] = []
        for side in found:
            tables = []
            for each in side:
                if each.rows:
                    tables.append(nullable(each.read()))
                    size += tables[-1].nbytes
                    if size >= ONE_TASK_BYTES_MAX:
                        raise MoreRows(limits.distributed)
            matching.append(pa.concat_tables(tables) if tables else None)
        return matching

    def _broadcast_side(self, op: ops.Join, port: int) -> Literal["left", "right"] | None:
        """The side of the new rows, if a large job sends them to all tasks. Otherwise, all earlier
        rows of the other side would have to be distributed again in every step."""
        if self.one_task or op.name in self.engine.no_broadcast or not self._few(op, port):
            return None  # a plan with a broadcast cannot run again
        self.engine.broadcast.add(op.name)
        return "right" if port else "left"

    def _few(self, op: ops.Join, port: int) -> bool:
        """Whether a side of a join has few new rows."""
        up = op.inputs[port]
        assert up is not None
        if up.name not in self.mine:
            files = [file.path for file in self.inputs.files(up.name, self.lo, self.hi)]
        elif not self._by_reference(up):
            chunks = self.edges.get(f"{op.name}:{port}", ())
            files = [file.path for file in self._files(c for c in chunks if c.lo >= self.lo)]
        else:
            return False  # a function of the user may return more rows
        return size_of(files) < BROADCAST_BYTES_MAX
