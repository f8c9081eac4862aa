"""Checkpoints of a node: state versions that are durable in its log. State files are immutable and
were written by the steps, so a checkpoint flushes them and appends one record that names them."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable

from holdfast.engine.state import Version
from holdfast.errors import HoldfastError, LogError
from holdfast.model.fragments import Path
from holdfast.node.node_events import StepEngine
from holdfast.storage import Log

_log = logging.getLogger("holdfast.node")


class Checkpoints:
    def __init__(self, node: str, log: Log, engine: StepEngine, clock: Callable[[], int]) -> None:
        self._node, self._log, self._engine, self._clock = node, log, engine, clock
        #: Newest durable version of each path.
        self.newest: dict[str, Version] = {}
        #: Durations of the last checkpoints.
        self.seconds: deque[float] = deque(maxlen=100)

    def recover(self, path: Path) -> Version | None:
        """The newest durable version of a path whose files are usable."""
        plan = self._engine.plan_hash(path)
        for bucket, body in reversed(self._log.states(path.name)):
            if "footprints" in body:
                raise HoldfastError(
                    f"node {self._node!r}: its storage was written with recovery='cec' (path "
                    f"{path.name!r}); use recovery='cec' again, or another storage (storage=, "
                    "--storage)"
                )
            version = Version.of(path.name, bucket, body)
            if version.plan != plan:
                raise HoldfastError(
                    f"node {self._node!r}: its storage holds the state of another query (path "
                    f"{path.name!r}); use another storage (storage=, --storage), or, with "
                    f"recovery='replay', delete {self._log.root}: the node is then rebuilt"
                )
            try:
                self._engine.check(version)
            except LogError as err:
                _log.warning("node %s: the checkpoint at bucket %s is unusable, trying an older "
                             "one: %s; check the disk", self._node, bucket, err)  # fmt: skip
                continue
            self.newest[path.name] = version
            return version
        return None

    def write(self, version: Version) -> None:
        """Make a version durable, and drop the older ones of its path. Raises `StorageFull`."""
        began_us = self._clock()
        before = self.newest.get(version.path)
        durable = set() if before is None else set(before.files())
        files = [os.path.join("state", name) for name in version.files() if name not in durable]
        self._log.save_state(version.path, version.bucket, version.body(), files)
        self._log.drop_states(version.path, version.bucket)
        self.newest[version.path] = version
        self.seconds.append((self._clock() - began_us) / 1e6)
