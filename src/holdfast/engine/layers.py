"""Keyed state as a stack of layers: immutable files, each with the keys that steps have changed.

A step reads the state of the keys that it needs and adds a layer with their new state; a removed
key has an entry, too. The newest layer that has an entry of a key is valid for it. So a step costs
in proportion to the keys that it touches, not to all keys. Layers are merged now and then, so that
there are few.

Keys are compared by a 64-bit hash. Keys with the same hash are read and replaced together, which is
allowed because the result for a key must not depend on other keys.

A file consists of blocks of entries in the order of hashes, blocks of timers in the order of times,
and an index with the first hash or time, the place and the CRC-32 of each block. The CRC-32 of the
index is in the description of the layer. Every block that is read is verified.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.engine.nullable import nullable, nullable_schema
from holdfast.engine.state import Layer, compare_crc, present, runs_of_levels
from holdfast.errors import InputError
from holdfast.storage.files import put_file, storage
from holdfast.storage.rows import TIMESTAMP

I64 = npt.NDArray[np.int64]
#: Records of `_TIMER`.
Timers = npt.NDArray[np.void]

#: Most rows of a block, unless more rows have the same hash.
BLOCK_ROWS = 256
#: Most timers of a block.
BLOCK_TIMERS = 1024
#: This many layers of one level are merged into one of the next level.
FANOUT = 16
#: On request, all layers become one only if they have this many times the rows that are left.
_OBSOLETE_MIN = 1.1
#: Timers of each layer that are looked at to find the earliest one.
NEXT_TIMERS = 64

_INDEX = np.dtype([("first", "<i8"), ("at", "<i8"), ("bytes", "<i4"), ("crc", "<u4")])
#: The time of a timer and the hash of its key.
_TIMER = np.dtype([("us", "<i8"), ("hash", "<i8")])
NO_TIMERS: Timers = np.zeros(0, _TIMER)
#: So many timers with the same time are stored without it.
SAME_TIME_MIN = 64
#: The start of a block without times; no timer is set at the earliest time of 64 bits.
_SAME_TIME = np.array([-(1 << 63)], "<i8").tobytes()


@dataclass(frozen=True, slots=True)
class Entries:
    """State of keys, in the order of their hashes."""

    hashes: I64
    #: True for the entry of a key without state; its row has only nulls.
    removed: npt.NDArray[np.bool_]
    rows: pa.Table

    @staticmethod
    def of(rows: pa.Table, hashes: I64, touched: I64) -> Entries:
        """The state of the keys with the sorted hashes `touched`. Keys without rows are removed."""
        gone = touched[~is_in(touched, np.sort(hashes))]
        rows = nullable(rows)
        if len(gone):
            nothing = [pa.nulls(len(gone), field.type) for field in rows.schema]
            rows = pa.concat_tables([rows, pa.Table.from_arrays(nothing, schema=rows.schema)])
        removed = np.r_[np.zeros(len(hashes), bool), np.ones(len(gone), bool)]
        hashes = np.r_[hashes, gone]
        order = np.argsort(hashes, kind="stable")
        return Entries(hashes[order], removed[order], rows.take(pa.array(order)))

    def selected(self, chosen: npt.NDArray[np.bool_]) -> Entries:
        return Entries(
            self.hashes[chosen], self.removed[chosen], self.rows.filter(pa.array(chosen))
        )

    def __len__(self) -> int:
        return len(self.hashes)


def to_merge(
    levels: Sequence[int], entries: Sequence[int], *, fixed: int, most: float,
    whole: bool | None = None, rows: int = 0,
) -> tuple[int, int] | None:  # fmt: skip
    """The layers that should be merged: the number of the first one and the number after the last
    one. The levels and the numbers of entries are given from the oldest to the newest layer.
    `fixed`: so many of the oldest layers must stay. `most`: most entries to merge. `whole`: whether
    all layers become one; None: when the others have as many entries as the oldest. `rows`: rows of
    the state, which would be left: without obsolete entries, merging does not help."""
    if whole is None:
        whole = bool(entries) and entries[0] <= sum(entries[1:])
    elif whole:
        whole = sum(entries) >= _OBSOLETE_MIN * rows
    if whole and not fixed and len(levels) > 1 and sum(entries) <= most:
        return 0, len(levels)
    least = max(fixed, 1)  # the oldest layer holds most keys
    for first, end in runs_of_levels(levels[least:]):
        start = least + first
        if end - first >= FANOUT and sum(entries[start : start + FANOUT]) <= most:
            return start, start + FANOUT
    return None


def write_layer(entries: Entries, timer: str | None, level: int, file: LayerName) -> Layer:
    """Write a layer to a new file. `timer`: the column with the times of timers."""
    timers = in_order(timers_in(entries.rows, entries.hashes, timer))
    blocks, timer_blocks = list(_blocks(entries)), list(_timer_blocks(timers))
    index = np.zeros(len(blocks) + len(timer_blocks), _INDEX)
    at, crc = 0, 0
    for number, (first, data) in enumerate((*blocks, *timer_blocks)):
        index[number] = (first, at, len(data), crc32(data))
        at, crc = at + len(data), crc32(data, crc)
    written = index.tobytes()
    name = f"{file.folder}/{file.name}.{uuid.uuid4().hex[:8]}.layer"
    path = os.path.join(file.root, name)
    with storage(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    content = b"".join([*(data for _, data in (*blocks, *timer_blocks)), written])
    put_file(Path(path), content, fsync=False)
    return Layer(
        name, len(entries), level, len(blocks), len(timer_blocks),
        (int(timers["us"][0]), int(timers["us"][-1])) if len(timers) else None,
        crc32(written), crc32(written, crc),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerName:
    """Where a layer is written."""

    #: The folder of all state, and the folder in it.
    root: str
    folder: str
    #: The beginning of the file name.
    name: str


def _blocks(entries: Entries) -> Iterator[tuple[int, pa.Buffer]]:
    columns = [column.combine_chunks() for column in entries.rows.columns]
    if any(isinstance(column, pa.ChunkedArray) for column in columns):
        raise InputError(
            "a shard has more than 2 GiB of state in one column; use more partitions of the network"
        )
    arrays = [pa.array(entries.hashes), pa.array(entries.removed), *columns]
    batch = pa.RecordBatch.from_arrays(arrays, schema=_schema(entries.rows.schema))
    at = 0
    while at < len(entries):
        end = min(at + BLOCK_ROWS, len(entries))
        if end < len(entries):  # rows with the same hash are in one block
            end = int(np.searchsorted(entries.hashes, entries.hashes[end - 1], side="right"))
        yield int(entries.hashes[at]), batch.slice(at, end - at).serialize()
        at = end


def _schema(schema: pa.Schema) -> pa.Schema:
    """The schema of blocks. Entries of removed keys have only nulls."""
    columns = nullable_schema(schema)
    return pa.schema([("hash", pa.int64()), ("removed", pa.bool_()), *columns])


def timers_in(rows: pa.Table, hashes: I64, timer: str | None) -> Timers:
    """The timers of state, in the order of the rows. `hashes`: of the keys of the rows."""
    if timer is None or not rows.num_rows:
        return NO_TIMERS
    column = rows[timer].combine_chunks().cast(TIMESTAMP)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    timers = np.zeros(int(valid.sum()), _TIMER)
    timers["us"] = column.drop_null().cast(pa.int64()).to_numpy()
    timers["hash"] = hashes[valid]
    return timers


def earliest_timer(rows: pa.Table, hashes: I64, timer: str | None) -> tuple[int, int] | None:
    """The earliest timer of state, and the hash of its key."""
    timers = in_order(timers_in(rows, hashes, timer))
    return (int(timers["us"][0]), int(timers["hash"][0])) if len(timers) else None


def in_order(timers: Timers) -> Timers:
    """By time, then by hash. Sorting the records themselves would be slow."""
    return timers[np.lexsort((timers["hash"], timers["us"]))]


def _timer_blocks(timers: Timers) -> Iterator[tuple[int, bytes]]:
    """The first time of each block, and the block: timers, or, if all have this time, only the
    hashes after `_SAME_TIME`."""
    starts = np.flatnonzero(np.r_[True, np.diff(timers["us"]) != 0][: len(timers)]).tolist()
    begin = 0
    for start, end in pairwise([*starts, len(timers)]):
        if end - start >= SAME_TIME_MIN:
            yield from _mixed(timers[begin:start])
            for at in range(start, end, BLOCK_TIMERS):
                block = timers[at : min(at + BLOCK_TIMERS, end)]
                yield int(block["us"][0]), _SAME_TIME + block["hash"].tobytes()
            begin = end
    yield from _mixed(timers[begin:])


def _mixed(timers: Timers) -> Iterator[tuple[int, bytes]]:
    for at in range(0, len(timers), BLOCK_TIMERS):
        block = timers[at : at + BLOCK_TIMERS]
        yield int(block["us"][0]), block.tobytes()


def _timers_of(first_us: int, data: bytes) -> Timers:
    if not data.startswith(_SAME_TIME):
        return np.frombuffer(data, _TIMER)
    hashes = np.frombuffer(data, np.int64, offset=len(_SAME_TIME))
    timers = np.empty(len(hashes), _TIMER)
    timers["us"], timers["hash"] = first_us, hashes
    return timers


class LayerFile:
    """Reads blocks of a layer and verifies them."""

    def __init__(self, folder: str, layer: Layer, schema: pa.Schema) -> None:
        self._path = os.path.join(folder, layer.file)
        self._schema = schema
        with present(self._path), storage(self._path):
            self._fd = os.open(self._path, os.O_RDONLY)
        try:
            size = (layer.blocks + layer.timer_blocks) * _INDEX.itemsize
            with storage(self._path):
                at = os.fstat(self._fd).st_size - size
            data = self._read(max(at, 0), size, layer.index_crc)
        except BaseException:
            os.close(self._fd)
            raise
        index = np.frombuffer(data, _INDEX)
        self._blocks, self._timers = index[: layer.blocks], index[layer.blocks :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def _read(self, at: int, size: int, crc: int) -> bytes:
        with storage(self._path):
            data = os.pread(self._fd, size, at)
        compare_crc(self._path, crc, crc32(data))
        return data

    def find(self, wanted: I64) -> Entries:
        """The entries of keys with these hashes, which are sorted, and of some others."""
        numbers = np.searchsorted(self._blocks["first"], wanted, side="right") - 1
        return self._entries(distinct(numbers[numbers >= 0]))

    def all(self) -> Entries:
        return self._entries(np.arange(len(self._blocks)))

    def _entries(self, numbers: npt.NDArray[Any]) -> Entries:
        schema = _schema(self._schema)
        batches = []
        for _, at, size, crc in self._blocks[numbers].tolist():
            data = self._read(at, size, crc)
            batches.append(pa.ipc.read_record_batch(pa.py_buffer(data), schema))
        table = pa.Table.from_batches(batches, schema)
        hashes: I64 = table.column(0).to_numpy()
        return Entries(
            hashes, table.column(1).to_numpy(), table.select(list(range(2, len(schema))))
        )

    def timers(self, from_us: int, to_us: int, most: float) -> Timers:
        """Timers from `from_us` to before `to_us` that were set when the layer was written, in
        order. At least `most`, if there are so many."""
        begin = max(int(np.searchsorted(self._timers["first"], from_us, side="left")) - 1, 0)
        found, count = [NO_TIMERS], 0
        for first, at, size, crc in self._timers[begin:].tolist():
            if first >= to_us or count >= most:
                break
            block = _timers_of(first, self._read(at, size, crc))
            lo, hi = np.searchsorted(block["us"], (from_us, to_us), side="left")
            found.append(block[lo:hi])
            count += int(hi - lo)
        return np.concatenate(found)


def state_of(
    folder: str, layers: Sequence[Layer], schema: pa.Schema, wanted: I64
) -> tuple[pa.Table, I64]:
    """The state of the keys with these hashes, which are sorted, and the hashes of its rows, in the
    order of hashes."""
    tables, hashes = [nullable(schema.empty_table())], [np.array([], np.int64)]
    places, rows_before = [np.array([], np.int64)], 0
    for layer in reversed(layers):
        if not len(wanted):
            break
        with LayerFile(folder, layer, schema) as file:
            entries = file.find(wanted)
        begin = np.searchsorted(entries.hashes, wanted, side="left")
        counts = np.searchsorted(entries.hashes, wanted, side="right") - begin
        wanted = wanted[counts == 0]
        place = np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        place = place[~entries.removed[place]]
        hashes.append(entries.hashes[place])
        places.append(place + rows_before)
        tables.append(entries.rows)
        rows_before += len(entries)
    found = np.concatenate(hashes)
    order = np.argsort(found, kind="stable")  # whatever the layers
    together = pa.concat_tables(tables).combine_chunks()
    rows = together.take(pa.array(np.concatenate(places)[order]))
    return rows.cast(schema), found[order]


def due_timers(
    folder: str, layers: Iterable[Layer], schema: pa.Schema, from_us: int, to_us: int
) -> I64:
    """Hashes of the keys that may have a timer from `from_us` to before `to_us`, sorted. In newer
    layers, these keys may have other timers or none."""
    return distinct(_timers(folder, layers, schema, from_us, to_us, math.inf)["hash"])


def next_timer(
    folder: str, layers: Sequence[Layer], schema: pa.Schema, timer: str, from_us: int, without: I64
) -> tuple[int, int] | None:
    """The earliest timer from `from_us` on, and the hash of its key. `without`: sorted hashes of
    keys that are ignored."""
    while True:
        some = np.sort(_timers(folder, layers, schema, from_us, 1 << 62, NEXT_TIMERS)["us"])
        if not len(some):
            return None
        upto_us = int(some[:NEXT_TIMERS][-1])
        once_set = _timers(folder, layers, schema, from_us, upto_us + 1, math.inf)
        once_set = once_set[~is_in(once_set["hash"], without)]
        rows, hashes = state_of(folder, layers, schema, distinct(once_set["hash"]))
        still_set = np.intersect1d(once_set, timers_in(rows, hashes, timer))
        if len(still_set):
            return int(still_set["us"][0]), int(still_set["hash"][0])
        from_us = upto_us + 1


def _timers(
    folder: str, layers: Iterable[Layer], schema: pa.Schema, from_us: int, to_us: int, most: float
) -> Timers:
    found = [NO_TIMERS]
    for layer in layers:
        first, last = layer.timers_us or (to_us, from_us)
        if first < to_us and last >= from_us:
            with LayerFile(folder, layer, schema) as file:
                found.append(file.timers(from_us, to_us, most))
    return np.concatenate(found)


def merged(stack: Sequence[Entries], *, oldest: bool) -> Entries:
    """The entries of layers, from the oldest to the newest, as one. `oldest`: there are no older
    layers, so removed keys need no entries."""
    hashes = np.concatenate([entries.hashes for entries in stack])
    age = np.repeat(np.arange(len(stack))[::-1], [len(entries) for entries in stack])
    order = np.lexsort((age, hashes))
    first = np.r_[True, np.diff(hashes[order]) != 0][: len(order)]
    newest = age[order][first][np.cumsum(first) - 1]
    order = order[age[order] == newest]
    removed = np.concatenate([entries.removed for entries in stack])[order]
    if oldest:
        order, removed = order[~removed], removed[~removed]
    rows = pa.concat_tables([entries.rows for entries in stack]).take(pa.array(order))
    return Entries(hashes[order], removed, rows)


def merge_layers(
    layers: Sequence[Layer], newer: Entries | None, schema: pa.Schema, timer: str | None,
    file: LayerName, *, oldest: bool,
) -> Layer | None:  # fmt: skip
    """Write layers, from the oldest to the newest, as one, with the newer entries if there are any.
    None if no entries are left. `oldest`: there are no older layers."""
    stack = []
    for layer in layers:
        with LayerFile(file.root, layer, schema) as read:
            stack.append(read.all())
    entries = merged(stack if newer is None else [*stack, newer], oldest=oldest)
    if not len(entries):
        return None
    return write_layer(entries, timer, 0 if oldest else layers[0].level + 1, file)


def distinct(*hashes: I64) -> I64:
    """The different hashes, sorted. `np.unique` takes several times as long for many of them."""
    together = np.sort(np.concatenate(hashes))
    first: npt.NDArray[np.bool_] = np.r_[True, together[1:] != together[:-1]][: len(together)]
    found: I64 = together[first]
    return found


def is_in(hashes: I64, wanted: I64) -> npt.NDArray[np.bool_]:
    """Which hashes are in the sorted array `wanted`."""
    if not len(wanted):
        return np.zeros(len(hashes), bool)
    place = np.searchsorted(wanted, hashes)
    return np.asarray(wanted[np.minimum(place, len(wanted) - 1)] == hashes)
