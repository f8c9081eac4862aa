"""Merges of large layers of keyed state, beside the steps.

A Spark job of its own merges layers of a shard into a new file while steps go on and add layers on
top of them. A later step then uses the merged layer instead of the others. So no result waits for a
merge, however many keys there are.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from holdfast.engine.layers import merged, read_all, to_merge, write_layer
from holdfast.engine.session import Sessions
from holdfast.engine.state import Layer, Shard

_log = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class Merge:
    """Layers that become one."""

    root: str
    #: The folder in `root` for the new file.
    folder: str
    layers: tuple[Layer, ...]
    #: There are no older layers.
    oldest: bool
    schema: pa.Schema
    timer: str | None

    def run(self) -> Layer | None:
        """None if no entries are left."""
        stack = [read_all(self.root, layer, self.schema) for layer in self.layers]
        entries = merged(stack, oldest=self.oldest)
        if not len(entries):
            return None
        level = 0 if self.oldest else self.layers[0].level + 1
        folder = os.path.join(self.root, self.folder)
        layer = write_layer(entries, self.timer, level, folder, "merged")
        return replace(layer, file=f"{self.folder}/{layer.file}")

    def place(self, layers: Sequence[Layer]) -> int | None:
        """Where `layers` contain the layers that are merged."""
        count = len(self.layers)
        for first in range(len(layers) - count + 1):
            if tuple(layers[first : first + count]) == self.layers:
                return first
        return None


class Merging:
    """The merges of an engine, one at a time. Steps of the stable lines start and use them."""

    def __init__(self, sessions: Sessions, root: str) -> None:
        #: Merges of up to so many entries are left to the steps.
        self.step_max = 1 << 18
        #: The thread of the last merge.
        self.thread: threading.Thread | None = None
        self._sessions, self._root = sessions, root
        self._lock = threading.Lock()
        #: The operator and the number of the shard, and the merge, until a step has used it.
        self._current: tuple[str, int, Merge] | None = None
        self._complete = False
        self._result: Layer | None = None
        #: Layers whose merge failed; the attempt is not repeated.
        self._failed: set[tuple[Layer, ...]] = set()

    def begin(self, op: str, number: int, shard: Shard) -> tuple[Shard, int]:
        """A step begins with this shard. Returns the shard with the result of a complete merge; and
        how many of the oldest layers the step must not merge, because that is under way."""
        with self._lock:
            merge = self._merge_of(op, number)
            first = None if merge is None else merge.place(shard.layers)
            if merge is None or first is None:
                return shard, 0
            end = first + len(merge.layers)
            if not self._complete:
                return shard, end
            new = () if self._result is None else (self._result,)
            return replace(shard, layers=(*shard.layers[:first], *new, *shard.layers[end:])), 0

    def end(self, op: str, number: int, shard: Shard) -> str | None:
        """A step has ended with this shard. Returns a file that belongs to the shard from now
        on."""
        with self._lock:
            merge = self._merge_of(op, number)
            if merge is None or not self._complete or merge.place(shard.layers) is not None:
                return None  # the step may have begun before the merge was complete
            result, self._current = self._result, None
        if result is not None and result not in shard.layers:  # the state was replaced meanwhile
            with suppress(OSError):
                os.unlink(os.path.join(self._root, result.file))
            return None
        return None if result is None else result.file

    def _merge_of(self, op: str, number: int) -> Merge | None:
        if self._current is None or self._current[:2] != (op, number):
            return None
        return self._current[2]

    def start(
        self, op: str, number: int, shard: Shard, schema: pa.Schema, timer: str | None, folder: str
    ) -> None:
        """Start a merge if one is due. The new file will be in a folder in `folder`."""
        due = to_merge(
            [layer.level for layer in shard.layers], [layer.entries for layer in shard.layers],
            fixed=0, most=math.inf,
        )  # fmt: skip
        if due is None:
            return
        first, end = due
        if sum(layer.entries for layer in shard.layers[first:end]) <= self.step_max:
            return
        name = f"{folder}/{op}.merged.{uuid.uuid4().hex[:8]}"
        merge = Merge(self._root, name, shard.layers[first:end], first == 0, schema, timer)
        with self._lock:
            if self._current is not None or merge.layers in self._failed:
                return
            self._current, self._complete = (op, number, merge), False
        self.thread = threading.Thread(target=self._run, args=(merge,), name="merge", daemon=True)
        self.thread.start()

    def _run(self, merge: Merge) -> None:
        context = self._sessions.small.sparkContext
        try:
            context.setLocalProperty("spark.scheduler.pool", f"{self._root} merge")
            (result,) = context.parallelize([merge], 1).map(Merge.run).collect()
        except Exception as err:
            _log.warning("state below %s is not merged, steps continue without: %s",
                         os.path.join(self._root, merge.folder), err)  # fmt: skip
            with self._lock:
                self._failed.add(merge.layers)
                self._current = None
            return
        with self._lock:
            self._result, self._complete = result, True
