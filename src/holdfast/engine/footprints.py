"""Footprints of keyed state, for continuous eventual checkpoints (`core/eventual_checkpoint.py`).

The unit is a key, or several keys with the same hash. In addition to the state of the operator, the
state of a key has its *mark*: the bucket up to whose end its newest footprint contains its rows; or
the bucket before the step in which it opened, if it has none. The marks are part of the index of a
layer (`layers.py`), so that the oldest are found without reading all state.

A file of footprints is a layer with the state of some keys. Another layer, without columns, has the
keys that closed. The tasks that process the shards write both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    distinct,
    earliest_timer,
    is_in,
    merged,
    write_layer,
)
from holdfast.engine.nullable import nullable_schema
from holdfast.engine.state import Layer, Shard
from holdfast.storage.rows import times_us

NO_COLUMNS = pa.schema([])


@dataclass(frozen=True, slots=True)
class Footprints:
    """The footprints of a step, of one shard."""

    #: State of open keys, and hashes of closed ones.
    open: Layer | None
    closed: Layer | None
    #: How the number of open keys changed, by mark.
    windows: Mapping[int, int]
    #: Footprints that were asked for, and the time that they took.
    checks: int
    took_us: int = 0

    @property
    def entries(self) -> int:
        return sum(layer.entries for layer in (self.open, self.closed) if layer is not None)

    def plus(self, windows: Mapping[int, int]) -> Footprints:
        """With keys that were restored."""
        return replace(self, windows=_added(self.windows, windows))

    def files(self) -> list[str]:
        return [layer.file for layer in (self.open, self.closed) if layer is not None]

    def body(self) -> list[Any]:
        layers = [None if layer is None else layer.body() for layer in (self.open, self.closed)]
        return [*layers, sorted(self.windows.items()), self.checks, self.took_us]

    @staticmethod
    def of(body: Sequence[Any]) -> Footprints:
        open_, closed = (None if layer is None else Layer.of(layer) for layer in body[:2])
        return Footprints(open_, closed, dict(body[2]), *body[3:])


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
        mark = _looked_up(state.hashes, *_marks_of(before, inner.hashes), default=upto)
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


def _marks_of(state: KeyedState, hashes: I64) -> tuple[I64, I64]:
    """The hashes, sorted and without repetition, and their marks."""
    keys = distinct(hashes)
    order = np.argsort(state.hashes, kind="stable")
    place = np.searchsorted(state.hashes[order], keys)
    return keys, state.rows[MARK].to_numpy()[order][place]


def _looked_up(hashes: I64, keys: I64, values: I64, default: int) -> I64:
    """The value of each hash, given those of sorted keys."""
    found = np.full(len(hashes), default, np.int64)
    if len(keys):
        known = is_in(hashes, keys)
        found[known] = values[np.searchsorted(keys, hashes[known])]
    return found


def unseen(before: KeyedState, hashes: I64, buckets: I64) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows are not in the footprints of their keys. `hashes`, `buckets`: of the rows."""
    keys, marks = _marks_of(before, before.hashes)
    return np.asarray(buckets > _looked_up(hashes, keys, marks, default=-(2**62)))


def leave(
    before: KeyedState, change: Change, checked: I64, wanted: Wanted, upto: int,
    name: LayerName | None,
) -> tuple[Change, Footprints]:  # fmt: skip
    """Write the footprints of a step, unless it replays buckets (no name): only the marks change.
    `checked`: hashes of keys that should leave one (`oldest_marks`)."""
    began_s = time.perf_counter()
    old = _open_only(before)
    old_keys, old_marks = _marks_of(old, old.hashes)
    untouched = old.of(checked).without(change.touched)
    state = change.state.plus(untouched)
    keys, marks = _marks_of(state, state.hashes)
    marks = np.where(is_in(keys, old_keys), marks, wanted.opened)
    candidates = is_in(keys, checked) & (marks <= wanted.upto)
    oldest = np.flatnonzero(candidates)[np.argsort(marks[candidates], kind="stable")]
    chosen = np.sort(keys[oldest[: wanted.most]])
    mark = _looked_up(state.hashes, keys, np.where(is_in(keys, chosen), upto, marks), upto)
    place = state.rows.column_names.index(MARK)
    state = KeyedState(state.rows.set_column(place, MARK, pa.array(mark)), state.hashes)
    touched = distinct(change.touched, chosen)
    footprints = state.of(chosen)
    closed = change.touched[is_in(change.touched, old_keys) & ~is_in(change.touched, keys)]
    open_layer = closed_layer = None
    if len(chosen) and name is not None:
        entries = Entries.of(footprints.rows, footprints.hashes, chosen)
        open_layer = write_layer(entries, None, 0, replace(name, name=f"{name.name}.open"))
    if len(closed) and name is not None:
        nothing = Entries(closed, np.ones(len(closed), bool), NO_COLUMNS.empty_table())
        closed_layer = write_layer(nothing, None, 0, replace(name, name=f"{name.name}.closed"))
    windows = _counts(old_marks[is_in(old_keys, touched)], -1)
    kept = state.of(touched)
    windows = _added(windows, _counts(_marks_of(kept, kept.hashes)[1], 1))
    after = replace(change, touched=touched, state=kept)
    took_us = int(1e6 * (time.perf_counter() - began_s))
    return after, Footprints(open_layer, closed_layer, windows, len(chosen), took_us)


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
        for layer, schema in ((footprints.open, operator.state), (footprints.closed, NO_COLUMNS)):
            if layer is not None:
                with LayerFile(name.root, layer, schema) as file:
                    entries = file.all()
                is_open = schema is not NO_COLUMNS
                stack.append(entries if is_open else _gone(entries, operator, bucket))
    if not stack:
        return Shard(), {}
    entries = merged(stack, oldest=True)
    state = _open_only(KeyedState(entries.rows, entries.hashes))
    windows = _counts(_marks_of(state, state.hashes)[1], 1)
    earliest = earliest_timer(state.rows, state.hashes, operator.timer)
    layer = write_layer(entries, operator.timer, 0, name)
    return Shard((layer,), len(entries), earliest), windows


def _gone(entries: Entries, operator: Marked, bucket: int) -> Entries:
    """Entries of keys that closed in `bucket`, as rows of the state."""
    count = len(entries)
    columns = [pa.nulls(count, field.type) for field in operator.state]
    columns[-2:] = [pa.repeat(bucket, count).cast(pa.int64()), pa.repeat(True, count)]
    rows = pa.Table.from_arrays(columns, schema=operator.state)
    return Entries(entries.hashes, np.zeros(count, bool), rows)
