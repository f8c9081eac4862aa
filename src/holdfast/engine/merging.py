"""Merges of large layers of keyed state, beside the steps.

A Spark job of its own merges layers of a shard into a new file while steps go on and add layers on
top of them. A later step then uses the merged layer instead of the others. So no result waits for a
merge, however many keys there are.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.engine.determinism import brief
from holdfast.engine.layers import LayerName, merge_layers, to_merge
from holdfast.engine.state import Layer, Shard
from holdfast.engine.user_errors import raised_in
from holdfast.errors import LogCorrupted

if TYPE_CHECKING:
    from holdfast.engine.session import Sessions

_log = logging.getLogger("holdfast.engine")

#: An operator and the number of a shard.
Key = tuple[str, int]
#: Most steps until a failed merge is tried again.
_PAUSE_MAX = 4_096


@dataclass(slots=True)
class _Merge:
    """Layers that become one."""

    layers: tuple[Layer, ...]
    folder: str
    is_complete: bool = False
    #: None if no entries are left.
    result: Layer | None = None

    def place(self, layers: Sequence[Layer]) -> int | None:
        """Where `layers` contain the layers that are merged."""
        count = len(self.layers)
        for first in range(len(layers) - count + 1):
            if tuple(layers[first : first + count]) == self.layers:
                return first
        return None


class Merging:
    """The merges of an engine, of which one at a time is running. Steps of the stable lines start
    and use them."""

    def __init__(self, sessions: Sessions, root: str) -> None:
        #: A step merges up to so many entries.
        self.step_max = 1 << 18
        #: The thread of the last merge.
        self.thread: threading.Thread | None = None
        self._sessions, self._root = sessions, root
        self._lock = threading.Lock()
        #: Merges that are running, or that no step has used yet.
        self._merges: dict[Key, _Merge] = {}
        #: Steps until a merge that failed is tried again, and the pause after another failure.
        self._pauses: dict[Key, tuple[int, int]] = {}
        #: What is wrong with files that a merge has read.
        self._damage: dict[Key, str] = {}

    @property
    def is_running(self) -> bool:
        with self._lock:
            return any(not merge.is_complete for merge in self._merges.values())

    def begin(self, op: str, number: int, shard: Shard) -> tuple[Shard, int]:
        """A step begins with this shard. Returns the shard with the result of a complete merge; and
        how many of the oldest layers the step must not merge, because that is under way. Raises
        LogCorrupted if a merge has found damage."""
        with self._lock:
            if (damage := self._damage.pop((op, number), None)) is not None:
                raise LogCorrupted(damage)
            merge = self._merges.get((op, number))
            first = None if merge is None else merge.place(shard.layers)
            if merge is None or first is None:
                return shard, 0
            end = first + len(merge.layers)
            if not merge.is_complete:
                return shard, end
            new = () if merge.result is None else (merge.result,)
            return replace(shard, layers=(*shard.layers[:first], *new, *shard.layers[end:])), 0

    def end(self, op: str, number: int, shard: Shard) -> list[str]:
        """A step has ended with this shard. Returns the files that belong to its line from now
        on."""
        with self._lock:
            merge = self._merges.get((op, number))
            if merge is None or not merge.is_complete or merge.place(shard.layers) is not None:
                return []  # the step may have begun before the merge was complete
            del self._merges[op, number]
        if merge.result in shard.layers:
            return [] if merge.result is None else [merge.result.file]
        # The step has merged the result with others, or the state was replaced meanwhile.
        self._delete(merge)
        return []

    def start(
        self, op: str, shards: Mapping[int, Shard], schema: pa.Schema, timer: str | None,
        folder: str, step_max: int, whole: bool | None = None,
    ) -> None:  # fmt: skip
        """Start a merge if one is due, of the shard with the most layers. The new file will be in a
        folder in `folder`. `step_max`: merges of up to so many entries are left to the steps.
        `whole`: as for `to_merge`."""
        for number in sorted(shards, key=lambda number: -len(shards[number].layers)):
            layers = shards[number].layers
            due = to_merge(
                [layer.level for layer in layers], [layer.entries for layer in layers],
                fixed=0, most=math.inf, whole=whole, rows=shards[number].rows,
            )  # fmt: skip
            if due is None:
                continue
            chosen = layers[slice(*due)]
            if sum(layer.entries for layer in chosen) > step_max:
                merge = _Merge(chosen, f"{folder}/{op}.merged.{uuid.uuid4().hex[:8]}")
                run = partial(
                    merge_layers, chosen, None, schema, timer,
                    LayerName(self._root, merge.folder, f"shard-{number}"), oldest=due[0] == 0,
                )  # fmt: skip
                self._start((op, number), merge, run)

    def _start(self, key: Key, merge: _Merge, run: partial[Layer | None]) -> None:
        with self._lock:
            left, pause = self._pauses.get(key, (0, 1))
            if left:
                self._pauses[key] = (left - 1, pause)
                return
            running = any(not other.is_complete for other in self._merges.values())
            if running or key in self._merges:
                return
            self._merges[key] = merge
        self.thread = threading.Thread(target=self._run, args=(key, merge, run), daemon=True)
        self.thread.start()

    def _run(self, key: Key, merge: _Merge, run: partial[Layer | None]) -> None:
        context = self._sessions.small.sparkContext
        try:
            context.setLocalProperty("spark.scheduler.pool", f"{self._root} merge")
            (result,) = context.parallelize([run], 1).map(lambda work: work()).collect()
        except Exception as err:
            self._delete(merge)
            text = raised_in(str(err)) or brief(err)
            with self._lock:
                del self._merges[key]
                _, pause = self._pauses.get(key, (0, 1))
                self._pauses[key] = (pause, min(2 * pause, _PAUSE_MAX))
                if f"holdfast.errors.{LogCorrupted.__name__}" in str(err):
                    self._damage[key] = text
            if context._jsc is not None:  # else Spark was stopped
                _log.warning("a merge of state of %s failed and will be tried again: %s",
                             key[0], text)  # fmt: skip
            return
        with self._lock:
            merge.result, merge.is_complete = result, True
            self._pauses.pop(key, None)

    def _delete(self, merge: _Merge) -> None:
        shutil.rmtree(os.path.join(self._root, merge.folder), ignore_errors=True)
