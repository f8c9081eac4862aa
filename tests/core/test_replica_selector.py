"""Transcripts of the replica selection of a consumer. Sections and properties are those of
Borealis.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.replica_selector import LAG_BUCKETS, STEP_US, ReplicaSelector, Status
from holdfast.core.subscription import Delivered, Switched
from holdfast.types import OutputState
from tests.core.subscriptions import REPLICAS, STABILIZATION, STABLE, UP_FAILURE, Consumer

S = 1_000_000

# -- section 3.3: selection of a replica ----------------------------------------------------------


def test_a_consumer_reads_the_first_replica_that_reports_in_any_state() -> None:
    for state in OutputState:
        assert Consumer().hears("b", state) == ["reads b"]


def test_3_3_a_consumer_keeps_a_stable_replica() -> None:
    consumer = Consumer()
    assert consumer.hears("b", STABLE) == ["reads b"]
    assert consumer.hears("a", STABLE) == []
    assert consumer.hears("b", STABLE, 10) == []
    assert consumer.main == "b"


@pytest.mark.parametrize("state", [UP_FAILURE, STABILIZATION])
def test_3_3_a_consumer_leaves_a_replica_that_is_no_longer_stable_for_a_stable_one(
    state: OutputState,
) -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE)
    consumer.hears("b", STABLE)
    assert consumer.hears("a", state) == ["reads b"]


def test_3_3_without_a_stable_replica_one_in_up_failure_is_preferred() -> None:
    consumer = Consumer()
    consumer.hears("a", STABILIZATION)
    assert consumer.hears("b", UP_FAILURE) == ["corrects from a", "reads b"]


def test_3_3_the_state_in_a_delivery_counts_like_a_reported_status() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE)
    consumer.hears("b", STABLE)
    assert consumer.gets("a", STABLE, 10) == []
    assert consumer.gets("a", UP_FAILURE, 10) == ["reads b"]
    assert consumer.main == "b"


def test_deliveries_since_the_last_report_update_the_position_of_a_replica() -> None:
    """Without that, the replica that delivered the newest bucket would count as behind."""
    consumer = Consumer()
    consumer.hears("a", STABLE, 9)
    consumer.hears("b", UP_FAILURE, 9, 14)
    consumer.gets("a", STABLE, 12)
    consumer.takes(12)
    assert consumer.hears("b", UP_FAILURE, 9, 15) == []
    consumer.gets("a", STABLE, 11)  # less than before
    assert consumer.hears("b", UP_FAILURE, 9, 16) == []


def test_a_consumer_does_not_switch_between_equal_replicas() -> None:
    """Of two equal replicas, the consumer keeps the one that it reads."""
    for state in OutputState:
        consumer = Consumer()
        consumer.hears("b", state)
        assert [a for a in consumer.hears("a", state) if a == "reads a"] == []
        assert consumer.main == "b"


# -- section 3.5: the four cases of property 2 ----------------------------------------------------


def test_property_2_1_from_stable_to_stable_the_consumer_continues_at_its_position() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE, 12)
    consumer.hears("b", STABLE, 12)
    assert consumer.loses("a", at=1) == ["reads b"]
    assert consumer.machine.at == 10


def test_property_2_2_from_up_failure_to_stable_both_positions_are_kept() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.takes(9, 14)
    assert consumer.hears("b", STABLE, 12) == ["reads b"]
    # The request to the new replica has both: the last stable and the last tentative bucket.
    assert (consumer.machine.at, consumer.machine.tentative_upto) == (10, 14)


def test_property_2_3_from_a_replica_in_up_failure_only_newer_tentative_buckets_are_taken() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.takes(9, 14)
    consumer.hears("b", UP_FAILURE, 9, 15)
    assert consumer.loses("a", at=1) == ["reads b"]
    assert consumer.taking("b", UP_FAILURE).tentative_after == 14


def test_property_2_4_a_replica_in_stabilization_is_read_only_for_corrections() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    assert consumer.hears("b", STABILIZATION, 9) == ["corrects from b"]
    assert consumer.taking("a", UP_FAILURE).tentative_after is not None
    assert consumer.taking("b", STABILIZATION).tentative_after is None
    assert (consumer.main, consumer.correcting) == ("a", "b")


def test_corrections_end_when_the_correcting_replica_is_stable() -> None:
    """After REC_DONE the replica is read for everything, and no other replica is read."""
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 9)
    assert consumer.hears("b", STABLE, 14) == ["drops b", "reads b"]
    assert (consumer.main, consumer.correcting) == ("b", None)


def test_corrections_are_read_from_the_replica_that_has_the_most() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 10)
    assert consumer.hears("c", STABILIZATION, 12) == ["corrects from c"]


def test_no_replica_is_read_for_corrections_beside_a_stable_one() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE, 18)
    assert consumer.hears("b", STABILIZATION, 20) == []
    assert consumer.correcting is None


def test_a_stuck_stable_replica_does_not_hide_one_that_is_correcting_and_ahead() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE, 9)
    assert consumer.hears("b", STABILIZATION, 11) == []
    assert consumer.hears("b", STABILIZATION, 12) == ["reads b"]
    assert consumer.hears("b", STABLE, 13) == []


def test_a_replica_that_starts_far_behind_is_not_read_instead_of_a_stuck_one() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE, 9)
    assert consumer.hears("b", STABILIZATION, 5) == []
    assert consumer.hears("b", STABILIZATION, 9) == []


def test_with_wide_buckets_a_replica_without_progress_is_left_after_ten_seconds() -> None:
    """Three buckets may take minutes."""
    selector = ReplicaSelector(["a", "b"])
    selector.heard(0, "a", Status(STABLE, 5))
    selector.heard(0, "b", Status(STABLE, 5))
    assert selector.choose(0, 6).main == "a"
    selector.heard(S, "b", Status(STABLE, 6))
    assert selector.choose(S, 6).main == "a"
    assert selector.choose(S + STEP_US - 1, 6).main == "a"
    assert selector.choose(S + STEP_US, 6).main == "b"


def test_a_slow_replica_that_makes_progress_is_not_left() -> None:
    selector = ReplicaSelector(["a", "b"])
    for bucket in range(5):
        at = bucket * STEP_US
        selector.heard(at, "a", Status(STABLE, bucket))
        selector.heard(at, "b", Status(STABLE, bucket + 1))
        assert selector.choose(at, bucket).main == "a"


# -- stable replicas that are behind --------------------------------------------------------------


def test_a_stable_replica_that_is_behind_the_consumer_is_not_preferred() -> None:
    """The replica was cut off without noticing it yet: its buckets are old."""
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 11)
    assert consumer.hears("b", STABLE, 8) == ["corrects from b"]
    assert consumer.main == "a"
    assert consumer.hears("b", STABLE, 9) == ["drops b", "reads b"]


def test_a_consumer_leaves_a_replica_that_was_cut_off_from_all_its_inputs() -> None:
    """The replica knows of no failure: it reports STABLE and makes no progress."""
    consumer = Consumer()
    consumer.hears("a", STABLE, 9)
    consumer.hears("b", UP_FAILURE, 9, 9 + LAG_BUCKETS - 1)
    assert consumer.main == "a"
    assert consumer.hears("b", UP_FAILURE, 9, 9 + LAG_BUCKETS) == ["corrects from a", "reads b"]


def test_a_stable_replica_that_is_behind_is_preferred_to_one_in_stabilization() -> None:
    consumer = Consumer()
    consumer.hears("a", STABILIZATION, 5)
    assert consumer.hears("b", STABLE, 5) == ["reads b"]


def test_no_replica_is_behind_a_consumer_without_a_position() -> None:
    consumer = Consumer(at=None)
    consumer.hears("a", UP_FAILURE, 0, 2)
    assert consumer.hears("b", STABLE, 0) == ["reads b"]


@pytest.mark.parametrize("state", [STABLE, UP_FAILURE])
def test_a_consumer_leaves_a_replica_that_lags_far_behind_an_equal_one(state: OutputState) -> None:
    consumer = Consumer()
    consumer.hears("a", state, 9)
    assert consumer.hears("b", state, 9 + LAG_BUCKETS - 1) == []
    assert consumer.hears("b", state, 9 + LAG_BUCKETS) == ["reads b"]
    assert consumer.hears("a", state, 9 + LAG_BUCKETS + 1) == []


def test_the_position_of_a_replica_in_up_failure_includes_tentative_buckets() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 10)
    assert consumer.hears("b", UP_FAILURE, 9, 10 + LAG_BUCKETS) == ["reads b"]


def test_3_3_a_replica_stuck_in_up_failure_is_left_for_one_in_stabilization() -> None:
    """The stuck replica gives no new results; its peer gives new results beside its correction."""
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 6, 16)
    assert consumer.hears("b", STABILIZATION, 20, 100) == ["reads b"]
    assert consumer.hears("a", UP_FAILURE, 6, 99) == ["corrects from b", "reads a"]


# -- replicas that become unreachable -------------------------------------------------------------


def test_a_switch_reports_how_long_no_replica_was_read() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE)
    assert consumer.loses("a", at=77) == ["drops a"]
    assert consumer.main is None
    assert consumer.hears("c", STABLE, at=80) == ["reads c"]
    actions = consumer.handle(Delivered(90, max(consumer.open), 1, 10, 9, STABLE))
    assert Switched("c", 13) in actions


def test_another_replica_corrects_when_the_correcting_one_is_unreachable() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 12)
    consumer.hears("c", STABILIZATION, 11)
    assert consumer.loses("b", at=1) == ["corrects from c"]
    assert consumer.loses("c", at=2) == ["drops c"]
    assert (consumer.main, consumer.correcting) == ("a", None)


def test_the_correcting_replica_becomes_the_main_one_when_it_is_the_only_one() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 12)
    assert consumer.loses("a", at=1) == ["drops b", "reads b"]


@pytest.mark.parametrize("order", list(permutations(REPLICAS)))
@pytest.mark.parametrize("states", list(permutations(OutputState)))
def test_the_best_remaining_replica_is_read_in_whatever_order_replicas_die(
    order: tuple[str, ...], states: tuple[OutputState, ...]
) -> None:
    """STABLE is preferred to UP_FAILURE, and UP_FAILURE to STABILIZATION."""
    consumer = Consumer()
    state_of = dict(zip(REPLICAS, states, strict=True))
    for replica, state in state_of.items():
        consumer.hears(replica, state)
    for dead in order:
        rank = [STABLE, UP_FAILURE, STABILIZATION]
        best = min(state_of, key=lambda replica: rank.index(state_of[replica]))
        assert consumer.main == best
        del state_of[dead]
        consumer.loses(dead, at=1)
    assert (consumer.main, consumer.correcting) == (None, None)
    assert consumer.hears(order[0], STABILIZATION) == [f"reads {order[0]}"]


# -- tolerance: how far behind is too far ---------------------------------------------------------


def test_stable_rows_within_the_tolerance_are_preferred_to_newer_tentative_rows() -> None:
    consumer = Consumer(tolerance_buckets=20)
    consumer.hears("a", STABLE, 9)
    assert consumer.hears("b", UP_FAILURE, 9, 29) == []
    assert consumer.hears("b", UP_FAILURE, 9, 30) == ["corrects from a", "reads b"]


def test_a_stable_replica_that_returns_within_the_tolerance_is_read_again() -> None:
    consumer = Consumer(tolerance_buckets=20)
    consumer.hears("b", UP_FAILURE, 9, 60)
    assert consumer.hears("a", STABLE, 39) == ["corrects from a"]
    assert consumer.hears("a", STABLE, 40) == ["drops a", "reads a"]


def test_of_two_stable_replicas_the_one_that_has_caught_up_with_the_consumer_is_read() -> None:
    consumer = Consumer(at=30, tolerance_buckets=50)
    assert consumer.hears("a", STABLE, 20) == ["reads a"]
    assert consumer.hears("b", STABLE, 29) == ["reads b"]


def test_a_replica_that_completed_the_stream_is_preferred_to_one_without_the_end() -> None:
    consumer = Consumer(at=30)
    assert consumer.hears("a", STABLE, 29) == ["reads a"]
    assert consumer.hears("b", STABLE, 29) == []
    assert consumer.hears("b", STABLE, 29, ended=True) == ["reads b"]
    assert consumer.hears("a", STABLE, 29, ended=True) == []


# -- random events --------------------------------------------------------------------------------

positions = st.integers(0, 30)
replicas = st.sampled_from(REPLICAS)
states = st.sampled_from(OutputState)
news = st.one_of(
    st.tuples(
        st.just("hears"), replicas, states, positions, st.one_of(st.none(), st.integers(31, 60))
    ),
    st.tuples(st.just("loses"), replicas),
    st.tuples(st.just("gets"), replicas, states, positions),
)


@settings(deadline=None)
@given(st.one_of(st.none(), positions), st.lists(news, max_size=40))
def test_the_best_replica_is_read_and_none_is_read_twice(
    at: int | None, story: list[tuple[Any, ...]]
) -> None:
    consumer = Consumer(at)
    statuses: dict[str, tuple[OutputState, int, int | None]] = {}
    for kind, replica, *values in story:
        read = replica in (consumer.main, consumer.correcting)
        if kind == "gets" and not read:
            continue
        chosen = kind != "gets" or statuses[replica][0] is not values[0]
        getattr(consumer, kind)(replica, *values)
        if kind == "hears":
            statuses[replica] = (values[0], values[1], values[2])
        elif kind == "loses":
            statuses.pop(replica, None)
        else:
            _, upto, tentative_upto = statuses[replica]
            statuses[replica] = (values[0], max(upto, values[1]), tentative_upto)
        assert (consumer.main is None) == (not statuses)
        if consumer.main is None:
            continue
        assert consumer.main in statuses and consumer.main != consumer.correcting
        furthest = max(max(upto, tentative or upto) for _, upto, tentative in statuses.values())
        near = [
            name
            for name, (state, upto, _) in statuses.items()
            if state is STABLE and furthest - upto < LAG_BUCKETS
        ]
        assert not (near and chosen) or consumer.main in near
        if consumer.correcting is not None:
            assert statuses[consumer.main][0] is UP_FAILURE
            assert statuses[consumer.correcting][0] is not UP_FAILURE
