"""Operators with keyed state: what they compute from state and rows.

They get the state of the keys that a step touches, in the order of the hashes of the keys
(`layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from holdfast.engine.layers import I64, distinct, is_in, timers_in
from holdfast.errors import InputError
from holdfast.storage.rows import key_hashes, runs, times_us


@dataclass(frozen=True, slots=True)
class KeyedState:
    """State of some keys, and the hash of the key of each row."""

    rows: pa.Table
    hashes: I64

    def of(self, hashes: I64) -> KeyedState:
        """The state of the keys with these hashes, which are sorted."""
        return self._filter(is_in(self.hashes, hashes))

    def without(self, hashes: I64) -> KeyedState:
        return self._filter(~is_in(self.hashes, hashes))

    def _filter(self, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> KeyedState:
        if chosen.all():
            return self
        return KeyedState(self.rows.filter(pa.array(chosen)), self.hashes[chosen])

    def plus(self, other: KeyedState) -> KeyedState:
        hashes = np.r_[self.hashes, other.hashes]
        order = np.argsort(hashes, kind="stable")
        rows = pa.concat_tables([self.rows, other.rows]).take(pa.array(order))
        return KeyedState(rows.combine_chunks(), hashes[order])


@dataclass(frozen=True, slots=True)
class Change:
    """What an operator returns for a shard."""

    out: pa.Table
    #: Hashes of the keys whose state is replaced, sorted.
    touched: I64
    #: The state of these keys.
    state: KeyedState


class KeyedOperator(Protocol):
    @property
    def state(self) -> pa.Schema: ...

    @property
    def time(self) -> str:
        """The time column of the rows."""
        ...

    @property
    def timer(self) -> str | None:
        """The column of the state with the times of timers."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the state is read and written as a whole, because it has no key columns."""
        ...

    def hashes(self, table: pa.Table) -> I64:
        """The hash of the key of each row of the input, or of the state."""
        ...

    def end_us(self, upto: int) -> int:
        """The end of a bucket."""
        ...

    def __call__(self, before: KeyedState, rows: pa.Table, hashes: I64, upto: int) -> Change:
        """`before`: the state of all keys in `rows`, and of all keys that have a timer until the
        end of bucket `upto`. `rows`: in canonical order. `hashes`: of the keys of the rows."""
        ...


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """The bucket for which a stateful function is called."""

    bucket: int
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class UserFunction:
    """Calls the function of `stateful` for every bucket that has rows or in which a timer is due,
    with the state of the keys that have such rows or timers."""

    fn: Callable[[pa.Table, pa.Table, BucketInfo], tuple[pa.Table, pa.Table]]
    name: str
    time: str
    timer: str | None
    state: pa.Schema
    out: pa.Schema
    width_us: int
    #: None if the state has no key columns.
    keys: tuple[str, ...] | None

    @property
    def is_whole(self) -> bool:
        return self.keys is None

    def hashes(self, table: pa.Table) -> I64:
        if self.keys is None:
            return np.zeros(table.num_rows, np.int64)
        return key_hashes(table, self.keys).view(np.int64)

    def end_us(self, upto: int) -> int:
        return (upto + 1) * self.width_us

    def __call__(self, before: KeyedState, rows: pa.Table, hashes: I64, upto: int) -> Change:
        state = before
        present = runs(times_us(rows, self.time) // self.width_us)
        outs: list[pa.Table] = [self.out.empty_table()]
        touched = [np.array([], np.int64)]
        at, done = 0, None
        while True:
            timers = timers_in(state.rows, state.hashes, self.timer)
            by_timer = int(timers["us"].min()) // self.width_us if len(timers) else None
            if by_timer is not None and done is not None and by_timer <= done:
                raise InputError(
                    f"{self.name}: a timer in the state was due in bucket {by_timer} and is still "
                    "set; the function must remove or move timers that are before info.end_us"
                )
            by_rows = present[at][0] if at < len(present) else None
            candidates = [b for b in (by_rows, by_timer) if b is not None and b <= upto]
            if not candidates:
                break
            bucket = min(candidates)
            chunk, due = rows.slice(0, 0), timers["us"] < self.end_us(bucket)
            keys = distinct(timers["hash"][due])
            if bucket == by_rows:
                _, lo, hi = present[at]
                chunk, keys = rows.slice(lo, hi - lo), distinct(keys, hashes[lo:hi])
                at += 1
            out, after = self._call(state.of(keys).rows, chunk, bucket)
            outs.append(out)
            changed = KeyedState(after, self.hashes(after))
            if not is_in(changed.hashes, keys).all():
                raise InputError(
                    f"{self.name}: in bucket {bucket}, the function returned the state of a key "
                    "that it was not called for; copy the key columns of the state from the rows "
                    "or from the state. For state that does not belong to one key, declare a state "
                    "without key columns"
                )
            state = state.without(keys).plus(changed)
            touched.append(keys)
            done = bucket
        replaced = distinct(*touched)
        return Change(pa.concat_tables(outs), replaced, state.of(replaced))

    def _call(self, state: pa.Table, rows: pa.Table, bucket: int) -> tuple[pa.Table, pa.Table]:
        info = BucketInfo(bucket, bucket * self.width_us, (bucket + 1) * self.width_us)
        result = self.fn(state, rows, info)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(
                f"{self.name}: the function must return (out, state), two Arrow tables"
            )
        out, state = (
            _fit(table, schema, f"{self.name}, {label}")
            for table, schema, label in zip(
                result, (self.out, self.state), ("out", "state"), strict=True
            )
        )
        times = times_us(out, self.time)
        if len(times) and (times.min() < info.start_us or times.max() >= info.end_us):
            raise InputError(
                f"{self.name}: the time {self.time!r} of a result is outside the processed bucket "
                f"{bucket}; use a time from info.start_us to info.end_us - 1"
            )
        return out, state


def _fit(table: Any, schema: pa.Schema, of: str) -> pa.Table:
    if not isinstance(table, pa.Table):
        raise InputError(f"{of}: expected an Arrow table, found {type(table).__name__}")
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise InputError(f"{of}: column {', '.join(missing)} is missing")
    try:
        return table.select(schema.names).cast(schema).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
        raise InputError(f"{of}: {err}") from None


def has_keys(state: pa.Schema, rows: pa.Schema, keys: tuple[str, ...]) -> bool:
    """Whether the state has the key columns of the rows, so that equal keys have equal hashes."""

    def alike(one: pa.DataType, other: pa.DataType) -> bool:
        both_integers = pa.types.is_integer(one) and pa.types.is_integer(other)
        return both_integers or bool(one == other)

    return all(
        key in state.names and alike(state.field(key).type, rows.field(key).type) for key in keys
    )
