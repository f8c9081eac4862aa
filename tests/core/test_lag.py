"""A copy that is alive but makes no progress is evicted (Flux section 3.2 knows crashes only)."""

from __future__ import annotations

from holdfast.core.lag import AHEAD_BUCKETS, DOUBLED_MAX, FIRST_STEP, FORGIVEN_US
from holdfast.core.membership import Dead, Heartbeat, Membership, Record, Released, Tick

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

    positions: dict[str, float]

    def _apply(self, event: Heartbeat | Tick) -> list[Record]:
        records = self.members.handle(event)
        assert self.members.handle(event) == records, "deciding changes nothing"
        for record in records:
            self.members.apply(record)
        self.records += records
        return records


def story() -> Story:
    told = Story()
    told.positions = dict.fromkeys(PAIR, 0.0)
    assert told.pass_(5, a=2, a2=2) == []
    return told


def test_one_that_stands_still_while_the_other_is_ahead_is_evicted() -> None:
    told = story()
    (dead,) = told.pass_(STALL / S + 1, a=2, a2=0)
    assert isinstance(dead, Dead) and (dead.name, dead.epoch, dead.evicted) == ("a@2", 1, True)
    assert "alive but makes no progress: path 'out' has stood at bucket 10" in dead.why
    assert told.members.standings()["a@2"].gone and told.members.standings()["a"].lives


def test_the_other_one_may_stand_still_by_now_because_of_it() -> None:
    """Its producers stopped at `buffer_buckets`, for the sake of the one that does not read."""
    told = story()
    assert told.pass_(AHEAD_BUCKETS / 2, a=2, a2=0) == []
    (dead,) = told.pass_(STALL / S, a=0, a2=0)
    assert isinstance(dead, Dead) and dead.name == "a@2"


def test_when_nothing_comes_in_nobody_makes_progress_and_nobody_is_evicted() -> None:
    told = story()
    assert told.pass_(1, a=2, a2=0) == []
    assert told.pass_(100, a=0, a2=0) == []


def test_one_that_is_slow_is_not_evicted() -> None:
    assert story().pass_(200, a=2, a2=0.2) == []


def test_time_in_which_it_was_not_heard_does_not_count() -> None:
    told = story()
    told.pass_(STALL / S - 1, a=2, a2=0)
    told.at += 3 * SILENCE  # the controller stood still
    assert told.pass_(STALL / S - 1, a=2, a2=0) == []


def test_a_new_instance_has_more_time_for_its_first_step() -> None:
    told = story()
    told.pass_(STALL / S + 1, a=2, a2=0)
    told.epochs["a@2"] = 2
    patience_s = 2 * FIRST_STEP * STALL / S
    assert [type(record) for record in told.pass_(patience_s - 1, a=2, a2=0)] == []
    (dead,) = told.pass_(2, a=2, a2=0)
    assert isinstance(dead, Dead) and dead.epoch == 2


def test_each_eviction_doubles_the_patience_up_to_a_bound_and_is_forgotten() -> None:
    told, stood_s = story(), []
    for epoch in range(1, DOUBLED_MAX + 4):
        told.epochs["a@2"] = epoch
        told.positions["a@2"] = told.positions["a"]
        told.pass_(2, a=2, a2=2)  # its first steps
        began, dead = told.at, []
        while not dead:
            dead = [record for record in told.pass_(0.5, a=2, a2=0) if isinstance(record, Dead)]
        stood_s.append(round((told.at - began) / S))
    assert stood_s[:3] == [10, 20, 40]
    assert stood_s[-1] <= 10 << DOUBLED_MAX
    told.epochs["a@2"] += 1
    told.positions["a@2"] = told.positions["a"]
    told.pass_(FORGIVEN_US / S, a=2, a2=2)
    (dead_again,) = told.pass_(STALL / S + 1, a=2, a2=0)
    assert isinstance(dead_again, Dead)


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
