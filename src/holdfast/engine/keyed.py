"""Keyed state on the executors, one file per shard.

The rows of a step are distributed by key over the shards of the network. A task reads its shard of
the previous version, runs the operator and writes its shard of the next version under a unique
name. Then it writes a note with the name and the CRC-32 of that file, under a name that the driver
knows, and only then returns its results; so a lost file is never taken for missing state. If Spark
runs a task twice, both files have the same content, because operators are deterministic. State
never passes through the driver. Old versions are separate files. In a small job, one task processes
all shards, which needs no shuffle.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.engine.state import Shard, read_table, write_rows
from holdfast.errors import InputError, LogCorrupted
from holdfast.storage.files import put_file, storage
from holdfast.storage.rows import runs, sort_canonical, times_us

#: Computes results, the next state and the next timer from the state of a shard, its rows and the
#: last bucket of the step.
Step = Callable[[pa.Table | None, pa.Table, int], tuple[pa.Table, pa.Table, int | None]]

#: The column with the shard of a row, if one task processes all shards.
SHARD = "__shard"


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """The bucket for which a stateful function is called."""

    bucket: int
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class StepState:
    """What differs from step to step."""

    #: File of the previous version and its CRC-32, by shard number; no entry without state.
    files: Mapping[int, tuple[str, int]]
    #: Folder of the files of this step.
    folder: str
    #: The last bucket of the step.
    upto: int

    def text(self) -> str:
        return json.dumps([list(self.files.items()), self.folder, self.upto])

    @staticmethod
    def of(text: str) -> StepState:
        files, folder, upto = json.loads(text)
        return StepState({number: (path, crc) for number, (path, crc) in files}, folder, upto)


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A function for `mapInArrow` that processes shards; sent to the executors with the job."""

    op: str
    step: Step
    #: The state; or the file that contains its text, for a job that runs again.
    state: StepState | str
    schema: pa.Schema
    out: pa.Schema
    #: Number of shards if one task processes all of them, else None.
    shards: int | None

    @property
    def __name__(self) -> str:
        """The name of the function in Spark's plans."""
        return name_of(self.op)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        state = self._state()
        received = list(batches)
        for shard, rows in self._rows(received):
            before = read_table(*state.files[shard]) if shard in state.files else None
            out, after, timer_us = self.step(before, rows, state.upto)
            write_shard(after, state.folder, shard, timer_us)
            yield from out.cast(self.out).combine_chunks().to_batches()

    def _state(self) -> StepState:
        if isinstance(self.state, StepState):
            return self.state
        with storage(self.state), open(self.state, encoding="utf-8") as file:
            return StepState.of(file.read())

    def _rows(self, batches: list[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
        if self.shards is None:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            rows = pa.Table.from_batches(batches, batches[0].schema if batches else self.schema)
            yield context.partitionId(), self._cast(rows)
            return
        if not batches:
            for shard in range(self.shards):
                yield shard, self.schema.empty_table()
            return
        rows = pa.Table.from_batches(batches)
        places = rows[SHARD].to_numpy()
        rows = self._cast(rows.drop_columns([SHARD]))
        for shard in range(self.shards):
            yield shard, rows.filter(pa.array(places == shard))

    def _cast(self, rows: pa.Table) -> pa.Table:
        return rows.rename_columns(self.schema.names).cast(self.schema)


def name_of(op: str) -> str:
    return f"shards_of_{op}"


def write_shard(state: pa.Table, folder: str, shard: int, timer_us: int | None) -> None:
    file = f"shard-{shard}.{uuid.uuid4().hex[:8]}.parquet"
    crc = write_rows(state, os.path.join(folder, file))
    note = json.dumps({"file": file, "rows": state.num_rows, "timer_us": timer_us, "crc": crc})
    own = os.path.join(folder, f"{file}.json")  # another attempt may be writing, too
    put_file(own, note.encode(), fsync=False)
    os.replace(own, _note(folder, shard))


def read_shards(folder: str, count: int) -> dict[int, Shard] | None:
    """The shards that the tasks of a step wrote to `folder`, with file names relative to it. None
    if no task ran."""
    shards: dict[int, Shard] = {}
    for number in range(count):
        try:
            with open(_note(folder, number), "rb") as file:
                note = json.load(file)
            shards[number] = Shard(note["file"], note["rows"], note["timer_us"], note["crc"])
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as err:
            raise LogCorrupted(f"{_note(folder, number)} cannot be decoded ({err!r})") from None
    if not shards:
        return None
    if len(shards) < count:
        missing = next(number for number in range(count) if number not in shards)
        raise lost_shard(folder, missing)
    return shards


def lost_shard(folder: str, number: int) -> LogCorrupted:
    return LogCorrupted(
        f"{_note(folder, number)} is missing, but the task that writes it has finished"
    )


def clean_up(folder: str, shards: Iterable[Shard]) -> None:
    """Delete the notes, and the files of tasks that ran twice. Such a task may still be writing."""
    kept = {shard.file for shard in shards}
    for name in os.listdir(folder):
        if name not in kept:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))


