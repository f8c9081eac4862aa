"""Mistakes in the catch-up of a replica of a pair, in lending state, and in retained data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import holdfast.streams.serving
from holdfast.cluster.controller import Controller
from holdfast.core import catch_up, lag, membership
from holdfast.core.catch_up import CatchUp
from holdfast.core.catch_up_events import Lending
from holdfast.core.failure_detector import FailureDetector
from holdfast.core.lag import Lag
from holdfast.core.membership import Membership
from holdfast.core.retention import Position, position_of_gone
from holdfast.core.sunion import FOREVER
from holdfast.node.node_events import StateReleased
from holdfast.node.state_lending import Lender
from tests.verify.sim.mutations.planting import mutation


@mutation(
    "delete results that are being fetched",
    "bounded",
    "paired",
    "alive",
    "lost",
    scene="pairs_slow_fetch",
    slow=True,
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Lender.lend

    def unpinned(self: Lender, newcomer: str, *rest: Any) -> Any:
        answer = original(self, newcomer, *rest)
        self._service.pins.pop(newcomer, None)
        return answer

    patch.setattr(Lender, "lend", unpinned)


@mutation("retain lent state after it was fetched", "bounded", "held", "paired", scene="pairs_lent")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Lender.handle

    def keeping(self: Lender, event: Any, *rest: Any) -> None:
        if isinstance(event, StateReleased):
            self._lending.end(event.newcomer)
        else:
            original(self, event, *rest)

    patch.setattr(Lender, "handle", keeping)


@mutation(
    "never end the lease of a dead replica",
    "bounded",
    "held",
    "paired",
    scene="pairs_fetcher_dies",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lending, "expired", lambda self, at: ([], at + 10_000_000))


@mutation("release state that was just lent", "paired", "alive", "lost", scene="pairs_wipe")
def _(patch: pytest.MonkeyPatch) -> None:
    original = Lending.expired

    def early(self: Lending, at: int) -> Any:
        return original(self, at + 20_000_000)

    def soon(self: Lending, at: int, to: str) -> int:
        self._until[to] = at + 10_000_000
        return at + 1

    patch.setattr(Lending, "expired", early)
    patch.setattr(Lending, "lend", soon)


@mutation(
    "request a deleted piece forever",
    "paired",
    "alive",
    "lost",
    scene="pairs_lender_dies",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = CatchUp._fetch_failed

    def stubborn(self: CatchUp, at: int, failure: Any) -> Any:
        self._tries = 0
        return original(self, at, replace(failure, gone=False))

    patch.setattr(CatchUp, "_fetch_failed", stubborn)


@mutation("skip the last piece of a state", "alive", "lost", "wrong", "paired", scene="pairs_wipe")
def _(patch: pytest.MonkeyPatch) -> None:
    original = CatchUp._fetched

    def short(self: CatchUp, at: int) -> Any:
        if len(self._pieces) == 2:
            del self._pieces[1:]
        return original(self, at)

    patch.setattr(CatchUp, "_fetched", short)


@mutation(
    "start before the fetched state is installed",
    "alive",
    "lost",
    "wrong",
    "paired",
    scene="pairs_wipe",
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CatchUp, "_install", lambda self: (
        self._move(catch_up.Phase.INSTALLING),
        self._come_up("own", "early"),
    )[1])  # fmt: skip


@mutation(
    "wait forever for the peer that has state", "alive", "lost", "paired", scene="pairs_one_disk"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(catch_up, "REFUSALS", 10**9)
    patch.setattr(CatchUp, "_start_unpaired", lambda self, why: self._wait(0, why, 10**9))


@mutation(
    "pause for minutes after one failed transfer",
    "paired",
    "alive",
    "lost",
    scene="pairs_lender_dies",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = CatchUp._start_over

    def discouraged(self: CatchUp, at: int, failure: Any) -> Any:
        self._failures = 20
        return original(self, at, failure)

    patch.setattr(CatchUp, "_start_over", discouraged)


# -- retention ------------------------------------------------------------------------------------


@mutation(
    "wait for a dead replica at a bounded buffer",
    "available",
    "delay",
    "lost",
    "standing",
    scene="pairs_bound",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = position_of_gone

    def waiting(standing: Any, last: Any, *rest: Any) -> Any:
        position = original(standing, last, *rest)
        return position if position is None or position.needed == FOREVER else position._replace(
            received=last.received)  # fmt: skip

    patch.setattr(holdfast.streams.serving, "position_of_gone", waiting)


@mutation("retain everything for the disk of a dead replica forever", "paired", scene="pairs_dead")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_release", lambda self, known, at: [])


@mutation("retain forever what a dead successor requested", "paired", scene="pairs_fetcher_dies")
def _(patch: pytest.MonkeyPatch) -> None:
    original = position_of_gone

    def loyal(standing: Any, last: Position, trimmed: int, held_at: Any, at: int) -> Any:
        return original(standing, last, trimmed, None, at)

    patch.setattr(holdfast.streams.serving, "position_of_gone", loyal)


# -- eviction and death ---------------------------------------------------------------------------


@mutation(
    "evict the replica that is ahead",
    "detected",
    "lost",
    "available",
    "standing",
    "alive",
    scene="pairs_hang",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Lag.stalled
    patch.setattr(Lag, "stalled", lambda self, name, peer: original(self, peer, name))


@mutation(
    "never evict a replica without progress", "detected", "available", "bounded", scene="pairs_hang"
)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lag, "stalled", lambda self, name, peer: None)


@mutation("evict an idle replica", "alive", scene="pairs_idle")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lag, "AHEAD_BUCKETS", -10)


@mutation("never declare a replica dead", "detected", "paired", "bounded", scene="pairs_kill")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "lost", lambda *how: [])


@mutation("declare a replica dead at its first late heartbeat", "alive", scene="pairs_calm")
def _(patch: pytest.MonkeyPatch) -> None:
    def silent(self: FailureDetector, name: str, at: int) -> bool:
        return at - self._heard.get(name, self.since) > self.silence_us // 8

    patch.setattr(FailureDetector, "silent", silent)


@mutation(
    "let a replica run that was declared dead",
    "alive",
    "paired",
    "detected",
    "bounded",
    scene="pairs_hang",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def lenient(self: Membership, name: str, epoch: int) -> bool:
        return epoch < self.epoch(name)

    patch.setattr(Membership, "refuses", lenient)


@mutation(
    "forget which replicas are dead when the controller restarts",
    "alive",
    "paired",
    "detected",
    scene="hosts_lost",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Controller._record

    def forgetful(self: Controller, counter: str, value: int) -> Any:
        return None if counter.startswith("dead.") else original(self, counter, value)

    patch.setattr(Controller, "_record", forgetful)


@mutation(
    "forget the assignment of nodes when the controller restarts",
    "alive",
    "lost",
    "paired",
    scene="hosts_lost",
)
def _(patch: pytest.MonkeyPatch) -> None:
    original = Controller._record

    def forgetful(self: Controller, counter: str, value: int) -> Any:
        return None if counter.startswith("host.") else original(self, counter, value)

    patch.setattr(Controller, "_record", forgetful)
