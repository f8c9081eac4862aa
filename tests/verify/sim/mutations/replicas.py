"""Mistakes in choosing among replicas (Borealis DPC)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.streams.serving
from holdfast.core import progress
from holdfast.core.consistency import Consistency
from holdfast.core.following import NOTHING, Following
from holdfast.core.upstream import Upstream
from holdfast.node.executor import Performer
from holdfast.types import OutputState
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.follower import Follower
from tests.verify.sim.mutations.planting import S, mutation


@mutation("take a tentative bucket from every replica", "order", seed=20)
def _(patch: pytest.MonkeyPatch) -> None:
    def young(self: Following, bucket: int) -> bool:
        return self.tentative and (self.at is None or bucket >= self.at)

    patch.setattr(Following, "is_younger", young)
    patch.setattr(
        Following, "tentative_after", property(lambda self: NOTHING if self.tentative else None)
    )


@mutation("never leave a replica that answers", "available", "delay", seed=169)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Upstream._best

    def faithful(self: Upstream) -> str | None:
        return self.main if self.main in self._known else original(self)

    patch.setattr(Upstream, "_best", faithful)


@mutation("stay with a replica that lags", "available", "delay", seed=411)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "_lags", lambda self, *which: False)


@mutation("acknowledge only to the replica that is read", "bounded", seed=20)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Follower._say

    def one(self: Follower, server: Any, position: Any) -> Any:
        read = self.connection is not None and self.connection.server is server
        return original(self, server, position if read or not self._many else None)

    patch.setattr(Follower, "_say", one)


@mutation("rebuild without what came before", "wrong", "alive", "converge", "lost", seed=39)
def _(patch: pytest.MonkeyPatch) -> None:
    original = progress.Progress._next_stable

    def short(self: progress.Progress, path: Any) -> Any:
        actions = original(self, path)
        return [
            replace(a, lo=a.rebuild_from)
            if isinstance(a, progress.Run) and a.rebuild_from is not None
            else a
            for a in actions
        ]

    patch.setattr(progress.Progress, "_next_stable", short)


@mutation("give away the inputs that rebuild the state", "wrong", "alive", "converge", seed=39)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.PathPlan, "needs_from", lambda self, bucket, referred: referred)


@mutation("checkpoint the state that has diverged", "wrong", "lost", "alive", seed=28)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._checkpoint

    def diverged(self: Performer, path: Any) -> None:
        held = self.versions[path.name]
        self.versions[path.name] = self._tentative.get(path.name, held)
        original(self, path)
        self.versions[path.name] = held

    patch.setattr(Performer, "_checkpoint", diverged)


@mutation("say nothing of tentative buckets that are empty", "available", seed=48)
def _(patch: pytest.MonkeyPatch) -> None:
    original = holdfast.streams.serving._tentative

    def quiet(*args: Any) -> Any:
        segments, upto, missing = original(*args)
        return segments, upto if segments else None, missing

    patch.setattr(holdfast.streams.serving, "_tentative", quiet)


@mutation("tell nobody how an output stands", "available", "delay", seed=169)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Performer._perform

    def discreet(self: Performer, action: Any) -> None:
        if not isinstance(action, progress.Change):
            original(self, action)

    patch.setattr(Performer, "_perform", discreet)


@mutation("correct all replicas at once", "available", seed=4)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consistency, "asked_by", lambda self, partner, me: "postponed")


@mutation("prefer a replica that guesses", "available", "delay", "lost", seed=169)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Upstream._rank

    def odd(self: Upstream, heard: Any) -> int:
        return (1, 0, 2, 3)[original(self, heard)]

    patch.setattr(Upstream, "_rank", odd)


@mutation(
    "believe a stable replica that is behind", "available", "delay",
    faults=(
        Fault(3 * S, "cut", "main<->s1,s2", 12 * S),
        Fault(3 * S, "silent", "s2", 12 * S),
    ),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Upstream._rank

    def gullible(self: Upstream, heard: Any) -> int:
        return 0 if heard.state is OutputState.STABLE else original(self, heard)

    patch.setattr(Upstream, "_rank", gullible)


@mutation(
    "hold all replicas to one epoch", "available", "lost", "delay",
    faults=(
        Fault(2 * S, "kill", "main", S // 2),
        Fault(4 * S, "kill", "main", S // 2),
        Fault(6 * S, "kill", "main@2", S // 2),
        Fault(8 * S, "kill", "main", 9 * S),
    ),
)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    original = Following.refuses

    def mixed(self: Following, epoch: int, since: int, replica: str = "") -> str | None:
        return original(self, epoch, since)

    patch.setattr(Following, "refuses", mixed)


@mutation("do not wake up when X is over", "available", seed=48)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress.Progress, "_wake", lambda self, path, after, at: [])
