"""Footprints of keyed state, for continuous eventual checkpoints (`core/eventual_checkpoint.py`).

The unit is a key, or several keys with the same hash. In addition to the state of the operator, the
state of a key has its *mark*: the bucket up to whose end its newest footprint contains its rows; or
the bucket before the step in which it opened, if it has none. The marks are part of the index of a
layer (`layers.py`), so that the oldest are found without reading all state.

A file of footprints is a layer with the state of some keys. Instead of timers, it has the hashes of
the keys that closed. The tasks that process the shards write these files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from holdfast.engine.keyed_operators import Change, KeyedOperator, KeyedState
from holdfast.engine.layers import (
    CLOSED,
    I64,
    MARK,
    Entries,
    LayerFile,
    LayerName,
    Timers,
    distinct,
    earliest_timer,
    is_in,
    marks_of,
    merged,
    write_layer,
)
from holdfast.engine.nullable import nullable_schema
from holdfast.engine.state import Layer, Shard
from holdfast.storage.rows import times_us


@dataclass(frozen=True, slots=True)
class Footprints:
    """The footprints of a step, of one shard."""

    #: State of open keys, and hashes of closed ones; None if there are neither.
    layer: Layer | None
    #: How many keys closed.
    closed: int
    #: How the number of open keys changed, by mark.
    windows: Mapping[int, int]
    #: Footprints that were asked for (Gcheck), and the time to write all footprints.
    checks: int
    took_us: int = 0
    #: The time to restore the shard from earlier footprints.
    loaded_us: int = 0

    @property
    def entries(self) -> int:
        return self.closed + (0 if self.layer is None else self.layer.entries)

    def plus(self, windows: Mapping[int, int], loaded_us: int = 0) -> Footprints:
        """With keys that were restored."""
        return replace(self, windows=_added(self.windows, windows), loaded_us=loaded_us)

    def files(self) -> list[str]:
        return [] if self.layer is None else [self.layer.file]

    def body(self) -> list[Any]:
        layer = None if self.layer is None else self.layer.body()
        return [layer, self.closed, sorted(self.windows.items()), self.checks, self.took_us,
                self.loaded_us]  # fmt: skip

    @staticmethod
    def of(body: Sequence[Any]) -> Footprints:
        layer, closed, windows, *others = body
        return Footprints(
            None if layer is None else Layer.of(layer), closed, dict(windows), *others
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The footprints that a step should write: of keys whose marks are from `since`, the oldest
    one, to `upto`; the oldest first, at most `most` in each shard."""

    since: int
    upto: int
    most: int
    #: The mark of keys that open in this step: the bucket before the step; or, if it replays
    #: buckets, before all of them.
    opened: int
    #: Every window that opens leaves a footprint (Gopen), as in the paper; for comparison.
    literal: bool = False
    #: How often footprints were asked for: each time, others of many equally old marks are chosen.
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Marked:
    """An operator whose state has marks."""

    inner: KeyedOperator
    width_us: int

    @property
    def time(self) -> str:
        return self.inner.time

    @property
    def state(self) -> pa.Schema:
        return pa.schema(
            [*nullable_schema(self.inner.state), (MARK, pa.int64()), (CLOSED, pa.bool_())]
        )

    @property
    def timer(self) -> str | None:
        return self.inner.timer

    @property
    def is_whole(self) -> bool:
        return self.inner.is_whole

    def hashes(self, table: pa.Table) -> I64:
        return self.inner.hashes(table)

    def end_us(self, upto: int) -> int:
        return self.inner.end_us(upto)

    def buckets(self, rows: pa.Table) -> I64:
        return times_us(rows, self.time) // self.width_us

    def __call__(self, before: KeyedState, rows: pa.Table, hashes: I64, upto: int) -> Change:
        inner = self._inner(before)
        change = self.inner(inner, rows, hashes, upto)
        state = change.state.of(change.touched)  # not of keys that only leave a footprint
        keys = _Keys.of(before)
        mark = _looked_up(state.hashes, keys.hashes, keys.marks, default=upto)
        if inner.rows.num_rows < before.rows.num_rows:  # some keys have closed and open again
            mark[~is_in(state.hashes, inner.hashes)] = upto
        return replace(change, state=self._with(state, mark))

    def _inner(self, before: KeyedState) -> KeyedState:
        """The state without marks, of open keys."""
        held = _open_only(before)
        return KeyedState(
            held.rows.drop_columns([MARK, CLOSED]).cast(self.inner.state), held.hashes
        )

    def _with(self, state: KeyedState, mark: I64) -> KeyedState:
        closed = np.zeros(len(mark), bool)
        columns = [*state.rows.columns, pa.array(mark), pa.array(closed)]
        return KeyedState(pa.Table.from_arrays(columns, schema=self.state), state.hashes)


def _open_only(state: KeyedState) -> KeyedState:
    closed = state.rows[CLOSED].to_numpy()
    if not closed.any():
        return state
    return KeyedState(state.rows.filter(pa.array(~closed)), state.hashes[~closed])


class _Keys(NamedTuple):
    """The keys of a state that is in the order of hashes."""

    #: Without repetition, with the mark and the number of rows of each key.
    hashes: I64
    marks: I64
    rows: I64

    @staticmethod
    def of(state: KeyedState) -> _Keys:
        first = np.flatnonzero(np.r_[True, np.diff(state.hashes) != 0][: len(state.hashes)])
        rows = np.diff(np.r_[first, len(state.hashes)])
        return _Keys(state.hashes[first], state.rows[MARK].to_numpy()[first], rows)


