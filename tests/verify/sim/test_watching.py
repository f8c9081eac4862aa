"""What the simulator observes for its checkers: which replica each consumer reads, which replicas
rely on others, and which results are owed."""

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


def reading(history: History, consumer: str, stream: str) -> Iterator[tuple[str, str]]:
    """The replica that is read, and why that replica is unusable, at every change."""
    for event in history.of(Reading):
        if (event.consumer, event.stream) == (consumer, stream):
            yield event.replica, event.bad


def who_is_read() -> tuple[str, str]:
    """The replica that the client reads while nothing fails, and the other replica."""
    ((replica, _),) = reading(ran(seconds=8).history, "client-windows", "windows")
    return replica, "main" if replica == "main@2" else "main@2"


@pytest.mark.parametrize(
    ("do", "on", "why"),
    [
        ("pause", "{}", "it is paused"),
        ("cut", "{}<->client-windows", "it is cut off"),
        ("cut", "{}->client-windows", "it is cut off"),
    ],
)
def test_a_client_leaves_an_unusable_replica(do: str, on: str, why: str) -> None:
    read, other = who_is_read()
    outcome = ran(Fault(5 * S, do, on.format(read), 6 * S))
    readings = list(reading(outcome.history, "client-windows", "windows"))
    assert readings[:3] == [(read, ""), (read, why), (other, "")]
    assert outcome.failed == []


def test_a_node_that_hangs_answers_but_makes_no_progress() -> None:
    read, other = who_is_read()
    outcome = ran(Fault(5 * S, "hang", read, 8 * S))
    steps = [
        at
        for at, process, event, _ in outcome.world.trace
        if process == read and event.startswith("ran") and 5.2 * S < at < 13 * S
    ]
    assert steps == []
    assert (other, "") in list(reading(outcome.history, "client-windows", "windows"))
    assert outcome.failed == []


def test_a_restart_repairs_a_node_that_hangs() -> None:
    faults = (Fault(5 * S, "hang", "main", 10 * S), Fault(7 * S, "kill", "main", S))
    steps = [
        at
        for at, process, event, _ in ran(*faults).world.trace
        if process == "main" and event.startswith("ran") and at < 15 * S
    ]
    assert max(steps) > 14 * S


def test_the_observer_records_that_a_replica_of_a_pair_is_declared_dead() -> None:
    outcome = ran(Fault(5 * S, "kill", "lower.0", 6 * S), network="pairs-1", seconds=20)
    readings = list(reading(outcome.history, "controller", "lower.0"))
    assert readings[1:3] == [("lower.0", "it is dead"), ("lower.0", "")]
    assert outcome.failed == []


def test_the_observer_records_which_replica_relies_on_which() -> None:
    """One replica corrects its results while the other replica answers and waits; at the end no
    replica relies on another."""
    outcome = ran(Fault(5 * S, "cut", "s2<->main,main@2", 5 * S), seconds=20)
    events = [event for event in outcome.history.of(Relied) if event.path == "windows"]
    reliances = {(event.node, event.what, event.on, event.sound) for event in events if event.on}
    assert any(
        (corrects, "answers", (answers,), (answers,)) in reliances
        and (answers, "correction", (corrects,), (corrects,)) in reliances
        for corrects, answers in (("main", "main@2"), ("main@2", "main"))
    )
    last = {(event.node, event.what): event.on for event in events}
    assert set(last.values()) == {()}


def test_an_answer_is_owed_while_there_is_a_tree() -> None:
    """Also during a failure and its correction. The time of failure detection is added."""

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
    # Both replicas are down, and must catch up after their restart.
    both = owed(Fault(10 * S, "kill", "main", S), Fault(10 * S, "kill", "main@2", S))
    assert both[:3] == [(7.25, 2.8), (10.0, None), both[2]]
    assert 18 < both[2][0] < 21


def test_answers_stay_owed_during_disk_faults_and_clock_steps() -> None:
    for fault in (
        Fault(10 * S, "full", "main", 8 * S),
        Fault(10 * S, "clock", "main", 3 * S, 1e6),
        Fault(10 * S, "eio-fsync", "main", 3 * S),
    ):
        ages = [event.age_us for event in ran(fault, seconds=25).history.of(Owed)]
        assert ages[-2:] == [None, None] and None not in ages[:-2]
