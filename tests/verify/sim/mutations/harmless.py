"""Mistakes that cost nobody anything, because something else makes them good. Each says what, and
its runs pass with the mistake in it: whoever removes the other safeguard is told here."""

from __future__ import annotations

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
from holdfast.core.replica_selector import ReplicaSelector
from holdfast.core.subscription import Connect, Subscription
from holdfast.node.executor import Performer
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
        """Who sees it, by scene."""
        found = {name: SCENES[name].run(patch).failed for name in self.scenes}
        return {name: [v.checker for v in failed] for name, failed in found.items() if failed}


HARMLESS: list[Harmless] = []


def harmless(name: str, why: str, *scenes: str) -> Callable[[Patch], Patch]:
    def add(plant: Patch) -> Patch:
        HARMLESS.append(Harmless(name, why, scenes, plant))
        return plant

    return add


@harmless(
    "give results while the state is rebuilt",
    "What is rebuilt was logged before: a bucket up to the boundary is compared, never "
    "given again.",
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
    "stay in a correction that cannot go on",
    "A correction begins when every guess is complete, so that it always comes to its end; "
    "and in it a path answers as its policy says.",
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
    "log guesses of a line that is over",
    "A line is over when the stable one has overtaken it with what it is about to give, "
    "and up to a boundary no guess is logged.",
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
    "log guesses that the stable line has overtaken",
    "Then the line is over, and of a line that is over nothing is logged.",
    "failure",
    "correction",
    "undoing",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = SOutput.tentative

    def late(self: SOutput, run: Any, results: Any) -> None:
        info = self.log.info

        def earlier(stream: str) -> Any:
            found = info(stream)
            return replace(found, complete_upto=min(found.complete_upto, run.lo - 1))

        self.log.info = earlier  # type: ignore[method-assign]
        try:
            original(self, run, results)
        finally:
            del self.log.info

    patch.setattr(SOutput, "tentative", late)


@harmless(
    "read tentative rows from the correcting replica, too",
    "A consumer takes a bucket as tentative once, whoever gives it (`tentative_upto`).",
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
    "read no corrections beside what is tentative",
    "A replica that has corrected itself is STABLE and is read for that: corrections come "
    "later by the length of one correction.",
    "correction",
    "correction_struck",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaSelector, "_corrector", lambda self, main: None)


@harmless(
    "call a replica stable that was just started",
    "A stable replica that is behind is ranked below any other that is not (`too_far`).",
    "replica_down",
    "restarts_cut_off",
    "wipes",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Consistency.__init__

    def stable(self: Consistency, *how: Any) -> None:
        original(self, *how)
        self.state = OutputState.STABLE

    patch.setattr(Consistency, "__init__", stable)
    patch.setattr(holdfast.node.executor, "OutputState", _Stable)


@harmless(
    "end a failure without replacing what is left",
    "Nothing is left: the boundary of the stable rows replaces all guesses up to it, in "
    "the same append.",
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
    "give away what a newcomer needs",
    "A copy that comes up too late for its inputs begins again, from newer state: it costs "
    "time and no rows.",
    "pairs_wipe",
    "pairs_released",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def unheld(self: Service, stream: str, reader: str, epoch: int, at: int) -> Held:
        info = self.logs[stream].info(stream)
        return Held(info.starts_at, info.trimmed_upto)

    patch.setattr(Service, "hold", unheld)


@harmless(
    "believe an old view of who is dead",
    "Who is dead is known by epoch, and a position of a newer epoch is not touched.",
    "pairs_kill",
    "pairs_wipe",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Service.lost

    seen: dict[int, list[Any]] = {}

    def stale(self: Service, standings: Any, at: int) -> None:
        views = seen.setdefault(id(self), [])
        views.append(standings)
        original(self, views.pop(0) if len(views) > 6 else views[0], at)

    patch.setattr(Service, "lost", stale)


@harmless(
    "give up when a peer's disk is full",
    "A reader that ends over the full disk of its peer is tried again by its host.",
    "full_peer",
    "full",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.streams.serving, "answered", lambda act: act())
    patch.setattr(holdfast.verify.sim.simulated_process, "answered", lambda act: act())


class _Stable:
    """States in which everything begins stable."""

    STABILIZATION = OutputState.STABLE
    STABLE, UP_FAILURE = OutputState.STABLE, OutputState.UP_FAILURE
