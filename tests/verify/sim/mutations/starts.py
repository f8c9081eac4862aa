"""Mistakes in the start of nodes, in hosts that start nodes, in promises and in budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.node.executor
import holdfast.node.plans
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
    "forget up to where the inputs of a checkpoint were complete",
    "available",
    "standing",
    scene="restarts_cut_off",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def resume(self: SUnion, bucket: int) -> None:
        self._resumed_at = bucket

    patch.setattr(SUnion, "resume", resume)


@mutation("treat an old boundary of an input as a step back", "alive", scene="wipe_and_restart")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.resume

    def resume(self: SUnion, bucket: int) -> None:
        original(self, bucket)
        self._resumed_at = None

    patch.setattr(SUnion, "resume", resume)


@mutation(
    "continue from an older copy although the inputs after it were deleted", "alive", "wrong",
    seed=3172,
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._opened

    def opened(self: progress.Progress, event: Any) -> Any:
        return original(self, replace(event, trimmed_upto=event.starts_at - 1))

    patch.setattr(progress.Progress, "_opened", opened)


@mutation(
    "suspend a path that was just started", "available", "standing", scene="restarts_suspending"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SUnion, "missing_since_start", False)


# -- hosts ----------------------------------------------------------------------------------------


@mutation("start a damaged node with its old storage", "alive", "lost", "paired", scene="rots")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine._failed

    def keeping(self: Quarantine, event: Any) -> None:
        original(self, event)
        self._rebuild = False

    patch.setattr(Quarantine, "_failed", keeping)


@mutation(
    "double the restart pause without a limit",
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


@mutation("do not stop a failed node", "alive", "lost", "paired", scene="hosts_pause")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Host._failed

    def slack(self: Host, event: Any) -> Any:
        return [a for a in original(self, event) if not isinstance(a, hosts.StopNode)]

    patch.setattr(Host, "_failed", slack)


@mutation("ignore that a node has stopped", "alive", "lost", "paired", scene="eio")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Host.handle

    def forgetful(self: Host, event: Any) -> Any:
        return [] if isinstance(event, hosts.NodeStopped) else original(self, event)

    patch.setattr(Host, "handle", forgetful)


@mutation("ignore that a node was declared dead", "alive", "paired", scene="pairs_hang")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Host._assigned

    def deaf(self: Host, event: Any) -> Any:
        return original(self, replace(event, dead=()))

    patch.setattr(Host, "_assigned", deaf)


@mutation("wipe the storage at every failure", "lost", "alive", "wrong", scene="eio_single")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine._failed

    def thorough(self: Quarantine, event: Any) -> None:
        original(self, event)
        self._rebuild = True

    patch.setattr(Quarantine, "_failed", thorough)


@mutation("treat every error as one that needs an operator", "alive", "lost", scene="eio")
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
    "postpone a correction for a stuck replica",
    "promises",
    "delay",
    "lost",
    scene="correction_stuck",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(correction_leases, "STALLED_US", 2**50)


@mutation(
    "let no other replica correct first",
    "promises",
    "delay",
    "lost",
    "standing",
    "bounded",
    scene="failure",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Promises.asked

    def selfish(self: Promises, question: Any, *at: int, able: bool, wants: bool) -> Any:
        answer = original(self, question, *at, able=able, wants=wants)
        return "refused" if self.correction is not None or wants else answer

    patch.setattr(Promises, "asked", selfish)


@mutation(
    "keep a promise that the peer no longer needs",
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


@mutation("give every fragment the full budget again", "standing", "available", scene="budget")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.boundary

    def unspent(self: SUnion, stream: str, upto: int, at: int = 0, **options: Any) -> None:
        original(self, stream, upto, at, **{**options, "spent_us": 0})

    patch.setattr(SUnion, "boundary", unspent)


@mutation("hold buckets for twice max_delay", "standing", "available", scene="delaying")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.__init__

    def patient(self: SUnion, inputs: Any, patience_us: int | None, own_us: int) -> None:
        original(self, inputs, patience_us and 2 * patience_us, 2 * own_us)

    patch.setattr(SUnion, "__init__", patient)


@mutation("count a missing input as available", "labelled", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.missing

    def generous(self: SUnion, lo: int, hi: int) -> Any:
        names, partial = original(self, lo, hi)
        return names, partial._replace(inputs=1.0)

    patch.setattr(SUnion, "missing", generous)


@mutation("do not report inputs that are missing upstream", "labelled", scene="row")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.tentative

    def discreet(self: SUnion, stream: str, upto: int, at: int, missing: Any, *rest: Any) -> None:
        original(self, stream, upto, at, (), *rest)

    patch.setattr(SUnion, "tentative", discreet)


@mutation("ignore inputs that windows miss in earlier buckets", "labelled", scene="both_lines")
def _(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Consistency, lo: int, hi: int) -> Any:
        return self.sunion.missing(lo, hi)

    patch.setattr(Consistency, "_label", forgetful)


@mutation("release inputs that only a tentative line refers to", "labelled", scene="both_lines")
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.node.executor.Performer._unreferenced

    def hasty(self: holdfast.node.executor.Performer, stream: str) -> int:
        tentative, self._tentative = self._tentative, {}
        read, self._read = self._read, {}
        try:
            return original(self, stream)
        finally:
            self._tentative, self._read = tentative, read

    patch.setattr(holdfast.node.executor.Performer, "_unreferenced", hasty)


@mutation("treat a partial input as complete", "labelled", scene="row")
def _(patch: pytest.MonkeyPatch) -> None:
    original = SUnion.tentative

    def generous(self: SUnion, stream: str, upto: int, at: int, missing: Any, *rest: Any) -> None:
        original(self, stream, upto, at, missing, sunion.WHOLE)

    patch.setattr(SUnion, "tentative", generous)


# -- paths ----------------------------------------------------------------------------------------


@mutation("behave in a failure as in a correction", "available", "standing", scene="suspending")
def _(patch: pytest.MonkeyPatch) -> None:
    def mode(self: Consistency, at: int) -> Any:
        healing = self.policy.while_correcting
        return None if healing == "suspend" else healing

    patch.setattr(Consistency, "mode", mode)


@mutation("block although the policy is to continue", "available", "standing", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = policy_of

    def blocking(*args: Any) -> Policy:
        return replace(original(*args), on_failure="block")

    patch.setattr(holdfast.node.plans, "policy_of", blocking)


@mutation(
    "restart the tentative line at every step",
    "held",
    "standing",
    "available",
    scene="late_coarse",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consistency, "worth_restarting", lambda self, stable: (
        self.position is not None and self.state is OutputState.UP_FAILURE and not self.forgotten
    ))  # fmt: skip
