"""Mistakes in following streams: when to try again, whom to read, what to take."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core import replica_selector, subscription
from holdfast.core.replica_selector import Choice, ReplicaSelector
from holdfast.core.subscription import Subscription
from holdfast.core.wake_ups import Alarm
from tests.verify.sim.mutations.planting import mutation


@mutation("never connect again to the only producer", "lost", "delay", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._lost

    def resigned(self: Subscription, *which: Any) -> Any:
        actions = original(self, *which)
        self._retry_at = None
        return actions

    patch.setattr(Subscription, "_lost", resigned)


@mutation(
    "believe that a Tick is under way when it came", "lost", "delay", "detected", scene="silent"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Alarm.needs
    patch.setattr(Alarm, "rang", lambda self: None)
    patch.setattr(Alarm, "needs", lambda self, at, due: original(self, 0, due))


@mutation("treat a replica that completed the stream like one that has not", "standing", seed=10190)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replica_selector.Status, "ended", False)


@mutation(
    "wait for an answer that will not come",
    "available",
    "detected",
    "standing",
    scene="replica_down",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._answered

    def patient(self: Subscription, at: int, replica: str) -> Any:
        told = self._polling[replica].told
        polling = original(self, at, replica)
        polling.under_way = told is None and self.many and not self.selector.knows(replica)
        return polling

    patch.setattr(Subscription, "_answered", patient)


@mutation(
    "keep a replica in mind that is gone",
    "detected",
    scene="hosts_pause",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaSelector, "gone", lambda self, replica: None)


@mutation(
    "stay away for ever after the disk was full",
    "lost",
    "available",
    "detected",
    "delay",
    scene="full",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(subscription, "FULL_US", 2**50)


@mutation(
    "choose the replica that is furthest behind",
    "detected",
    "available",
    "standing",
    scene="replica_hangs",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._best

    def last(self: ReplicaSelector, now: int, wanted: int | None) -> str | None:
        if original(self, now, wanted) is None:
            return None
        return min(self._known.values(), key=lambda it: it.status.reached).replica

    patch.setattr(ReplicaSelector, "_best", last)


@mutation(
    "take a replica that was just started for stable",
    "available",
    "detected",
    "standing",
    scene="behind",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaSelector, "_rank", lambda self, known, now: 0)


@mutation(
    "tell a replica only once how far the consumer is", "bounded", "held", scene="replica_hangs"
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._handle

    def once(self: Subscription, event: Any) -> Any:
        if isinstance(event, subscription.Advanced) and self._position is not None:
            return []
        return original(self, event)

    patch.setattr(Subscription, "_handle", once)


@mutation("leave a stable replica that is a little behind", "available", scene="behind")
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._rank

    def strict(self: ReplicaSelector, known: Any, now: int) -> int:
        ahead = max(it.status.reached for it in self._known.values())
        return 2 if ahead > known.status.upto else original(self, known, now)

    patch.setattr(ReplicaSelector, "_rank", strict)


@mutation(
    "read one replica for both, what is tentative and corrections",
    "available",
    "standing",
    scene="correction",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector.choose

    def both(self: ReplicaSelector, now: int, wanted: int | None) -> Choice:
        choice = original(self, now, wanted)
        self.choice = Choice(choice.correcting or choice.main, None)
        return self.choice

    patch.setattr(ReplicaSelector, "choose", both)
