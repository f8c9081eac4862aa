"""Defects of availability (Borealis) that a review found, A1 to A12, each with a run or transcript
that showed it; what the client makes of A1, A2 and A12 is in tests/edge.

A test that is marked fails for the reason that its mark names; the repair takes the mark away.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import pytest

from holdfast.config import Options, duration_us
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    BoundaryArrived,
    Run,
    RunTentative,
    StepDone,
    TentativeDone,
    Tick,
    Wake,
)
from holdfast.errors import NetworkError
from holdfast.model.contract import Contract
from holdfast.model.network import Network
from holdfast.types import Stability
from holdfast.verify.history import Deserted, Given
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import even, pair, pairs, small
from holdfast.verify.sim.simulation import Simulation
from holdfast.verify.sim.tables import Row
from tests.core.transcripts import PROCESS, came, plan_of, said, stable
from tests.verify.sim.lab import (
    Lab,
    S,
    failed,
    first_seen_us,
    given,
    group_steps,
    needs,
    sources,
    strike,
    union_of_two,
)

#: Between its end and when a bucket is there, at most: X, two buckets, two steps.
BOUND_US = 1_500_000 + 2 * 500_000 + 2 * 150_000


def two_at_500_ms() -> Network:
    return union_of_two(2, "500ms")


# -- A1, A2: what the client has ------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_a1_tentative_results_stand_while_a_failure_is_corrected(lab: Lab, replicas: int) -> None:
    nodes = ",".join(["main", "main@2"][:replicas])
    outcome = lab.run(
        lambda: union_of_two(replicas, "500ms"),
        Fault(3 * S, "cut", f"s2<->{nodes}", 20 * S),
        seconds=40,
        options=Options(group_buckets_max=8),
        tweak=group_steps(130_000),
    )
    assert "standing" not in failed(outcome)


def test_a2_a_client_that_is_restarted_in_a_failure_gives_again_what_stands(lab: Lab) -> None:
    """The simulated client adds nothing to what the real one says. What becomes of a table is in
    tests/edge/test_corrected_table.py."""
    outcome = lab.run(
        two_at_500_ms,
        Fault(8 * S, "cut", "s2<->main,main@2", 12 * S),
        Fault(14 * S, "kill", "client-merged", S),
        seconds=32,
    )
    assert failed(outcome) == {}
    again = [event for event in outcome.history.of(Given) if event.version == 2]
    assert again[0].stability == Stability.TENTATIVE


# -- A3, A4: what replicas promise each other -----------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "pause", "hang"])
def test_a3_when_the_replica_that_answers_is_lost_the_one_that_corrects_answers(
    lab: Lab, how: str
) -> None:
    def tweak(sim: Simulation) -> None:
        group_steps(130_000)(sim)
        strike(sim, 23_400_000, lambda answers, _: Fault(0, how, answers, 12 * S))

    outcome = lab.run(
        two_at_500_ms,
        Fault(3 * S, "cut", "s2<->main,main@2", 20 * S),
        seconds=45,
        options=Options(group_buckets_max=8),
        tweak=tweak,
    )
    seen = first_seen_us(outcome.history, "merged")
    late_us = max(seen[bucket] - (bucket + 1) * 500_000 for bucket in range(46, 70))
    assert "promises" not in failed(outcome)
    assert late_us <= BOUND_US + (0 if how == "kill" else 2 * S)


def test_a3_of_three_replicas_one_answers_when_another_dies_in_the_correction(lab: Lab) -> None:
    outcome = lab.run(
        lambda: union_of_two(3, "500ms"),
        Fault(3 * S, "cut", "s2<->main,main@2,main@3", 12 * S),
        Fault(16_300_000, "kill", "main", 4 * S),
        seconds=36,
        options=Options(group_buckets_max=4),
        tweak=group_steps(400_000),
    )
    assert not list(outcome.history.of(Deserted))
    assert "promises" not in failed(outcome)


@pytest.mark.parametrize("do", ["full", "hang"])
def test_a3_a_replica_that_is_stuck_is_not_read_while_the_other_one_corrects(
    lab: Lab, do: str
) -> None:
    outcome = lab.run(
        lambda: union_of_two(2, "500ms"),
        Fault(4 * S, "silent", "s2", 20 * S),
        Fault(8 * S, do, "main@2", 34 * S),
        seconds=44,
        options=Options(group_buckets_max=8),
        tweak=group_steps(130_000),
    )
    assert failed(outcome) == {}


def test_a4_a_replica_that_is_stuck_in_its_correction_keeps_nobody_tentative(lab: Lab) -> None:
    """Whichever of the two it is: one of them corrects itself just then."""
    outcomes = [
        lab.run(
            two_at_500_ms,
            Fault(3 * S, "cut", "s2<->main,main@2", 8 * S),
            Fault(12_100_000, "full", stuck, 30 * S),
            seconds=50,
            tweak=group_steps(70_000),
        )
        for stuck in ("main", "main@2")
    ]
    for outcome in outcomes:
        assert not {"available", "promises"} & failed(outcome).keys()
        assert given(outcome.history, "TENTATIVE", 20 * S, 50 * S) == []


# -- A5 to A8: how long results take ---------------------------------------------------------------


def test_a5_replicas_with_a_checkpoint_that_are_restarted_in_an_outage_go_on(lab: Lab) -> None:
    outcome = lab.run(
        two_at_500_ms,
        Fault(12 * S, "cut", "s2<->main,main@2", 25 * S),
        Fault(16 * S, "kill", "main", S),
        Fault(19 * S, "kill", "main@2", S),
        seconds=45,
        options=Options(checkpoint_buckets=5),
    )
    assert "available" not in failed(outcome)
    assert given(outcome.history, "TENTATIVE", 24 * S, 36 * S) != []


def three_fragments() -> Network:
    """Two fragments that each may wait, and a third that unites them: k is 2, X is 3 s."""
    net = Network("lab", bucket="100ms")
    s1, s2, s3 = sources(net, 3)
    left = net.union(s1.on("left"), s2.on("left")).apply(small)
    right = s3.on("right").apply(small)
    merged = net.union(left.on("end"), right.on("end")).apply(even)
    net.output("merged", merged, contract=Contract(within="6s"))
    for fragment in ("left", "right", "end"):
        net.protect(fragment, on_failure="delay", while_correcting="delay")
    return net


def test_a6_a_row_is_there_within_k_times_x(lab: Lab) -> None:
    outcome = lab.run(
        three_fragments,
        Fault(3 * S, "delay", "s2->left", 32 * S, 2_000.0),
        Fault(8 * S, "kill", "right", 25 * S),
        seconds=38,
        tweak=group_steps(3_000),
    )
    seen = first_seen_us(outcome.history, "merged")
    worst_us = max(seen[bucket] - bucket * 100_000 for bucket in range(120, 300))
    assert worst_us <= 6 * S + 2 * 150_000


@pytest.mark.parametrize("group", [8, 256])
def test_a7_an_input_that_is_always_late_costs_what_changes(lab: Lab, group: int) -> None:
    outcome = lab.run(
        lambda: union_of_two(1, "100ms", "3s"),
        Fault(2 * S, "skew", "s2", 68 * S, -15_000.0),
        seconds=60,
        options=Options(group_buckets_max=group),
        tweak=group_steps(5_000),
    )
    assert "standing" not in failed(outcome)
    due = 300  # in these 30 seconds
    assert len(given(outcome.history, "TENTATIVE", 30 * S, 60 * S)) <= 2 * due


def test_a8_a_stable_replica_that_is_behind_by_less_than_x_is_preferred(lab: Lab) -> None:
    outcome = lab.run(
        lambda: union_of_two(2, "100ms", "3s"),
        Fault(2 * S, "delay", "s2<->main@2", 17 * S, 500.0),
        Fault(3 * S, "cut", "s2<->main", 15 * S),
        seconds=20,
        tweak=group_steps(5_000),
    )
    assert "available" not in failed(outcome)
    assert given(outcome.history, "TENTATIVE", 8 * S, 17 * S) == []


# -- A9 to A12 -------------------------------------------------------------------------------------


def test_a9_an_x_that_cannot_work_is_refused_with_one_that_does() -> None:
    net = Network("lab", bucket="500ms")
    first = net.union(*(source.on("first") for source in sources(net, 2))).apply(small)
    third = first.on("second").apply(even).on("third").apply(even)
    net.output("merged", third, contract=Contract(within="1500ms"))  # 500 ms for each
    for fragment in ("first", "second", "third"):
        net.protect(fragment, on_failure="process", while_correcting="process")
    try:
        net.check()
        why = ""
    except NetworkError as err:
        why = str(err)
    named = {duration_us(text) for text in re.findall(r"\b[\d.]+(?:us|ms|s)\b", why)}
    assert 500_000 in named, "the X that was found"
    assert any(500_000 < us <= 1_000_000 for us in named), "the smallest X that works"


def answered(core: Progress, at: int, actions: Sequence[object]) -> None:
    """Steps take no time."""
    for action in actions:
        if isinstance(action, Run):
            done = StepDone(at, action.path, action.hi, needs_from=action.hi + 1, horizon=action.hi)
            answered(core, at, core.handle(done))
        elif isinstance(action, RunTentative):
            guessed = TentativeDone(at, action.path, action.line, action.hi)
            answered(core, at, core.handle(guessed))


def cost_of_a_bucket_s(core: Progress, first: int, last: int) -> float:
    """The least of several stretches, since others use this machine too."""
    costs = []
    for bucket in range(first, last):
        at = 500 * bucket
        began = time.process_time()
        answered(core, at, core.handle(BoundaryArrived(at, "s1", bucket, ((bucket, 10),))))
        costs.append(time.process_time() - began)
    return sorted(costs)[len(costs) // 4]


def test_a10_a_decision_costs_the_same_however_long_a_failure_lasts() -> None:
    core = stable(plan_of(PROCESS))
    early_s = cost_of_a_bucket_s(core, 5, 300)
    cost_of_a_bucket_s(core, 300, 7_700)
    late_s = cost_of_a_bucket_s(core, 7_700, 8_000)
    assert late_s < 5 * early_s


def test_a10_deadlines_do_not_pile_up_in_a_failure(lab: Lab) -> None:
    outcome = lab.run(
        pair,
        Fault(5 * S, "silent", "s2", 60 * S),
        seconds=75,
        options=Options(checkpoint_buckets=20),
    )
    assert "held" not in failed(outcome)


def test_a11_a_clock_that_is_set_ahead_makes_nothing_tentative(lab: Lab) -> None:
    """s2 is late, and not later than is borne. The clock is set while a bucket waits for it."""
    outcome = lab.run(
        lambda: union_of_two(1, "500ms"),
        Fault(2 * S, "delay", "s2->main", 20 * S, 600.0),
        Fault(10_450_000, "clock", "main", 6 * S, 3_600_000.0),
        seconds=24,
    )
    assert given(outcome.history, "TENTATIVE", 10 * S, 30 * S) == []
    assert failed(outcome) == {}


def test_a11_a_clock_that_is_set_back_keeps_no_one_alive(lab: Lab) -> None:
    outcome = lab.run(
        lambda: pairs(1, 4),
        Fault(10 * S, "pause", "lower.0", 9 * S),
        Fault(10_500_000, "clock", "controller", 12 * S, -3_600_000.0),
        seconds=30,
        options=Options(checkpoint_buckets=7),
    )
    assert "detected" not in failed(outcome)


def test_a11_a_timer_that_fires_early_is_set_again() -> None:
    core = stable(plan_of(PROCESS))
    needs(said(core, came(100, "s1", 5)) == [Wake(1_100)], "no timer was set")
    assert said(core, Tick(1_099)) == [Wake(1_100)]


def test_a12_a_function_that_fails_on_partial_input_stops_nobody(lab: Lab) -> None:
    """While s2 is away only tentative steps run, and the function does not bear them."""
    clock: list[Callable[[], int]] = []

    def picky(rows: Sequence[Row]) -> list[Row]:
        if clock and 6 * S < clock[0]() < 11 * S:
            raise ValueError("half of the rows are missing")
        return list(rows)

    def network() -> Network:
        net = Network("lab", bucket="500ms")
        net.output("merged", net.union(*sources(net, 2)).apply(picky))
        net.protect("main", on_failure="process", while_correcting="process", max_delay="1500ms")
        return net

    outcome = lab.run(
        network,
        Fault(5 * S, "cut", "s2<->main", 7 * S),
        seconds=20,
        tweak=lambda sim: clock.append(lambda: sim.world.now),
    )
    assert not {"alive", "lost"} & failed(outcome).keys()
