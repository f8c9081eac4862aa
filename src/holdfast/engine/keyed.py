"""Keyed state on the executors, in shards.

The rows of a step are distributed by key over the shards of the network. The task of a shard reads
the state of the keys that it needs, runs the operator and writes a layer with the new state of
these keys, in a file with a unique name (`layers.py`). Then it writes a note that describes the
shard, under a name that the driver knows, and only then returns its results; so a lost file is
never taken for missing state. If Spark runs a task twice, both write the same state, because
operators are deterministic. State never passes through the driver. In a small job, one task
processes all shards, which needs no shuffle.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.engine.keyed_operators import Change, KeyedOperator, KeyedState
from holdfast.engine.layers import (
    Entries,
    LayerName,
    distinct,
    due_timers,
    earliest_timer,
    is_in,
    merge_layers,
    next_timer,
    state_of,
    to_merge,
    write_layer,
)
from holdfast.engine.state import Layer, Shard
from holdfast.errors import LogCorrupted
from holdfast.storage.files import put_file, storage
from holdfast.storage.rows import sort_canonical

#: The column with the shard of a row, if one task processes all shards.
SHARD = "__shard"


@dataclass(frozen=True, slots=True)
class StepState:
    """What differs from step to step."""

    #: The folder of all state, and the folder in it for the files of this step.
    root: str
    folder: str
    #: The last bucket of the step.
    upto: int
    #: The shards that have state, by number.
    shards: Mapping[int, Shard]
    #: How many of the oldest layers of a shard must stay, by number.
    fixed: Mapping[int, int]
    #: Most entries of layers that a step merges.
    merge_max: int
    #: Whether all layers of a shard become one (`to_merge`).
    merges: bool | None = None

    def text(self) -> str:
        shards = [(number, shard.body()) for number, shard in self.shards.items()]
        fixed = list(self.fixed.items())
        return json.dumps(
            [self.root, self.folder, self.upto, shards, fixed, self.merge_max, self.merges]
        )

    @staticmethod
    def of(text: str) -> StepState:
        root, folder, upto, bodies, fixed, merge_max, merges = json.loads(text)
        shards = {number: Shard.of(body) for number, body in bodies}
        return StepState(root, folder, upto, shards, dict(fixed), merge_max, merges)


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A function for `mapInArrow` that processes shards; sent to the executors with the job."""

    op: str
    operator: KeyedOperator
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
        shards: dict[int, Shard] = {}
        outs: list[pa.Table] = []
        for number, rows in self._rows(received):
            out, shards[number] = run_shard(self.operator, number, rows, state)
            outs.append(out)
        write_note(shards, state, min(shards))
        for out in outs:
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


def run_shard(
    operator: KeyedOperator, number: int, rows: pa.Table, step: StepState
) -> tuple[pa.Table, Shard]:
    """Run an operator over the new rows of a shard. Returns results and the new shard."""
    shard = step.shards.get(number, Shard())
    root, schema = step.root, operator.state
    rows = sort_canonical(rows, operator.time)
    hashes = operator.hashes(rows)
    needed = distinct(hashes)
    if shard.timer is not None:
        end_us = operator.end_us(step.upto)
        needed = distinct(needed, due_timers(root, shard.layers, schema, shard.timer[0], end_us))
    before = KeyedState(*state_of(root, shard.layers, schema, needed))
    change = operator(before, rows, hashes, step.upto)
    if not len(change.touched):
        return change.out, shard
    replaced = len(before.of(change.touched).hashes)
    state = change.state
    entries = Entries.of(state.rows, state.hashes, change.touched)
    name = LayerName(root, step.folder, f"shard-{number}")
    count = shard.rows - replaced + len(state.hashes)
    fixed = step.fixed.get(number, 0)
    layers = with_layer(shard.layers, entries, operator, name, step, fixed, count)
    return change.out, Shard(layers, count, _earliest(operator, shard, change, root))


def _earliest(
    operator: KeyedOperator, before: Shard, change: Change, root: str
) -> tuple[int, int] | None:
    """The earliest timer after a step, and the hash of its key."""
    if operator.timer is None:
        return None
    found = earliest_timer(change.state.rows, change.state.hashes, operator.timer)
    earliest = before.timer
    if earliest is not None and is_in(np.array([earliest[1]]), change.touched)[0]:
        earliest = next_timer(
            root, before.layers, operator.state, operator.timer, earliest[0], change.touched
        )
    return min((timer for timer in (found, earliest) if timer is not None), default=None)


def with_layer(
    layers: Sequence[Layer],
    entries: Entries,
    operator: KeyedOperator,
    name: LayerName,
    step: StepState,
    fixed: int,
    rows: int,
) -> tuple[Layer, ...]:
    """The layers with a new one on top. Some are merged if there are many. `rows`: rows of the
    state."""
    if operator.is_whole:  # the new state replaces everything
        layers = ()
    levels = [*(layer.level for layer in layers), 0]
    sizes = [*(layer.entries for layer in layers), len(entries)]
    merge = to_merge(levels, sizes, fixed=fixed, most=step.merge_max, whole=step.merges, rows=rows)
    first, end = merge or (len(layers), len(layers))

    def merged(newer: Entries | None) -> list[Layer]:
        one = merge_layers(
            layers[first:end], newer, operator.state, operator.timer, name, oldest=first == 0
        )
        return [] if one is None else [one]

    if end > len(layers):
        return (*layers[:first], *merged(entries))
    if not layers:  # the oldest layer needs no entries for removed keys
        entries = entries.selected(~entries.removed)
    top = [write_layer(entries, operator.timer, 0, name)] if len(entries) else []
    if merge is None:
        return (*layers, *top)
    return (*layers[:first], *merged(None), *layers[end:], *top)


def write_note(shards: Mapping[int, Shard], step: StepState, task: int) -> None:
    folder = os.path.join(step.root, step.folder)
    note = json.dumps([(number, shard.body()) for number, shard in shards.items()])
    with storage(folder):
        os.makedirs(folder, exist_ok=True)
        own = os.path.join(folder, f"{uuid.uuid4().hex[:8]}.json")  # the task may run twice at once
        put_file(own, note.encode(), fsync=False)
        os.replace(own, _note(folder, task))


def read_notes(folder: str, tasks: int) -> dict[int, Shard] | None:
    """The shards that the tasks of a step described in `folder`. None if no task ran."""
    shards: dict[int, Shard] = {}
    missing = []
    for task in range(tasks):
        try:
            with open(_note(folder, task), "rb") as file:
                note = json.load(file)
            shards |= {number: Shard.of(body) for number, body in note}
        except FileNotFoundError:
            missing.append(task)
        except (ValueError, KeyError, TypeError) as err:
            raise LogCorrupted(f"{_note(folder, task)} cannot be decoded ({err!r})") from None
    if not shards:
        return None
    if missing:
        raise lost_note(folder, missing[0])
    return shards


def lost_note(folder: str, task: int) -> LogCorrupted:
    return LogCorrupted(
        f"{_note(folder, task)} is missing, but the task that writes it has finished"
    )


def clean_up(folder: str, kept: set[str]) -> None:
    """Delete the notes, and the files of tasks that ran twice. Such a task may still be writing."""
    for name in os.listdir(folder):
        if name not in kept:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
    if not kept:
        with suppress(OSError):
            os.rmdir(folder)


def _note(folder: str, task: int) -> str:
    return os.path.join(folder, f"task-{task}.json")
