"""Footprints of the simulated engine: the counterpart of `engine.footprints` over
dictionaries.

The state of every open key has a mark, and marks, files and counts have the same meaning as in the
production engine. Footprints are files on the simulated disk, which lose their content in a crash
unless the node has synced them. They have checksums, because a node reads them only after a crash.
"""

from __future__ import annotations

import marshal
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.engine.footprints import Footprints, Wanted
from holdfast.engine.state import Layer
from holdfast.errors import LogCorrupted
from holdfast.frozen import dataclass
from holdfast.storage.disk import Disk
from holdfast.storage.files import make_folder, put_file, storage
from holdfast.verify.sim.tables import Row

#: Time that a footprint takes: few fit into the share of the time that is for footprints.
FOOTPRINT_US = 1_500
#: Writes entries: state and mark of open keys, and the bucket of those that closed.
Write = Callable[[Mapping[int, Any]], Layer]


@dataclass(frozen=True, slots=True)
class MarkedKeys:
    """The state of a keyed operator before or after a step."""

    #: State and mark by key.
    open: Mapping[int, tuple[Any, int]]
    #: During a replay: keys that had closed by the end of this bucket, and not opened again.
    closed: Mapping[int, int]

    def states(self) -> dict[int, Any]:
        return {key: state for key, (state, _) in self.open.items()}

    def windows(self) -> Counter[int]:
        """The number of open keys by mark."""
        return Counter(mark for _, mark in self.open.values())

    def unseen(self, rows: Iterable[Row], bucket: int) -> list[Row]:
        """The rows of a bucket that are not in the footprints of their keys."""
        marks = {**self.closed, **{key: mark for key, (_, mark) in self.open.items()}}
        return [row for row in rows if bucket > marks.get(row[1], -(2**62))]

    def body(self) -> dict[int, tuple[Any, ...]]:
        closed = {key: (bucket,) for key, bucket in self.closed.items()}
        return {**closed, **self.open}

    @staticmethod
    def of(body: Mapping[int, tuple[Any, ...]]) -> MarkedKeys:
        return MarkedKeys(
            {key: (entry[0], entry[1]) for key, entry in body.items() if len(entry) == 2},
            {key: entry[0] for key, entry in body.items() if len(entry) == 1},
        )

    def after(self, states: Mapping[int, Any], opened: int, *, replays: bool) -> MarkedKeys:
        """After a step that gave these states. Keys that open are marked `opened`."""
        marks = {key: mark for key, (_, mark) in self.open.items()}
        held = {key: (state, marks.get(key, opened)) for key, state in states.items()}
        closed = {key: at for key, at in self.closed.items() if key not in held}
        return MarkedKeys(held, closed if replays else {})


def leave(
    before: MarkedKeys, after: MarkedKeys, wanted: Wanted, upto: int, write: Write | None
) -> tuple[MarkedKeys, Footprints]:
    """Write the footprints of a step, unless it replays buckets (no `write`): only the marks
    change."""
    marks = sorted((mark, key) for key, (_, mark) in after.open.items())
    chosen = sorted([key for mark, key in marks if mark <= wanted.upto][: wanted.most])
    marked = {**after.open, **{key: (after.open[key][0], upto) for key in chosen}}
    gone = sorted(key for key in before.open if key not in after.open)
    layer = None
    if write is not None and (chosen or gone):
        entries = {**{key: marked[key] for key in chosen}, **dict.fromkeys(gone, (upto,))}
        layer = replace(write(entries), entries=len(chosen))
    left = MarkedKeys(marked, after.closed)
    windows = left.windows()
    windows.subtract(before.windows())
    changes = {mark: change for mark, change in sorted(windows.items()) if change}
    took_us = FOOTPRINT_US * len(chosen)
    return left, Footprints(layer, len(gone), changes, len(chosen), took_us)


def restored(found: Sequence[tuple[int, Footprints]], folder: str, disk: Disk) -> MarkedKeys:
    """The state from its footprints, from the oldest to the newest, each with its bucket."""
    entries: dict[int, tuple[Any, ...]] = {}
    for _, footprints in found:
        if footprints.layer is not None:
            entries.update(_read(footprints.layer, folder, disk))
    return MarkedKeys.of(entries)


def write_file(name: str, entries: Mapping[int, Any], folder: str, disk: Disk) -> Layer:
    path = f"{folder}/{name}"
    make_folder(path.rpartition("/")[0], fsync=False, disk=disk)
    data = marshal.dumps(sorted(entries.items()), 2)
    put_file(path, data, fsync=False, disk=disk)
    return Layer(name, len(entries), 0, 1, 0, None, 0, zlib.crc32(data))


def _read(layer: Layer, folder: str, disk: Disk) -> dict[int, tuple[Any, ...]]:
    path = f"{folder}/{layer.file}"
    if not disk.exists(path):
        raise LogCorrupted(f"{path} is missing")
    with storage(path):
        data = disk.read(path)
    if zlib.crc32(data) != layer.crc:
        raise LogCorrupted(f"{path} is damaged")
    return dict(marshal.loads(data))
