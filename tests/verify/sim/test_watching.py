"""What the simulator sees for its judges: who is read, who is counted on, what is owed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.config import Options
from holdfast.verify.history import History, Owed, Reading, Relied
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.simulation import Outcome, simulate

S = 1_000_000


def ran(*faults: Fault, network: str = "pair", seconds: int = 16) -> Outcome:
    scenario = Scenario("watched", network, seconds, faults)
    return simulate(scenario, Options(checkpoint_buckets=20))


def reading(history: History, reader: str, stream: str) -> Iterator[tuple[str, str]]:
    """Which replica, and why it is of no use, as it changes."""
    for event in history.of(Reading):
        if (event.reader, event.stream) == (reader, stream):
            yield event.replica, event.bad


def who_is_read() -> tuple[str, str]:
    """The replica that the client reads while nothing fails, and the other one."""
    ((replica, _),) = reading(ran(seconds=8).history, "client-windows", "windows")
    return replica, "main" if replica == "main@2" else "main@2"


@pytest.mark.parametrize(
    ("do", "on", "why"),
    [
        ("pause", "{}", "it stands still"),
        ("cut", "{}<->client-windows", "it is cut off"),
        ("cut", "{}->client-windows", "it is cut off"),
    ],
)
def test_who_is_of_no_use_is_seen_and_left(do: str, on: str, why: str) -> None:
    read, other = who_is_read()
    outcome = ran(Fault(5 * S, do, on.format(read), 6 * S))
    told = list(reading(outcome.history, "client-windows", "windows"))
    assert told[:3] == [(read, ""), (read, why), (other, "")]
    assert outcome.failed == []


def test_a_node_that_hangs_answers_and_makes_no_progress() -> None:
    read, other = who_is_read()
    outcome = ran(Fault(5 * S, "hang", read, 8 * S))
    steps = [
        at
        for at, who, what, _ in outcome.world.trace
        if who == read and what.startswith("ran") and 5.2 * S < at < 13 * S
    ]
    assert steps == []
    assert (other, "") in list(reading(outcome.history, "client-windows", "windows"))
    assert outcome.failed == []


def test_a_node_that_hangs_is_helped_by_a_new_life() -> None:
    faults = (Fault(5 * S, "hang", "main", 10 * S), Fault(7 * S, "kill", "main", S))
    steps = [
        at
        for at, who, what, _ in ran(*faults).world.trace
        if who == "main" and what.startswith("ran") and at < 15 * S
    ]
    assert max(steps) > 14 * S


def test_one_of_a_pair_is_seen_to_be_declared_dead() -> None:
    outcome = ran(Fault(5 * S, "kill", "lower.0", 6 * S), network="pairs-1", seconds=20)
    told = list(reading(outcome.history, "controller", "lower.0"))
    assert told[1:3] == [("lower.0", "it is dead"), ("lower.0", "")]
    assert outcome.failed == []


def test_who_counts_on_whom_is_seen() -> None:
    """One corrects itself while the other one answers and waits; in the end nobody counts on
    anybody."""
    outcome = ran(Fault(5 * S, "cut", "s2<->main,main@2", 5 * S), seconds=20)
    told = [event for event in outcome.history.of(Relied) if event.path == "windows"]
    on = {(event.node, event.what, event.on, event.sound) for event in told if event.on}
    assert any(
        (corrects, "answers", (answers,), (answers,)) in on
        and (answers, "correction", (corrects,), (corrects,)) in on
        for corrects, answers in (("main", "main@2"), ("main@2", "main"))
    )
    last = {(event.node, event.what): event.on for event in told}
    assert set(last.values()) == {()}


def test_an_answer_is_owed_as_long_as_there_is_a_tree() -> None:
    """Also in the failure, and in its correction; for who was noticed to be gone a little later."""

    def owed(*faults: Fault) -> list[tuple[float, float | None]]:
        events = ran(*faults, seconds=30).history.of(Owed)
        return [
            (event.at / S, None if event.age_us is None else event.age_us / S)
            for event in events
            if event.output == "windows"
        ]

    calm = [(7.25, 2.8), (30.0, None)]
    assert owed() == calm
    assert owed(Fault(10 * S, "silent", "s2", 8 * S)) == calm
    gone = owed(Fault(10 * S, "pause", "main", 5 * S))
    assert gone == [(7.25, 2.8), (10.0, 4.8), (15.0, 2.8), (30.0, None)]
    # Both are away, and then both have to catch up first.
    both = owed(Fault(10 * S, "kill", "main", S), Fault(10 * S, "kill", "main@2", S))
    assert both[:3] == [(7.25, 2.8), (10.0, None), both[2]]
    assert 18 < both[2][0] < 21


def test_nothing_less_is_owed_because_of_a_disk_that_is_full_or_a_clock_that_is_set() -> None:
    for fault in (
        Fault(10 * S, "full", "main", 8 * S),
        Fault(10 * S, "clock", "main", 3 * S, 1e6),
        Fault(10 * S, "eio-fsync", "main", 3 * S),
    ):
        ages = [event.age_us for event in ran(fault, seconds=25).history.of(Owed)]
        assert ages[-2:] == [None, None] and None not in ages[:-2]
