"""Eviction of a replica that is alive but makes no progress (Flux section 3.2 has only crashes)."""

from __future__ import annotations

import pytest

from holdfast.core.lag import AHEAD_BUCKETS
from holdfast.core.membership import (
    Dead,
    Heartbeat,
    Membership,
    Record,
    Registered,
    Released,
    Tick,
)

S = 1_000_000
SILENCE, STALL, REJOIN = 2 * S, 10 * S, 60 * S
PAIR = {"a": "a@2", "a@2": "a"}


class Story:
    """Both replicas send a heartbeat twice a second; the test decides their positions."""

    def __init__(self) -> None:
        self.members = Membership(PAIR, {}, 0, SILENCE, rejoin_us=REJOIN, stall_us=STALL)
        self.at = 0
        self.epochs = dict.fromkeys(PAIR, 1)
        self.records: list[Record] = []
        self.positions = dict.fromkeys(PAIR, 0.0)

    def pass_(self, seconds: float, **moves: float) -> list[Record]:
        """Advance time. `moves` has the buckets per second of each replica that sends heartbeats
        (`a2` is `a@2`). Return the decisions."""
        decided: list[Record] = []
        until = self.at + int(seconds * S)
        while self.at < until:
            self.at += S // 2
            for name, rate in moves.items():
                replica = "a@2" if name == "a2" else "a"
                self.positions[replica] += rate / 2
                positions = {"out": int(self.positions[replica])}
                self._apply(Heartbeat(self.at, replica, self.epochs[replica], positions))
            decided += self._apply(Tick(self.at))
        return decided

    def _apply(self, event: Heartbeat | Tick) -> list[Record]:
        records = self.members.handle(event)
        assert self.members.handle(event) == records, "a decision is not applied"
        for record in records:
            self.members.apply(record)
        self.records += records
        return records


def story() -> Story:
    history = Story()
    assert history.pass_(5, a=2, a2=2) == []
    return history


def test_a_replica_that_makes_no_progress_while_its_peer_is_ahead_is_evicted() -> None:
    history = story()
    (dead,) = history.pass_(STALL / S + 3, a=2, a2=0)
    assert isinstance(dead, Dead) and (dead.name, dead.epoch) == ("a@2", 1)
    assert "no progress although it sends heartbeats: path 'out' has been at bucket 10" in dead.why
    assert history.members.statuses()["a@2"].gone and history.members.statuses()["a"].lives


def test_a_stuck_replica_is_evicted_even_if_its_peer_is_blocked_because_of_it() -> None:
    """Producers stop at `buffer_buckets` because one replica does not read."""
    history = story()
    assert history.pass_(AHEAD_BUCKETS / 2, a=2, a2=0) == []
    (dead,) = history.pass_(STALL / S + 1, a=0, a2=0)
    assert isinstance(dead, Dead) and dead.name == "a@2"


def test_no_replica_is_evicted_while_no_input_arrives() -> None:
    history = story()
    assert history.pass_(1, a=2, a2=0) == []
    assert history.pass_(100, a=0, a2=0) == []


@pytest.mark.parametrize("rate", [1 / 6, 0.2, 0.5, 1, 1.5])
def test_a_replica_that_falls_further_and_further_behind_is_evicted(rate: float) -> None:
    """The replica makes progress, but would stop its producers at `buffer_buckets`."""
    history = story()
    dead, *_ = history.pass_(80, a=2, a2=rate)
    assert isinstance(dead, Dead) and dead.name == "a@2"
    assert "falls behind although it sends heartbeats: path 'out' is at bucket" in dead.why


def test_a_slow_replica_is_evicted_before_buffers_for_more_than_the_stall_time_fill() -> None:
    history = story()
    history.pass_(1.5 * STALL / S, a=2, a2=0.5)
    assert history.members.statuses()["a@2"].gone


def test_a_slow_replica_is_evicted_even_if_its_producers_slow_down_its_peer() -> None:
    history = story()
    history.positions["a"] += 24
    (dead,) = history.pass_(2 * STALL / S, a=0.5, a2=0.5)
    assert isinstance(dead, Dead) and dead.name == "a@2"


def test_a_replica_that_keeps_up_with_a_constant_lag_is_not_evicted() -> None:
    """Two steps behind: the step in progress, and the input that arrived meanwhile."""
    history = story()
    history.positions["a"] += 4
    assert history.pass_(20, a=2, a2=2) == []
    for _ in range(20):
        assert history.pass_(3, a=2, a2=0) == []
        history.positions["a@2"] += 6