def _sorted(state: KeyedState) -> KeyedState:
    if bool((state.hashes[1:] >= state.hashes[:-1]).all()):
        return state
    order = np.argsort(state.hashes, kind="stable")
    return KeyedState(state.rows.take(pa.array(order)).combine_chunks(), state.hashes[order])


def _looked_up(hashes: I64, keys: I64, values: I64, default: int) -> I64:
    """The value of each hash, given those of sorted keys."""
    found = np.full(len(hashes), default, np.int64)
    if len(keys):
        known = is_in(hashes, keys)
        found[known] = values[np.searchsorted(keys, hashes[known])]
    return found


def unseen(before: KeyedState, hashes: I64, buckets: I64) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows are not in the footprints of their keys. `hashes`, `buckets`: of the rows."""
    keys = _Keys.of(before)
    return np.asarray(buckets > _looked_up(hashes, keys.hashes, keys.marks, default=-(2**62)))


def leave(
    before: KeyedState, change: Change, checked: I64, wanted: Wanted, upto: int,
    name: LayerName | None,
) -> tuple[Change, Footprints, Timers]:  # fmt: skip
    """Write the footprints of a step, unless it replays buckets (no name): only the marks change.
    Also returns the marks that were set. `checked`: hashes of keys that should leave a footprint,
    among others (`marked`)."""
    old, state = _open_only(before), _sorted(change.state)
    if len(checked):
        untouched = old.of(checked).without(change.touched)
        state = state.plus(untouched) if len(untouched.hashes) else state
    old_keys, keys = _Keys.of(old), _Keys.of(state)
    is_new = ~is_in(keys.hashes, old_keys.hashes)
    marks = np.where(is_new, wanted.opened, keys.marks)
    is_chosen = np.zeros(len(marks), bool)
    candidates = np.flatnonzero((marks <= wanted.upto) & is_in(keys.hashes, checked))
    oldest = candidates[np.argsort(marks[candidates], kind="stable")]
    is_chosen[oldest[: wanted.most]] = True
    closed = change.touched[
        is_in(change.touched, old_keys.hashes) & ~is_in(change.touched, keys.hashes)
    ]
    gone, checks = closed, int(is_chosen.sum())
    if wanted.literal and change.closed is not None:
        is_chosen |= is_new | is_in(keys.hashes, distinct(change.closed))
        closed = np.sort(change.closed)
    chosen = keys.hashes[is_chosen]
    marks[is_chosen] = upto
    place = state.rows.column_names.index(MARK)
    rows = state.rows.set_column(place, MARK, pa.array(np.repeat(marks, keys.rows)))
    state = KeyedState(rows, state.hashes)
    layer, began_s = None, time.perf_counter()
    if name is not None and len(chosen) + len(closed):
        footprints = state.of(chosen)
        entries = Entries.of(footprints.rows, footprints.hashes, chosen)
        layer = write_layer(entries, None, 0, name, marks_of(closed, np.full(len(closed), upto)))
    took_us = int(1e6 * (time.perf_counter() - began_s))
    is_set = is_new | is_chosen
    moved = is_in(old_keys.hashes, distinct(chosen, gone))
    windows = _added(_counts(old_keys.marks[moved], -1), _counts(marks[is_set], 1))
    touched = distinct(change.touched, chosen)
    after = replace(change, touched=touched, state=state.of(touched))
    left = Footprints(layer, len(closed), windows, checks, took_us)
    return after, left, marks_of(keys.hashes[is_set], marks[is_set])


def all_marks(state: KeyedState) -> Timers:
    """The marks of all keys of a state that is in the order of hashes."""
    keys = _Keys.of(state)
    return marks_of(keys.hashes, keys.marks)


def _counts(marks: I64, sign: int) -> dict[int, int]:
    buckets, counts = np.unique(marks, return_counts=True)
    return dict(zip(buckets.tolist(), (sign * counts).tolist(), strict=True))


def _added(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    sums = {bucket: one.get(bucket, 0) + other.get(bucket, 0) for bucket in {*one, *other}}
    return {bucket: count for bucket, count in sums.items() if count}


def restored(
    operator: Marked, found: Sequence[tuple[int, Footprints]], name: LayerName
) -> tuple[Shard, dict[int, int]]:
    """The state of a shard from its footprints, from the oldest to the newest, each with its
    bucket; and the number of open keys by mark."""
    stack = []
    for bucket, footprints in found:
        if footprints.layer is not None:
            with LayerFile(name.root, footprints.layer, operator.state) as file:
                stack.append(_gone(file.marked(), operator, bucket))
                stack.append(file.all())
    if not stack:
        return Shard(), {}
    entries = merged(stack, oldest=True)
    state = _open_only(KeyedState(entries.rows, entries.hashes))
    keys = _Keys.of(state)
    earliest = earliest_timer(state.rows, state.hashes, operator.timer)
    layer = write_layer(entries, operator.timer, 0, name, marks_of(keys.hashes, keys.marks))
    return Shard((layer,), len(entries), earliest), _counts(keys.marks, 1)


def _gone(closed: I64, operator: Marked, bucket: int) -> Entries:
    """Entries of keys that closed in `bucket`, as rows of the state."""
    columns = [pa.nulls(len(closed), field.type) for field in operator.state]
    columns[-2:] = [pa.array(np.full(len(closed), bucket)), pa.array(np.ones(len(closed), bool))]
    rows = pa.Table.from_arrays(columns, schema=operator.state)
    return Entries(np.sort(closed), np.zeros(len(closed), bool), rows)
