"""A copy that is alive but makes no progress is evicted (Flux section 3.2 knows crashes only)."""

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
    """Both copies speak twice a second; what each says of its path is decided by the test."""

    def __init__(self) -> None:
        self.members = Membership(PAIR, {}, 0, SILENCE, rejoin_us=REJOIN, stall_us=STALL)
        self.at = 0
        self.epochs = dict.fromkeys(PAIR, 1)
        self.records: list[Record] = []
        self.positions = dict.fromkeys(PAIR, 0.0)

    def pass_(self, seconds: float, **moves: float) -> list[Record]:
        """Buckets per second of each copy that speaks; `a2` is the other one. None are decided."""
        decided: list[Record] = []
        until = self.at + int(seconds * S)
        while self.at < until:
            self.at += S // 2
            for name, rate in moves.items():
                spoken = "a@2" if name == "a2" else "a"
                self.positions[spoken] += rate / 2
                said = {"out": int(self.positions[spoken])}
                self._apply(Heartbeat(self.at, spoken, self.epochs[spoken], said))
            decided += self._apply(Tick(self.at))
        return decided

    def _apply(self, event: Heartbeat | Tick) -> list[Record]:
        records = self.members.handle(event)
        assert self.members.handle(event) == records, "deciding changes nothing"
        for record in records:
            self.members.apply(record)
        self.records += records
        return records


def story() -> Story:
    told = Story()
    assert told.pass_(5, a=2, a2=2) == []
    return told


def test_one_that_stands_still_while_the_other_is_ahead_is_evicted() -> None:
    told = story()
    (dead,) = told.pass_(STALL / S + 3, a=2, a2=0)
    assert isinstance(dead, Dead) and (dead.name, dead.epoch) == ("a@2", 1)
    assert "alive but makes no progress: path 'out' has stood at bucket 10" in dead.why
    assert told.members.standings()["a@2"].gone and told.members.standings()["a"].lives


def test_the_other_one_may_stand_still_by_now_because_of_it() -> None:
    """Its producers stopped at `buffer_buckets`, for the sake of the one that does not read."""
    told = story()
    assert told.pass_(AHEAD_BUCKETS / 2, a=2, a2=0) == []
    (dead,) = told.pass_(STALL / S + 1, a=0, a2=0)
    assert isinstance(dead, Dead) and dead.name == "a@2"


def test_when_nothing_comes_in_nobody_makes_progress_and_nobody_is_evicted() -> None:
    told = story()
    assert told.pass_(1, a=2, a2=0) == []
    assert told.pass_(100, a=0, a2=0) == []


@pytest.mark.parametrize("rate", [1 / 6, 0.2, 0.5, 1, 1.5])
def test_one_that_falls_further_and_further_behind_is_evicted(rate: float) -> None:
    """It moves all the time, and would stop its producers at `buffer_buckets`."""
    told = story()
    dead, *_ = told.pass_(80, a=2, a2=rate)
    assert isinstance(dead, Dead) and dead.name == "a@2"
    assert "alive but falls behind: path 'out' is at bucket" in dead.why


def test_soon_enough_that_buffers_which_hold_more_than_stall_do_not_fill() -> None:
    told = story()
    told.pass_(1.5 * STALL / S, a=2, a2=0.5)
    assert told.members.standings()["a@2"].gone


def test_also_when_its_producers_let_the_other_one_be_no_further_ahead() -> None:
    told = story()
    told.positions["a"] += 24
    (dead,) = told.pass_(2 * STALL / S, a=0.5, a2=0.5)
    assert isinstance(dead, Dead) and dead.name == "a@2"


def test_one_that_keeps_up_a_little_later_is_not_evicted() -> None:
    """Two steps behind: what it is at, and what came in meanwhile."""
    told = story()
    told.positions["a"] += 4
    assert told.pass_(20, a=2, a2=2) == []
    for _ in range(20):
        assert told.pass_(3, a=2, a2=0) == []
        told.positions["a@2"] += 6


def test_one_that_catches_up_has_all_the_time_it_needs() -> None:
    """It hung for a while, or is a newcomer, and is done with more than comes in."""
    told = story()
    assert told.pass_(STALL / S - 2, a=2, a2=0) == []
    assert told.pass_(25, a=2, a2=2.5) == []
    told.epochs["a@2"] = 2
    told.positions["a@2"] -= 300
    told._apply(Heartbeat(told.at, "a@2", 2, {"out": None}))
    assert told.pass_(100, a=2, a2=4) == []
    assert told.positions["a"] - told.positions["a@2"] > 50, "it is not done yet"