def _note(folder: str, shard: int) -> str:
    return os.path.join(folder, f"shard-{shard}.json")


@dataclass(frozen=True, slots=True)
class CountWindowStep:
    """Assigns rows to count windows. Returns the rows of full windows; retains the rest as state.

    The state of a key is the rows since the start of its first window that is not full, in order.
    No positions are stored.
    """

    keys: tuple[str, ...]
    time: str
    size: int
    slide: int

    def __call__(
        self, before: pa.Table | None, rows: pa.Table, upto: int
    ) -> tuple[pa.Table, pa.Table, None]:
        rows = sort_canonical(rows, self.time)
        if before is not None:
            rows = pa.concat_tables([before.cast(rows.schema), rows])
        rows = rows.combine_chunks()
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
        retained = np.sort(order[stays])
        return out, rows.take(pa.array(retained)), None


@dataclass(frozen=True, slots=True)
class StatefulStep:
    """Calls a user function for every bucket that has rows or in which a timer is due."""

    fn: Callable[[pa.Table, pa.Table, BucketInfo], tuple[pa.Table, pa.Table]]
    name: str
    time: str
    timer: str | None
    state: pa.Schema
    out: pa.Schema
    width_us: int

    def __call__(
        self, before: pa.Table | None, rows: pa.Table, upto: int
    ) -> tuple[pa.Table, pa.Table, int | None]:
        state = self.state.empty_table() if before is None else before.cast(self.state)
        rows = sort_canonical(rows, self.time)
        present = runs(times_us(rows, self.time) // self.width_us)
        outs: list[pa.Table] = []
        at, done = 0, None
        while True:
            timer_us = self._timer(state)
            by_timer = None if timer_us is None else timer_us // self.width_us
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
            chunk = rows.slice(0, 0)
            if bucket == by_rows:
                chunk = rows.slice(present[at][1], present[at][2] - present[at][1])
                at += 1
            out, state = self._call(state, chunk, bucket)
            outs.append(out)
            done = bucket
        timer_us = self._timer(state)
        return pa.concat_tables([self.out.empty_table(), *outs]), state, timer_us

    def _timer(self, state: pa.Table) -> int | None:
        if self.timer is None or state.num_rows == 0:
            return None
        least = pc.min(state[self.timer]).cast(pa.timestamp("us", tz="UTC"))
        return None if not least.is_valid else int(least.value)

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


def group_ids(rows: pa.Table, keys: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A group number for every row: equal if and only if all keys are equal; nulls are equal."""
    ids = np.zeros(rows.num_rows, np.int64)
    for key in keys:
        column = rows[key].combine_chunks()
        encoded = column.dictionary_encode(null_encoding="encode")
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        ids = ids * (len(encoded.dictionary) + 1) + codes
        _, ids = np.unique(ids, return_inverse=True)
    return ids.astype(np.int64)
