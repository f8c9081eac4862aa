"""Checkpoints of a node: state versions that are durable in its log. State files are immutable and
were written by the steps, so a checkpoint flushes them and appends one record that names them."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.core import progress_events as core
from holdfast.core.eventual_checkpoint import EventualCheckpoint, Recovered, Settings
from holdfast.core.recovery_costs import RecoveryCosts
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError, LogError, StorageFull
from holdfast.model.fragments import Path
from holdfast.node.node_events import StepEngine
from holdfast.storage import Log

_log = logging.getLogger("holdfast.node")
#: A checkpoint that takes longer than this is reported.
SLOW_US = 10_000_000


class Checkpoints:
    def __init__(
        self,
        node: str,
        log: Log,
        engine: StepEngine,
        clock: Callable[[], int],
        settings: Settings | None = None,
    ) -> None:
        self._node, self._log, self._engine, self._clock = node, log, engine, clock
        #: Limits of eventual checkpoints; None: checkpoints are regular only.
        self._settings = settings
        #: By path, if checkpoints are eventual.
        self.eventual: dict[str, EventualCheckpoint] = {}
        #: Newest durable version of each path.
        self.newest: dict[str, Version] = {}
        #: Newer versions than that whose files are damaged, and why, when the node started.
        self.damaged: list[tuple[Version, str]] = []
        #: Versions that are being made durable, and since when.
        self.flushing: dict[str, Version] = {}
        self._since: dict[str, int] = {}
        #: By path, why the disk was full when the last checkpoint was tried.
        self._full: dict[str, str] = {}
        #: Durations of the last checkpoints.
        self.seconds: deque[float] = deque(maxlen=100)

    def recover(self, paths: Iterable[Path]) -> dict[str, Version]:
        """By path, the newest durable version whose files are usable, if there is one."""
        found = {path.name: self._recover(path) for path in paths}
        self.add_other_paths()
        return {name: version for name, version in found.items() if version is not None}

    def _recover(self, path: Path) -> Version | None:
        began_us = self._clock()
        found = self._find(path)
        version, costs = found or (None, RecoveryCosts())
        if self._settings is not None:
            recovered, upto = None, self._logged_upto(path)
            if upto is not None:
                entries = 0 if version is None else version.entries()
                load_us = self._clock() - began_us
                recovered = Recovered(upto, entries, load_us, self._log.opening_us, costs)
            self.eventual[path.name] = EventualCheckpoint(self._settings, recovered)
        return version

    def add_other_paths(self) -> None:
        """Paths are read one after the other, and none continues before all were read: the time of
        the others is a fixed cost of each."""
        loading = [control.recovery for control in self.eventual.values() if control.recovery]
        all_us = sum(recovery.load_us for recovery in loading)
        for recovery in loading:
            recovery.opening_us += all_us - recovery.load_us

    def _logged_upto(self, path: Path) -> int | None:
        """The last bucket of which all results are logged; None: there is none."""
        infos = [self._log.info(output) for output in path.outputs if self._log.has(output)]
        if len(infos) < len(path.outputs) or any(i.complete_upto < i.starts_at for i in infos):
            return None
        return min(info.complete_upto for info in infos)

    def _find(self, path: Path) -> tuple[Version, RecoveryCosts] | None:
        plan = self._engine.plan_hash(path)
        records = self._log.states(path.name)
        for bucket, body in reversed(records):
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
                self.damaged.append((version, str(err)))
                instead = "an older one is tried" if bucket != records[0][0] else (
                    "there is no older one, so that all buckets are computed again, if no input "
                    "was deleted"
                )  # fmt: skip
                _log.warning("node %s: the checkpoint at bucket %s is unusable; %s: %s; check the "
                             "disk", self._node, bucket, instead, err)  # fmt: skip
                continue
            self.newest[path.name] = version
            return version, RecoveryCosts.of(body.get("costs", ()))
        return None

    def began(self, version: Version) -> Version:
        """A version is being made durable."""
        self.flushing[version.path], self._since[version.path] = version, self._clock()
        return version

    def wait_for_space(self, path: str, err: StorageFull) -> None:
        """A checkpoint did not fit the disk, and is tried again."""
        if path not in self._full:
            _log.warning("node %s: a checkpoint of path %s waits for disk space: %s",
                         self._node, path, err)  # fmt: skip
        self._full[path] = str(err)

    def written(self, path: str, seconds: float) -> None:
        """A checkpoint is durable."""
        self._full.pop(path, None)
        self.seconds.append(seconds)

    def recovery_ms(self) -> dict[str, int]:
        """By path with eventual checkpoints: the predicted time of a recovery."""
        predicted = {
            name: control.status["recovery_ms_predicted"]
            for name, control in list(self.eventual.items())
        }
        return {name: ms for name, ms in predicted.items() if ms is not None}

    @property
    def trouble(self) -> str | None:
        """Why checkpoints of a path are late; the path goes on without them."""
        now = self._clock()
        for path, why in list(self._full.items()):
            return f"a checkpoint of path {path!r} waits for disk space: {why}"
        for path in list(self.flushing):
            if (took_us := now - self._since.get(path, now)) > SLOW_US:
                return (
                    f"the checkpoint of path {path!r} has been written for "
                    f"{took_us // 1_000_000} s: the disk is slow or does not respond"
                )
        return None

    def write(self, version: Version, costs: tuple[float, ...] = ()) -> int:
        """Make a version durable, and drop the older ones of its path. Returns the number of
        entries that became durable. Raises `StorageFull`."""
        before = self.newest.get(version.path)
        durable = set() if before is None else set(before.files())
        new = {name: count for name, count in version.sizes().items() if name not in durable}
        body = {**version.body(), **({"costs": costs} if costs else {})}
        files = [os.path.join("state", name) for name in new]
        self._log.save_state(version.path, version.bucket, body, files)
        self.newest[version.path] = version
        self._log.drop_states(version.path, version.bucket)
        return sum(new.values())

    def clean_up(self) -> None:
        """Delete files left by a killed process. Those of a damaged checkpoint stay until the first
        step: an operator may restore the damaged file."""
        self._engine.recovered([*self.newest.values(), *(version for version, _ in self.damaged)])

    def explained(self, path: str, why: str) -> str:
        """Why a path cannot start, with the damage of its newest checkpoint."""
        damage = [err for version, err in self.damaged if version.path == path]
        return f"{why}; {damage[0]}" if damage else why

    def report(self, recovery: core.RecoveryDone) -> None:
        """Warn if a recovery took longer than stated."""
        if recovery.stated_us is not None and recovery.took_us > recovery.stated_us:
            rest_us = recovery.took_us - recovery.load_us - recovery.replay_us
            _log.warning(
                "node %s: path %s recovered in %.1f s, stated are %.1f s: reading the state took "
                "%.1f s, replaying %.1f s, the rest %.1f s; checkpoints shorten only the replay",
                self._node, recovery.path, recovery.took_us / 1e6, recovery.stated_us / 1e6,
                recovery.load_us / 1e6, recovery.replay_us / 1e6, rest_us / 1e6,
            )  # fmt: skip
