"""Mistakes in subscriptions: when to retry, which replica to read, which buckets to take."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core import replica_selector, subscription
from holdfast.core.replica_selector import Choice, ReplicaSelector
from holdfast.core.subscription import Subscription
from holdfast.core.wake_ups import Alarm
from tests.verify.sim.mutations.planting import mutation


@mutation("never reconnect to the only producer", "lost", "delay", scene="silent")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._lost

    def resigned(self: Subscription, *args: Any) -> Any:
        actions = original(self, *args)
        self._retry_at = None
        return actions

    patch.setattr(Subscription, "_lost", resigned)


@mutation("treat a Tick as pending after it arrived", "lost", "delay", scene="wipes")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Alarm.needs
    patch.setattr(Alarm, "rang", lambda self: None)
    patch.setattr(Alarm, "needs", lambda self, at, due: original(self, 0, due))


@mutation("treat a replica that completed the stream as unfinished", "standing", seed=10190)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replica_selector.Status, "ended", False)


@mutation(
    "wait for a reply that never arrives",
    "available",
    "detected",
    "standing",
    scene="replica_down",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._answered

    def patient(self: Subscription, at: int, replica: str) -> Any:
        status = self._polling[replica].confirmed
        polling = original(self, at, replica)
        polling.under_way = status is None and self.many and not self.selector.knows(replica)
        return polling

    patch.setattr(Subscription, "_answered", patient)


@mutation(
    "remember a replica that is gone",
    "detected",
    scene="hosts_pause",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaSelector, "gone", lambda self, replica: None)


@mutation(
    "stay disconnected forever after the disk was full",
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
        return min(self._known.values(), key=lambda known: known.status.reached).replica

    patch.setattr(ReplicaSelector, "_best", last)


@mutation(
    "treat a replica that was just started as stable",
    "available",
    "detected",
    "standing",
    scene="behind",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaSelector, "_rank", lambda self, known, now: 0)


@mutation("report the position of a consumer only once", "bounded", "held", scene="replica_hangs")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Subscription._handle

    def once(self: Subscription, event: Any) -> Any:
        if isinstance(event, subscription.Advanced) and self._position is not None:
            return []
        return original(self, event)

    patch.setattr(Subscription, "_handle", once)


@mutation("leave a stable replica that lags a little", "available", scene="behind")
def _(patch: pytest.MonkeyPatch) -> None:
    original = ReplicaSelector._rank

    def strict(self: ReplicaSelector, candidate: Any, now: int) -> int:
        ahead = max(other.status.reached for other in self._known.values())
        return 2 if ahead > candidate.status.upto else original(self, candidate, now)

    patch.setattr(ReplicaSelector, "_rank", strict)


@mutation(
    "read tentative buckets and corrections from one replica",
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