def test_also_in_long_steps() -> None:
    told = story()
    told.positions["a"] += 100
    for _ in range(8):
        assert told.pass_(6, a=2, a2=0) == []
        told.positions["a@2"] += 20


def test_one_that_is_slower_with_a_backlog_is_waited_for() -> None:
    """Many buckets are little time where both get through many."""
    told = story()
    assert told.pass_(60, a=200, a2=180) == []


def test_time_in_which_it_was_not_heard_does_not_count() -> None:
    told = story()
    told.pass_(STALL / S - 1, a=2, a2=0)
    told.at += 3 * SILENCE  # the controller stood still
    assert told.pass_(STALL / S - 1, a=2, a2=0) == []


def test_time_in_which_there_was_nothing_to_do_does_not_count() -> None:
    """After an hour without rows one copy is done first, by a moment."""
    told = story()
    told.pass_(3_600, a=0, a2=0)
    told.positions["a"] += 20
    assert told.pass_(2, a=2, a2=0) == []


def test_where_steps_are_long_it_waits_for_twice_as_long_as_they_take() -> None:
    told = story()
    for _ in range(2):
        told.positions["a"] += 30
        assert told.pass_(STALL / S - 2, a=0, a2=0) == []
        told.positions["a@2"] = told.positions["a"]
        assert told.pass_(1, a=0, a2=0) == []
    told.positions["a"] += 30
    assert told.pass_(1.5 * STALL / S, a=0, a2=0) == []
    (dead,) = told.pass_(STALL / S, a=0, a2=0)
    assert isinstance(dead, Dead)


def test_one_that_hangs_again_is_evicted_as_soon_as_before() -> None:
    told = story()
    for epoch in range(1, 6):
        told.epochs["a@2"] = epoch
        told.positions["a@2"] = told.positions["a"]
        told.pass_(2, a=2, a2=2)
        (dead,) = told.pass_(STALL / S + 3, a=2, a2=0)
        assert isinstance(dead, Dead) and dead.epoch == epoch


def test_one_that_never_begins_is_evicted_too() -> None:
    told = story()
    told.members.handle(Heartbeat(told.at, "a@2", 2, {"out": None}))
    told.members.apply(Registered("a@2", 2))
    told.epochs["a@2"] = 2
    dead: list[Record] = []
    for _ in range(int(2 * STALL / S) + 4):
        told._apply(Heartbeat(told.at, "a@2", 2, {"out": None}))
        dead += told.pass_(0.5, a=2)
    assert [record.name for record in dead if isinstance(record, Dead)] == ["a@2"]


def test_never_both() -> None:
    told = story()
    told.positions["a"] += 100
    evicted = told.pass_(100, a=0, a2=0)
    assert [record.name for record in evicted if isinstance(record, Dead)] == ["a@2"]


# -- the disk of the dead (core.retention) --------------------------------------------------------


def test_the_disk_of_the_dead_is_released_after_a_while() -> None:
    told = story()
    assert [r.name for r in told.pass_(4, a=2) if isinstance(r, Dead)] == ["a@2"]
    assert told.pass_(REJOIN / S - 3, a=2) == []
    assert told.pass_(3, a=2) == [Released("a@2", 1)]
    assert told.pass_(100, a=2) == []


def test_as_long_as_the_other_one_is_not_heard_of_either_nothing_is_released() -> None:
    """It may be dead, too; then that disk is all there is."""
    told = story()
    told.pass_(4, a=2)
    assert told.pass_(3 * REJOIN / S) == []
    assert told.pass_(1, a=2) == [Released("a@2", 1)]


def test_one_that_comes_back_and_dies_again_has_its_time_again() -> None:
    told = story()
    told.pass_(REJOIN / S + 5, a=2)
    told.epochs["a@2"] = 2
    told.pass_(5, a=2, a2=2)
    assert [type(record) for record in told.pass_(REJOIN / S, a=2)] == [Dead]
    assert told.pass_(5, a=2) == [Released("a@2", 2)]
