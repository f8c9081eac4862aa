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
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from holdfast.engine.footprints import (
    Footprints,
    Marked,
    Wanted,
    all_marks,
    leave,
    restored,
    unseen,
)
from holdfast.engine.keyed_operators import Change, KeyedOperator, KeyedState
from holdfast.engine.layers import (
    NO_TIMERS,
    Entries,
    LayerName,
    Timers,
    distinct,
    due_timers,
    earliest_timer,
    is_in,
    marked,
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

#: Folder of the footprints, in the folder of all state.
FOOTPRINTS = "footprints+"  # no name of an output has a plus
#: Of each shard, at least so many keys with the oldest marks are read if some should leave a
#: footprint: their marks may have changed.
CHECKED_MIN = 1_024
#: The column with the shard of a row, if one task processes all shards.
SHARD = "__shard"


def footprints_of(step: str) -> str:
    """The folder for the footprints of the step with this folder."""
    return f"{FOOTPRINTS}/{os.path.basename(step)}"


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
    #: The footprints that the step writes; None: the operator leaves none.
    wanted: Wanted | None = None
    #: Footprints from which shards are restored first, with their buckets, from the oldest to the
    #: newest, by number of the shard.
    found: Mapping[int, Sequence[tuple[int, Footprints]]] = field(default_factory=dict)
    #: The step replays buckets: rows of a key up to its mark are ignored.
    replays: bool = False

    def text(self) -> str:
        shards = [(number, shard.body()) for number, shard in self.shards.items()]
        found = [
            (number, [(bucket, one.body()) for bucket, one in held])
            for number, held in self.found.items()
        ]
        wanted = None if self.wanted is None else astuple(self.wanted)
        return json.dumps(
            [self.root, self.folder, self.upto, shards, list(self.fixed.items()), self.merge_max,
             wanted, found, self.replays]
        )  # fmt: skip

    @staticmethod
    def of(text: str) -> StepState:
        root, folder, upto, bodies, fixed, merge_max, wanted, found, replays = json.loads(text)
        shards = {number: Shard.of(body) for number, body in bodies}
        footprints = {
            number: [(bucket, Footprints.of(body)) for bucket, body in held]
            for number, held in found
        }
        return StepState(
            root, folder, upto, shards, dict(fixed), merge_max,
            None if wanted is None else Wanted(*wanted), footprints, replays,
        )  # fmt: skip


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
        results = {
            number: run_shard(self.operator, number, rows, state)
            for number, rows in self._rows(received)
        }
        write_note(results, state, min(results))
        for out, _, _ in results.values():
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


class ShardResult(NamedTuple):
    out: pa.Table
    shard: Shard
    #: None if the operator leaves no footprints.
    footprints: Footprints | None = None


def run_shard(operator: KeyedOperator, number: int, rows: pa.Table, step: StepState) -> ShardResult:
    """Run an operator over the new rows of a shard."""
    shard = step.shards.get(number, Shard())
    windows, began_s, loaded_s = dict[int, int](), time.perf_counter(), 0.0
    name = LayerName(step.root, step.folder, f"shard-{number}")
    if number in step.found:
        assert isinstance(operator, Marked)
        shard, windows = restored(operator, step.found[number], name)
        loaded_s = time.perf_counter() - began_s
    root, schema = step.root, operator.state
    rows = sort_canonical(rows, operator.time)
    hashes = operator.hashes(rows)
    needed = distinct(hashes)
    if shard.timer is not None:
        end_us = operator.end_us(step.upto)
        needed = distinct(needed, due_timers(root, shard.layers, schema, shard.timer[0], end_us))
    checked = None
    if step.wanted is not None:
        span, most = (step.wanted.since, step.wanted.upto), max(CHECKED_MIN, 2 * step.wanted.most)
        most = min(most, 1 << 40)
        checked = marked(root, shard.layers, schema, *span, most, step.wanted.turn)
    everything = needed if checked is None else distinct(needed, checked)
    held = KeyedState(*state_of(root, shard.layers, schema, everything))
    before = held if len(everything) == len(needed) else held.of(needed)
    if step.replays:
        assert isinstance(operator, Marked)
        new = unseen(before, hashes, operator.buckets(rows))
        rows, hashes = rows.filter(pa.array(new)), hashes[new]
    change, footprints, marks = operator(before, rows, hashes, step.upto), None, NO_TIMERS
    if step.wanted is not None and checked is not None:
        folder = footprints_of(step.folder)
        durable = None if step.replays else replace(name, folder=folder)
        change, footprints, marks = leave(held, change, checked, step.wanted, step.upto, durable)
        if operator.is_whole:  # the new layer replaces all others
            marks = all_marks(change.state)
        footprints = footprints.plus(windows, int(1e6 * loaded_s))
    if not len(change.touched):
        return ShardResult(change.out, shard, footprints)
    replaced = len(held.of(change.touched).hashes)
    state = change.state
    top = NewLayer(Entries.of(state.rows, state.hashes, change.touched), marks)
    layers = with_layer(shard.layers, top, operator, name, step, step.fixed.get(number, 0))
    count = shard.rows - replaced + len(state.hashes)
    earliest = _earliest(operator, shard, change, root)
    return ShardResult(change.out, Shard(layers, count, earliest), footprints)


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


class NewLayer(NamedTuple):
    entries: Entries
    #: Marks that were set.
    marks: Timers


def with_layer(
    layers: Sequence[Layer],
    new: NewLayer,
    operator: KeyedOperator,
    name: LayerName,
    step: StepState,
    fixed: int,
) -> tuple[Layer, ...]:
    """The layers with a new one on top. Some are merged if there are many."""
    entries = new.entries
    if operator.is_whole:  # the new state replaces everything
        layers = ()
    levels = [*(layer.level for layer in layers), 0]
    sizes = [*(layer.entries for layer in layers), len(entries)]
    merge = to_merge(levels, sizes, fixed=fixed, most=step.merge_max)
    first, end = merge or (len(layers), len(layers))

    def merged(newer: NewLayer | None) -> list[Layer]:
        top, marks = (None, NO_TIMERS) if newer is None else newer
        one = merge_layers(
            layers[first:end], top, operator.state, operator.timer, name, oldest=first == 0,
            marks=marks,
        )  # fmt: skip
        return [] if one is None else [one]

    if end > len(layers):
        return (*layers[:first], *merged(new))
    if not layers:  # the oldest layer needs no entries for removed keys
        entries = entries.selected(~entries.removed)
    top = [write_layer(entries, operator.timer, 0, name, new.marks)] if len(entries) else []
    if merge is None:
        return (*layers, *top)
    return (*layers[:first], *merged(None), *layers[end:], *top)


def write_note(results: Mapping[int, ShardResult], step: StepState, task: int) -> None:
    folder = os.path.join(step.root, step.folder)
    note = json.dumps(
        [
            (number, shard.body(), None if footprints is None else footprints.body())
            for number, (_, shard, footprints) in results.items()
        ]
    )
    with storage(folder):
        os.makedirs(folder, exist_ok=True)
        own = os.path.join(folder, f"{uuid.uuid4().hex[:8]}.json")  # the task may run twice at once
        put_file(own, note.encode(), fsync=False)
        os.replace(own, _note(folder, task))


def read_notes(folder: str, tasks: int) -> tuple[dict[int, Shard], dict[int, Footprints]] | None:
    """The shards and footprints that the tasks of a step described in `folder`. None if no task
    ran."""
    shards: dict[int, Shard] = {}
    footprints: dict[int, Footprints] = {}
    missing = []
    for task in range(tasks):
        try:
            with open(_note(folder, task), "rb") as file:
                note = json.load(file)
            for number, shard, left in note:
                shards[number] = Shard.of(shard)
                if left is not None:
                    footprints[number] = Footprints.of(left)
        except FileNotFoundError:
            missing.append(task)
        except (ValueError, KeyError, TypeError) as err:
            raise LogCorrupted(f"{_note(folder, task)} cannot be decoded ({err!r})") from None
    if not shards:
        return None
    if missing:
        raise lost_note(folder, missing[0])
    return shards, footprints


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
