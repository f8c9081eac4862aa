"""Mistakes of nodes that start, of hosts that start them, and in promises and budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.node.executor
from holdfast.core import correction_leases, hosts, progress, progress_events, quarantine, sunion
from holdfast.core.consistency import Consistency
from holdfast.core.correction_leases import Promises
from holdfast.core.hosts import Host
from holdfast.core.policy import Policy, policy_of
from holdfast.core.quarantine import Quarantine
from holdfast.core.sunion import SUnion
from holdfast.types import OutputState
from tests.verify.sim.mutations.planting import mutation

# -- starting from a checkpoint -------------------------------------------------------------------


@mutation(
    "wait for every input although there is a checkpoint",
    "available",
    "standing",
    scene="restarts_cut_off",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._handle

    def waiting(self: progress.Progress, event: Any) -> Any:
        return [] if isinstance(event, progress_events.Began) else original(self, event)

    patch.setattr(progress.Progress, "_handle", waiting)


@mutation(
    "do not know how complete the inputs of a checkpoint were",
    "available",
    "standing",
    scene="restarts_cut_off",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def resume(self: SUnion, bucket: int) -> None:
        self._resumed_at = bucket

    patch.setattr(SUnion, "resume", resume)


@mutation("take old news of an input for a step back", "alive", scene="wipe_and_restart")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.resume

    def resume(self: SUnion, bucket: int) -> None:
        original(self, bucket)
        self._resumed_at = None

    patch.setattr(SUnion, "resume", resume)


@mutation(
    "suspend a path that was just started", "available", "standing", scene="restarts_suspending"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SUnion, "lacks_since_start", False)


# -- hosts ----------------------------------------------------------------------------------------


@mutation("start a damaged node with the storage it has", "alive", "lost", "paired", scene="rots")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine._failed

    def keeping(self: Quarantine, event: Any) -> None:
        original(self, event)
        self._rebuild = False

    patch.setattr(Quarantine, "_failed", keeping)


@mutation(
    "double the pause without a limit",
    "available",
    "alive",
    "lost",
    "standing",
    "detected",
    scene="eio_long",
)
def _(patch: pytest.MonkeyPatch) -> None:
    endless: Any = {k: replace(p, most_us=2**50) for k, p in quarantine.POLICIES.items()}
    patch.setattr(quarantine, "POLICIES", endless)


@mutation("leave a node that failed where it is", "alive", "lost", "paired", scene="hosts_pause")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Host._failed

    def slack(self: Host, event: Any) -> Any:
        return [a for a in original(self, event) if not isinstance(a, hosts.StopNode)]

    patch.setattr(Host, "_failed", slack)


@mutation("believe that a node still stops when it has", "alive", "lost", "paired", scene="eio")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Host.handle

    def forgetful(self: Host, event: Any) -> Any:
        return [] if isinstance(event, hosts.NodeStopped) else original(self, event)

    patch.setattr(Host, "handle", forgetful)


@mutation("do not hear that a node was declared dead", "alive", "paired", scene="pairs_hang")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Host._assigned

    def deaf(self: Host, event: Any) -> Any:
        return original(self, replace(event, dead=()))

    patch.setattr(Host, "_assigned", deaf)


@mutation("wipe the storage with every failure", "lost", "alive", "wrong", scene="eio_single")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine._failed

    def thorough(self: Quarantine, event: Any) -> None:
        original(self, event)
        self._rebuild = True

    patch.setattr(Quarantine, "_failed", thorough)


@mutation("take every error for one that only a person can mend", "alive", "lost", scene="eio")
def _(patch: pytest.MonkeyPatch) -> None:
    import holdfast.verify.sim.host_process as carrier

    class Gloomy:
        kind_of = staticmethod(lambda err: "refused")
        reason_of = staticmethod(quarantine.reason_of)
        Quarantine, Failed, Tick = quarantine.Quarantine, quarantine.Failed, quarantine.Tick
        kind_of_exit = staticmethod(quarantine.kind_of_exit)

    patch.setattr(carrier, "q", Gloomy)


# -- promises -------------------------------------------------------------------------------------


@mutation(
    "put off a correction for one that is stuck",
    "promises",
    "delay",
    "lost",
    scene="correction_stuck",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(correction_leases, "STALLED_US", 2**50)


@mutation(
    "let nobody else go first", "promises", "delay", "lost", "standing", "bounded", scene="failure"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Promises.asked

    def selfish(self: Promises, question: Any, *at: int, able: bool, wants: bool) -> Any:
        answer = original(self, question, *at, able=able, wants=wants)
        return "refused" if self.correction is not None or wants else answer

    patch.setattr(Promises, "asked", selfish)


@mutation(
    "keep a promise that the peer does not need any more",
    "bounded",
    "promises",
    "delay",
    "standing",
    scene="suspending",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Promises.asked

    def loyal(self: Promises, question: Any, *at: int, able: bool, wants: bool) -> Any:
        if question.done:
            return "away"
        return original(self, question, *at, able=able, wants=wants)

    patch.setattr(Promises, "asked", loyal)
    patch.setattr(correction_leases, "PROMISE_US", 2**50)


# -- budgets and shares ---------------------------------------------------------------------------


@mutation("give every fragment the whole budget again", "standing", "available", scene="budget")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.boundary

    def unspent(self: SUnion, stream: str, upto: int, at: int = 0, **how: Any) -> None:
        original(self, stream, upto, at, **{**how, "spent_us": 0})

    patch.setattr(SUnion, "boundary", unspent)


@mutation("hold buckets for twice X", "standing", "available", scene="delaying")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.__init__

    def patient(self: SUnion, inputs: Any, patience_us: int | None, own_us: int) -> None:
        original(self, inputs, patience_us and 2 * patience_us, 2 * own_us)

    patch.setattr(SUnion, "__init__", patient)


@mutation("count an input that is missing as there", "labelled", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.missing

    def generous(self: SUnion, lo: int, hi: int) -> Any:
        names, partial = original(self, lo, hi)
        return names, partial._replace(inputs=1.0)

    patch.setattr(SUnion, "missing", generous)


@mutation("do not say what is missing further up", "labelled", scene="row")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.tentative

    def discreet(self: SUnion, stream: str, upto: int, at: int, lacked: Any, *how: Any) -> None:
        original(self, stream, upto, at, (), *how)

    patch.setattr(SUnion, "tentative", discreet)


@mutation("forget what the windows lack of earlier buckets", "labelled", scene="failure")
def _(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Consistency, lo: int, hi: int) -> Any:
        return self.sunion.missing(lo, hi)

    patch.setattr(Consistency, "_label", forgetful)


@mutation("let inputs go that only a tentative line refers to", "labelled", scene="both_lines")
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.node.executor.Performer._unreferenced

    def hasty(self: holdfast.node.executor.Performer, stream: str) -> int:
        guesses, self._tentative = self._tentative, {}
        read, self._read = self._read, {}
        try:
            return original(self, stream)
        finally:
            self._tentative, self._read = guesses, read

    patch.setattr(holdfast.node.executor.Performer, "_unreferenced", hasty)


@mutation("take a partial input for a whole one", "labelled", scene="row")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.tentative

    def generous(self: SUnion, stream: str, upto: int, at: int, lacked: Any, *how: Any) -> None:
        original(self, stream, upto, at, lacked, sunion.WHOLE)

    patch.setattr(SUnion, "tentative", generous)


# -- paths ----------------------------------------------------------------------------------------


@mutation("behave in a failure as in a correction", "available", "standing", scene="suspending")
def _(patch: pytest.MonkeyPatch) -> None:
    def mode(self: Consistency, at: int) -> Any:
        healing = self.policy.while_correcting
        return None if healing == "suspend" else healing

    patch.setattr(Consistency, "mode", mode)


@mutation("block where the policy says to go on", "available", "standing", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = policy_of

    def blocking(*how: Any) -> Policy:
        return replace(original(*how), on_failure="block")

    patch.setattr(holdfast.node.executor, "policy_of", blocking)


@mutation(
    "start the tentative line again with every step",
    "held",
    "standing",
    "available",
    scene="late_coarse",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consistency, "worth_restarting", lambda self, stable: (
        self.position is not None and self.state is OutputState.UP_FAILURE and not self.forgotten
    ))  # fmt: skip
