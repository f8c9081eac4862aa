"""Mistakes in the selection of replicas (Borealis DPC)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.streams.serving
from holdfast.core import progress, progress_events
from holdfast.core.correction_leases import Promises
from holdfast.core.replica_selector import NOTHING, ReplicaSelector
from holdfast.core.subscription import Poll, Subscription
from holdfast.node.executor import Performer
from holdfast.types import OutputState
from holdfast.verify.scenario import Fault
from tests.verify.sim.mutations.planting import S, mutation


@mutation("take a tentative bucket from every replica", "order", scene="suspending")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._taken

    def forgetful(self: Subscription, event: Any) -> Any:
        return original(self, replace(event, tentative_upto=None))

    patch.setattr(Subscription, "_taken", forgetful)


@mutation("never leave a replica that still answers", "available", "delay", scene="cut_off_replica")
@mutation(
    "stay with a tentative replica although another is stable", "detected",
    faults=(Fault(3 * S, "cut", "s2<->main@2", 8 * S),),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._best

    def faithful(self: ReplicaSelector, *args: Any) -> str | None:
        current = self.choice.main
        return current if current in self._known else original(self, *args)

    patch.setattr(ReplicaSelector, "_best", faithful)


@mutation("stay with a replica that lags", "available", "delay", scene="cut_off_replica")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaSelector, "_furthest", lambda self, *which: NOTHING)


@mutation("acknowledge only to the replica that is read", "bounded", scene="failure")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._polls

    def one(self: Subscription, at: int) -> Any:
        main = self._connections.get(False)
        return [
            replace(action, position=None)
            if isinstance(action, Poll)
            and self.many
            and (main is None or main.replica != action.replica)
            else action
            for action in original(self, at)
        ]

    patch.setattr(Subscription, "_polls", one)


@mutation(
    "rebuild the state without the earlier inputs",
    "wrong",
    "alive",
    "converge",
    "lost",
    scene="undoing",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._next_stable

    def short(self: progress.Progress, path: Any, at: int) -> Any:
        actions = original(self, path, at)
        return [
            replace(a, lo=a.rebuild_from)
            if isinstance(a, progress_events.Run) and a.rebuild_from is not None
            else a
            for a in actions
        ]

    patch.setattr(progress.Progress, "_next_stable", short)


@mutation(
    "release the inputs that rebuild the state", "wrong", "alive", "converge", scene="undoing"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress_events.PathPlan, "needs_from", lambda self, bucket, referred: referred)


@mutation("do not report empty tentative buckets", "available", scene="undoing")
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.streams.serving._tentative

    def quiet(*args: Any) -> Any:
        segments, upto, *rest = original(*args)
        return segments, upto if segments else None, *rest

    patch.setattr(holdfast.streams.serving, "_tentative", quiet)


@mutation("never report the status of an output", "available", "delay", scene="behind")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._perform

    def discreet(self: Performer, action: Any) -> None:
        if not isinstance(action, progress_events.Change):
            original(self, action)

    patch.setattr(Performer, "_perform", discreet)


@mutation("correct all replicas at once", "available", scene="failure_cut")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promises, "asked", lambda self, *which, **how: "answering")
    patch.setattr(Promises, "waits_for", lambda self, at: None)


@mutation("prefer a tentative replica", "available", "delay", "lost", scene="behind")
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._rank

    def odd(self: ReplicaSelector, candidate: Any, now: int) -> int:
        return (1, 0, 2, 3)[original(self, candidate, now)]

    patch.setattr(ReplicaSelector, "_rank", odd)


@mutation(
    "prefer a stable replica that lags", "available", "delay",
    faults=(
        Fault(3 * S, "cut", "main<->s1,s2", 12 * S),
        Fault(3 * S, "silent", "s2", 12 * S),
    ),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._rank

    def gullible(self: ReplicaSelector, candidate: Any, now: int) -> int:
        return 0 if candidate.status.state is OutputState.STABLE else original(self, candidate, now)

    patch.setattr(ReplicaSelector, "_rank", gullible)


@mutation(
    "compare the epochs of different replicas", "available", "lost", "delay",
    faults=(
        Fault(2 * S, "kill", "main", S // 2),
        Fault(4 * S, "kill", "main", S // 2),
        Fault(6 * S, "kill", "main@2", S // 2),
        Fault(8 * S, "kill", "main", 9 * S),
    ),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._refuses

    def mixed(self: Subscription, event: Any, replica: str) -> str | None:
        newest = max(self.epochs.values(), default=0)
        return "an old epoch" if event.epoch < newest else original(self, event, replica)

    patch.setattr(Subscription, "_refuses", mixed)


@mutation("do not wake up when max_delay is over", "available", scene="delaying")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_wake", lambda self, path, at: [])


@mutation(
    "rely on a promise forever",
    "standing",
    "promises",
    "available",
    "delay",
    scene="correction_struck",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promises, "covered", lambda self, at: bool(self._leases))
    original = Promises.answered

    def loyal(self: Promises, reply: Any, newest: int | None, mine: int | None) -> None:
        if reply.answer != "away" or reply.peer not in self._leases:
            original(self, reply, newest, mine)

    patch.setattr(Promises, "answered", loyal)


@mutation("start a correction without a promise", "standing", "available", scene="correction")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_may_correct", lambda self, path, at: True)
    patch.setattr(Promises, "covered", lambda self, at: bool(self.peers))
