"""Count windows: assign the rows of each key to windows of a fixed number of rows.

Windows that overlap, and aggregates that only Spark can merge, need the rows themselves as state
(`CountWindows`). For all others, the partial aggregates of the open window of each key are enough
(`CountTotals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types as at

from holdfast.engine.keyed_operators import Change, KeyedState
from holdfast.engine.layers import I64, distinct
from holdfast.storage.rows import key_hashes, times_us


@dataclass(frozen=True, slots=True)
class _OfEachKey:
    """Windows of `size` rows of each key."""

    keys: tuple[str, ...]
    time: str
    size: int

    @property
    def timer(self) -> None:
        return None

    @property
    def is_whole(self) -> bool:
        return False

    def hashes(self, table: pa.Table) -> I64:
        return key_hashes(table, self.keys).view(np.int64)

    def end_us(self, upto: int) -> int:
        raise AssertionError("count windows have no timers")


@dataclass(frozen=True, slots=True)
class CountWindows(_OfEachKey):
    """Assigns rows to count windows. Returns the rows of full windows; retains the rest as state.

    The state of a key is the rows since the start of its first window that is not full, in order.
    No positions are stored.
    """

    slide: int
    #: The schema of the rows.
    state: pa.Schema

    def __call__(self, before: KeyedState, rows: pa.Table, hashes: I64, upto: int) -> Change:
        touched = distinct(hashes)
        hashes = np.r_[before.hashes, hashes]
        rows = pa.concat_tables([before.rows.cast(rows.schema), rows]).combine_chunks()
        count = rows.num_rows
        group = group_ids(rows, self.keys)
        order = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0]) if count else np.array([0])
        sizes = np.diff(np.r_[starts, count]) if count else np.array([0])
        full = np.maximum(0, (sizes - self.size) // self.slide + 1)
        # One entry per full window: its number within the key, and its start in `order`.
        first = np.repeat(np.cumsum(full) - full, full)
        number = np.arange(int(full.sum())) - first
        window_start = np.repeat(starts, full) + number * self.slide
        members = (window_start[:, None] + np.arange(self.size)).reshape(-1)
        position = np.arange(count) - np.repeat(starts, sizes) if count else np.array([], int)
        stays = position >= np.repeat(full * self.slide, sizes) if count else np.array([], bool)
        out = rows.take(pa.array(order[members]))
        times = times_us(rows, self.time)
        last = times[order[window_start + self.size - 1]]
        out = out.append_column("__seq", pa.array(np.repeat(number, self.size), pa.int64()))
        out = out.append_column("__last", pa.array(np.repeat(last, self.size), pa.int64()))
        left = np.sort(order[stays])
        retained = rows.take(pa.array(left)).cast(self.state)
        return Change(out, touched, KeyedState(retained, hashes[left]))


@dataclass(frozen=True, slots=True)
class CountTotals(_OfEachKey):
    """Folds rows into count windows that do not overlap. Returns the partial aggregates of full
    windows; retains those of the open window of each key as state.

    Each row comes with its partial aggregates (`AggregatePlan.of_each_row`). With dimensions, a
    window has several rows of partials.
    """

    #: Columns by which partials are grouped, in addition to the keys.
    dims: tuple[str, ...]
    #: "sum", "min" or "max", by the name of the partial.
    partials: Mapping[str, str]
    #: The keys, the number of rows in the open window, the dimensions and the partials.
    state: pa.Schema

    def __call__(self, before: KeyedState, rows: pa.Table, hashes: I64, upto: int) -> Change:
        touched, hashes = distinct(hashes), np.r_[before.hashes, hashes]
        held = before.rows.num_rows
        columns = [*self.keys, *self.dims, *self.partials]
        new = rows.select(columns).cast(pa.schema([self.state.field(name) for name in columns]))
        both = pa.concat_tables([before.rows.select(columns), new]).combine_chunks()
        windows = _assigned(group_ids(both, self.keys), before.rows["__n"].to_numpy(), self.size)
        last_us = np.zeros(len(windows.rows), np.int64)
        last_us[windows.of_row[held:]] = times_us(rows, self.time)  # the last of each window stays
        folded = self._fold(both, windows.of_row)
        number = folded["__w"].to_numpy()
        is_full = windows.rows[number] == self.size
        full, number_full = folded.filter(pa.array(is_full)), number[is_full]
        out = full.append_column("__seq", pa.array(windows.place[number_full]))
        out = out.append_column("__last", pa.array(last_us[number_full]))
        left = folded.filter(pa.array(~is_full))
        state = left.append_column("__n", pa.array(windows.rows[number[~is_full]]))
        state = state.select(self.state.names).cast(self.state)
        kept = KeyedState(state, hashes[left["__at"].to_numpy()])
        return Change(out.select(self.out.names), touched, kept)

    @property
    def out(self) -> pa.Schema:
        columns = [field for field in self.state if field.name != "__n"]
        return pa.schema([*columns, ("__seq", pa.int64()), ("__last", pa.int64())])

    def _fold(self, rows: pa.Table, window: I64) -> pa.Table:
        """The partials of each window, with its number `__w`, and the place of a row `__at`."""
        by = ["__w", *self.dims]
        numbered = rows.append_column("__w", pa.array(window)).append_column(
            "__at", pa.array(np.arange(rows.num_rows))
        )
        wanted = [("__at", "min"), *self.partials.items()]
        folded = numbered.group_by(by, use_threads=False).aggregate(wanted)
        folded = folded.select([*by, *(f"{name}_{fn}" for name, fn in wanted)])
        folded = folded.rename_columns([*by, "__at", *self.partials])
        keys = rows.select(list(self.keys)).take(folded["__at"])
        for name in self.keys:
            folded = folded.append_column(name, keys[name])
        return folded.select([*self.keys, *self.dims, *self.partials, "__w", "__at"])


class _Assigned(NamedTuple):
    """Windows of all keys, numbered one after another."""

    #: The window of each row.
    of_row: I64
    #: The number of rows of each window.
    rows: I64
    #: The number of each window within its key.
    place: I64


def _assigned(group: I64, held_n: I64, size: int) -> _Assigned:
    """Assign rows to windows. `group`: the key of each row, first of the rows of the state.
    `held_n`: for these, the rows in the open window of the key."""
    of_state, of_rows = group[: len(held_n)], group[len(held_n) :]
    groups = int(group.max(initial=-1)) + 1
    open_n = np.zeros(groups, np.int64)
    open_n[of_state] = held_n
    new_n = np.bincount(of_rows, minlength=groups)
    per_key = -(-(open_n + new_n) // size)
    first = np.cumsum(per_key) - per_key
    place = np.empty(len(of_rows), np.int64)
    earlier = np.repeat(np.cumsum(new_n) - new_n, new_n)
    place[np.argsort(of_rows, kind="stable")] = np.arange(len(of_rows)) - earlier
    of_row = np.r_[first[of_state], first[of_rows] + (open_n[of_rows] + place) // size]
    rows = np.bincount(of_row[len(held_n) :], minlength=int(per_key.sum()))
    rows[first] += open_n
    return _Assigned(of_row, rows, np.arange(len(rows)) - np.repeat(first, per_key))


def can_fold(rows: pa.Schema, dims: Sequence[str], merges: Mapping[str, str]) -> bool:
    """Whether Arrow merges these partials to the same values as Spark: not if doubles, nested
    values or decimals are compared or added."""

    def is_simple(kind: Any) -> bool:
        tests = (at.is_integer, at.is_string, at.is_timestamp, at.is_date)
        return any(test(kind) for test in tests)

    return all(at.is_integer(rows.field(name).type) for name in dims) and all(
        rows.field(name).type == pa.int64() if fn == "sum" else is_simple(rows.field(name).type)
        for name, fn in merges.items()
    )


def group_ids(rows: pa.Table, keys: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A group number for every row: equal if and only if all keys are equal; nulls are equal."""
    ids = np.zeros(rows.num_rows, np.int64)
    for key in keys:
        column = rows[key].combine_chunks()
        encoded = column.dictionary_encode(null_encoding="encode")
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if key == keys[0]:
            ids = codes  # already without gaps
            continue
        ids = ids * (len(encoded.dictionary) + 1) + codes
        _, ids = np.unique(ids, return_inverse=True)
    return ids.astype(np.int64)
