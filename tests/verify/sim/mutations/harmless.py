"""Mistakes without effect, because another safeguard compensates for them. Each mistake names that
safeguard, and its runs pass with the mistake planted: they fail when the safeguard is removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

import holdfast.node.executor
import holdfast.streams.serving
import holdfast.verify.sim.simulated_process
from holdfast.core import progress, progress_events
from holdfast.core.catch_up_events import Held
from holdfast.core.consistency import Consistency
from holdfast.core.eventual_checkpoint import EventualCheckpoint
from holdfast.core.replica_selector import ReplicaSelector
from holdfast.core.subscription import Connect, Subscription
from holdfast.node.executor import Performer
from holdfast.node.state_transfer import Staging
from holdfast.storage import Log, State
from holdfast.streams.serving import Service
from holdfast.streams.soutput import SOutput
from holdfast.types import OutputState
from tests.verify.sim.mutations.planting import Patch
from tests.verify.sim.mutations.scenes import SCENES


@dataclass(frozen=True)
class Harmless:
    name: str
    why: str
    scenes: tuple[str, ...]
    plant: Patch

    @property
    def is_long(self) -> bool:
        return any(SCENES[name].is_long for name in self.scenes)

    def seen_by(self, patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
        """The checkers that report the mistake, by scene."""
        failures = {name: SCENES[name].run(patch).failed for name in self.scenes}
        return {name: [v.checker for v in failed] for name, failed in failures.items() if failed}


HARMLESS: list[Harmless] = []


def harmless(name: str, why: str, *scenes: str) -> Callable[[Patch], Patch]:
    def add(plant: Patch) -> Patch:
        HARMLESS.append(Harmless(name, why, scenes, plant))
        return plant

    return add


@harmless(
    "publish results while the state is rebuilt",
    "The rebuilt buckets were logged before: a bucket up to the boundary is compared, never "
    "published again.",
    "undoing",
    "undoing_kept",
    "undoing_reader",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SOutput.stable

    def soon(self: SOutput, run: progress_events.Run, path: Any, results: Any) -> None:
        original(self, replace(run, rebuild_from=None), path, results)

    patch.setattr(SOutput, "stable", soon)


@harmless(
    "stay in a correction that cannot continue",
    "A correction begins when all inputs of the tentative buckets are complete, so it always "
    "completes; meanwhile the path answers according to its policy.",
    "interrupted",
    "row",
    "late_coarse",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._change

    def stays(self: progress.Progress, path: Any, state: OutputState) -> Any:
        before = path.consistency.state
        if before is OutputState.STABILIZATION and state is OutputState.UP_FAILURE:
            return []
        return original(self, path, state)

    patch.setattr(progress.Progress, "_change", stays)


@harmless(
    "log buckets of a tentative line that is over",
    "A tentative line is over when the stable line has overtaken it, and no tentative bucket is "
    "logged up to a boundary.",
    "failure",
    "correction",
    "undoing",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SOutput.tentative

    def any_line(self: SOutput, run: Any, results: Any) -> None:
        lines = self.lines
        self.lines = {**lines, run.path: run.line}
        try:
            original(self, run, results)
        finally:
            self.lines = lines

    patch.setattr(SOutput, "tentative", any_line)


@harmless(
    "log tentative buckets that the stable line has overtaken",
    "Then the tentative line is over, and no bucket of such a line is logged.",
    "failure",
    "correction",
    "undoing",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SOutput.tentative

    def late(self: SOutput, run: Any, results: Any) -> None:
        info = self.log.info

        def earlier(stream: str) -> Any:
            current = info(stream)
            return replace(current, complete_upto=min(current.complete_upto, run.lo - 1))

        self.log.info = earlier  # type: ignore[method-assign]
        try:
            original(self, run, results)
        finally:
            del self.log.info

    patch.setattr(SOutput, "tentative", late)


@harmless(
    "read tentative rows from the correcting replica, too",
    "A consumer takes a tentative bucket once, from any replica (`tentative_upto`).",
    "correction",
    "failure_cut",
    "row_replicas",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._connect

    def greedy(self: Subscription, at: int, replica: str, *, correcting: bool) -> Any:
        (connect,) = original(self, at, replica, correcting=correcting)
        assert isinstance(connect, Connect)
        after = self.tentative_upto if self.tentative else None
        return [replace(connect, tentative_after=after)]

    patch.setattr(Subscription, "_connect", greedy)


@harmless(
    "read no corrections beside the tentative stream",
    "A replica that has corrected its results is STABLE and is therefore read: corrections "
    "arrive later by the duration of one correction.",
    "correction",
    "correction_struck",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaSelector, "_corrector", lambda self, main: None)


@harmless(
    "report a replica as stable that was just started",
    "A stable replica that lags is ranked below any replica that does not (`too_far`).",
    "replica_down",
    "restarts_cut_off",
    "wipes",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Consistency.__init__

    def stable(self: Consistency, *args: Any) -> None:
        original(self, *args)
        self.state = OutputState.STABLE

    patch.setattr(Consistency, "__init__", stable)
    patch.setattr(holdfast.node.executor, "OutputState", _Stable)


@harmless(
    "end a failure without replacing the remaining tentative buckets",
    "Nothing is left: the boundary of the stable rows replaces all tentative buckets up to "
    "it, in the same append.",
    "failure",
    "undoing",
    "client_restarts",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._perform

    def careless(self: Performer, action: Any) -> None:
        if not isinstance(action, progress_events.Leave):
            original(self, action)

    patch.setattr(Performer, "_perform", careless)


@harmless(
    "release inputs that a new replica needs",
    "A replica that starts too late for its inputs starts again from newer state: this costs "
    "time but no rows.",
    "pairs_wipe",
    "pairs_released",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def unheld(self: Service, stream: str, consumer: str, epoch: int, at: int) -> Held:
        info = self.logs[stream].info(stream)
        return Held(info.starts_at, info.trimmed_upto)

    patch.setattr(Service, "hold", unheld)


@harmless(
    "accept pieces of a state without verification",
    "A replica verifies all files of its state before it starts from them. It refuses the damaged "
    "one and is rebuilt again: this costs time but no rows.",
    "damaged_piece",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "verify", lambda self, piece: None)


@harmless(
    "apply an old list of dead replicas",
    "A death refers to an epoch, and the position of a newer epoch is not changed.",
    "pairs_kill",
    "pairs_wipe",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.lost

    seen: dict[int, list[Any]] = {}

    def stale(self: Service, statuses: Any, at: int) -> None:
        views = seen.setdefault(id(self), [])
        views.append(statuses)
        original(self, views.pop(0) if len(views) > 6 else views[0], at)

    patch.setattr(Service, "lost", stale)


@harmless(
    "terminate when the disk of a producer is full",
    "A consumer that fails because of the full disk of its producer is restarted by its host.",
    "full_peer",
    "full",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.streams.serving, "answered", lambda act: act())
    patch.setattr(holdfast.verify.sim.simulated_process, "answered", lambda act: act())


@harmless(
    "append a record before its files are synced",
    "After a crash, the files of that record are incomplete, so the previous record is used: the "
    "previous one is dropped, its files are deleted, and inputs are released only after the sync.",
    "flushes_torn",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Log, path: str, bucket: int, body: dict[str, Any], files: list[str]) -> None:
        self.append(State(path, bucket, json.loads(json.dumps(body))))
        self.sync(files)

    patch.setattr(Log, "save_state", hasty)


@harmless(
    "end a replay and continue in the same step",
    "Every bucket is compared or logged by itself: only the costs of a recovery are wrong.",
    "replays",
    "flushes_overtake",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventualCheckpoint, "last", lambda self, position, hi: hi)


class _Stable:
    """Output states in which every path begins as STABLE."""

    STABILIZATION = OutputState.STABLE
    STABLE, UP_FAILURE = OutputState.STABLE, OutputState.UP_FAILURE