def test_a_replica_that_catches_up_is_not_evicted() -> None:
    """The replica hung for a while, or is new, and runs more buckets than arrive."""
    history = story()
    assert history.pass_(STALL / S - 2, a=2, a2=0) == []
    assert history.pass_(25, a=2, a2=2.5) == []
    history.epochs["a@2"] = 2
    history.positions["a@2"] -= 300
    history._apply(Heartbeat(history.at, "a@2", 2, {"out": None}))
    assert history.pass_(100, a=2, a2=4) == []
    assert history.positions["a"] - history.positions["a@2"] > 50, (
        "the replica has not caught up yet"
    )


def test_a_replica_that_catches_up_in_long_steps_is_not_evicted() -> None:
    history = story()
    history.positions["a"] += 100
    for _ in range(8):
        assert history.pass_(6, a=2, a2=0) == []
        history.positions["a@2"] += 20


def test_a_replica_that_works_off_a_backlog_more_slowly_is_not_evicted() -> None:
    """Many buckets behind is a short time if both replicas run many buckets per second."""
    history = story()
    assert history.pass_(60, a=200, a2=180) == []


def test_time_without_heartbeats_does_not_count() -> None:
    history = story()
    history.pass_(STALL / S - 1, a=2, a2=0)
    history.at += 3 * SILENCE  # the controller was suspended
    assert history.pass_(STALL / S - 1, a=2, a2=0) == []


def test_time_without_input_does_not_count() -> None:
    """After an hour without rows one replica finishes a moment earlier."""
    history = story()
    history.pass_(3_600, a=0, a2=0)
    history.positions["a"] += 20
    assert history.pass_(2, a=2, a2=0) == []


def test_a_replica_may_take_twice_as_long_as_its_earlier_long_steps() -> None:
    history = story()
    for _ in range(2):
        history.positions["a"] += 30
        assert history.pass_(STALL / S - 2, a=0, a2=0) == []
        history.positions["a@2"] = history.positions["a"]
        assert history.pass_(1, a=0, a2=0) == []
    history.positions["a"] += 30
    assert history.pass_(1.5 * STALL / S, a=0, a2=0) == []
    (dead,) = history.pass_(STALL / S, a=0, a2=0)
    assert isinstance(dead, Dead)


def test_a_replica_that_hangs_repeatedly_is_evicted_as_soon_as_the_first_time() -> None:
    history = story()
    for epoch in range(1, 6):
        history.epochs["a@2"] = epoch
        history.positions["a@2"] = history.positions["a"]
        history.pass_(2, a=2, a2=2)
        (dead,) = history.pass_(STALL / S + 3, a=2, a2=0)
        assert isinstance(dead, Dead) and dead.epoch == epoch


def test_a_replica_that_never_starts_its_path_is_evicted() -> None:
    history = story()
    history.members.handle(Heartbeat(history.at, "a@2", 2, {"out": None}))
    history.members.apply(Registered("a@2", 2))
    history.epochs["a@2"] = 2
    dead: list[Record] = []
    for _ in range(int(2 * STALL / S) + 4):
        history._apply(Heartbeat(history.at, "a@2", 2, {"out": None}))
        dead += history.pass_(0.5, a=2)
    assert [record.name for record in dead if isinstance(record, Dead)] == ["a@2"]


def test_never_both_replicas_of_a_pair_are_evicted() -> None:
    history = story()
    history.positions["a"] += 100
    evicted = history.pass_(100, a=0, a2=0)
    assert [record.name for record in evicted if isinstance(record, Dead)] == ["a@2"]


# -- disks of dead replicas (core.retention) ------------------------------------------------------


def test_the_disk_of_a_dead_replica_is_released_after_rejoin() -> None:
    history = story()
    assert [r.name for r in history.pass_(4, a=2) if isinstance(r, Dead)] == ["a@2"]
    assert history.pass_(REJOIN / S - 3, a=2) == []
    assert history.pass_(3, a=2) == [Released("a@2", 1)]
    assert history.pass_(100, a=2) == []


def test_no_disk_is_released_without_heartbeats_of_the_peer() -> None:
    """The peer may be dead too; then the disk is the only one."""
    history = story()
    history.pass_(4, a=2)
    assert history.pass_(3 * REJOIN / S) == []
    assert history.pass_(1, a=2) == [Released("a@2", 1)]


def test_the_release_time_restarts_for_a_replica_that_returned_and_died_again() -> None:
    history = story()
    history.pass_(REJOIN / S + 5, a=2)
    history.epochs["a@2"] = 2
    history.pass_(5, a=2, a2=2)
    assert [type(record) for record in history.pass_(REJOIN / S, a=2)] == [Dead]
    assert history.pass_(5, a=2) == [Released("a@2", 2)]
