"""Which replica a reader follows, as transcripts. Sections and properties are Borealis'."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.replica_selector import LAG_BUCKETS
from holdfast.core.subscription import Delivered, Switched
from holdfast.types import OutputState
from tests.core.subscriptions import REPLICAS, STABILIZATION, STABLE, UP_FAILURE, Consumer

# -- section 3.3: the choice ----------------------------------------------------------------------


def test_the_first_that_answers_is_followed_whatever_its_state() -> None:
    for state in OutputState:
        assert Consumer().hears("b", state) == ["reads b"]


def test_3_3_a_stable_replica_is_kept_while_it_is_stable() -> None:
    consumer = Consumer()
    assert consumer.hears("b", STABLE) == ["reads b"]
    assert consumer.hears("a", STABLE) == []
    assert consumer.hears("b", STABLE, 10) == []
    assert consumer.main == "b"


@pytest.mark.parametrize("state", [UP_FAILURE, STABILIZATION])
def test_3_3_a_neighbour_that_is_no_longer_stable_is_left_for_one_that_is(
    state: OutputState,
) -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE)
    consumer.hears("b", STABLE)
    assert consumer.hears("a", state) == ["reads b"]


def test_3_3_without_a_stable_one_a_replica_in_up_failure_keeps_things_going() -> None:
    consumer = Consumer()
    consumer.hears("a", STABILIZATION)
    assert consumer.hears("b", UP_FAILURE) == ["corrects from a", "reads b"]


def test_3_3_what_comes_with_the_rows_counts_as_much_as_an_answer() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE)
    consumer.hears("b", STABLE)
    assert consumer.gets("a", STABLE, 10) == []
    assert consumer.gets("a", UP_FAILURE, 10) == ["reads b"]
    assert consumer.main == "b"


def test_rows_that_came_since_the_last_answer_show_how_far_a_replica_is() -> None:
    """Else a reader would take whom it reads for one that is behind: it has its last bucket."""
    consumer = Consumer()
    consumer.hears("a", STABLE, 9)
    consumer.hears("b", UP_FAILURE, 9, 14)
    consumer.gets("a", STABLE, 12)
    consumer.takes(12)
    assert consumer.hears("b", UP_FAILURE, 9, 15) == []
    consumer.gets("a", STABLE, 11)  # less than it said before
    assert consumer.hears("b", UP_FAILURE, 9, 16) == []


def test_nobody_switches_without_a_reason() -> None:
    """Two equals: the one that is followed is."""
    for state in OutputState:
        consumer = Consumer()
        consumer.hears("b", state)
        assert [a for a in consumer.hears("a", state) if a == "reads a"] == []
        assert consumer.main == "b"


# -- section 3.5: the four cases of property 2 ----------------------------------------------------


def test_property_2_1_from_stable_to_stable_it_goes_on_where_it_was() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE, 12)
    consumer.hears("b", STABLE, 12)
    assert consumer.loses("a", at=1) == ["reads b"]
    assert consumer.machine.at == 10


def test_property_2_2_from_up_failure_to_stable() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.takes(9, 14)
    assert consumer.hears("b", STABLE, 12) == ["reads b"]
    # The new one is told both: the last stable bucket and the last tentative one.
    assert (consumer.machine.at, consumer.machine.tentative_upto) == (10, 14)


def test_property_2_3_to_up_failure_only_what_is_younger_is_taken() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.takes(9, 14)
    consumer.hears("b", UP_FAILURE, 9, 15)
    assert consumer.loses("a", at=1) == ["reads b"]
    assert consumer.taking("b", UP_FAILURE).tentative_after == 14


def test_property_2_4_one_in_stabilization_only_corrects_in_the_background() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    assert consumer.hears("b", STABILIZATION, 9) == ["corrects from b"]
    assert consumer.taking("a", UP_FAILURE).tentative_after is not None
    assert consumer.taking("b", STABILIZATION).tentative_after is None
    assert (consumer.main, consumer.correcting) == ("a", "b")


def test_corrections_are_over_when_the_one_that_gave_them_is_stable() -> None:
    """REC_DONE came: it is followed for everything, and from nobody else is anything wanted."""
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 9)
    assert consumer.hears("b", STABLE, 14) == ["drops b", "reads b"]
    assert (consumer.main, consumer.correcting) == ("b", None)


def test_corrections_come_from_whoever_has_the_most_of_them() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 10)
    assert consumer.hears("c", STABILIZATION, 12) == ["corrects from c"]


def test_while_stable_rows_come_nobody_is_followed_beside() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE)
    assert consumer.hears("b", STABILIZATION, 20) == []
    assert consumer.correcting is None


# -- stable, and yet no better --------------------------------------------------------------------


def test_a_stable_replica_that_has_less_than_the_reader_is_not_preferred() -> None:
    """It was cut off, and does not know yet: what it would give is old."""
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 11)
    assert consumer.hears("b", STABLE, 8) == ["corrects from b"]
    assert consumer.main == "a"
    assert consumer.hears("b", STABLE, 9) == ["drops b", "reads b"]


def test_a_replica_that_was_cut_off_from_all_its_inputs_is_left() -> None:
    """It knows of no failure, so it calls itself stable, and does not get on."""
    consumer = Consumer()
    consumer.hears("a", STABLE, 9)
    consumer.hears("b", UP_FAILURE, 9, 9 + LAG_BUCKETS - 1)
    assert consumer.main == "a"
    assert consumer.hears("b", UP_FAILURE, 9, 9 + LAG_BUCKETS) == ["corrects from a", "reads b"]


def test_a_stable_replica_that_is_behind_is_still_better_than_one_in_stabilization() -> None:
    consumer = Consumer()
    consumer.hears("a", STABILIZATION, 5)
    assert consumer.hears("b", STABLE, 5) == ["reads b"]


def test_a_reader_that_has_nothing_finds_nobody_behind_itself() -> None:
    consumer = Consumer(at=None)
    consumer.hears("a", UP_FAILURE, 0, 2)
    assert consumer.hears("b", STABLE, 0) == ["reads b"]


@pytest.mark.parametrize("state", [STABLE, UP_FAILURE])
def test_one_that_lags_far_behind_its_equal_is_left_for_it(state: OutputState) -> None:
    consumer = Consumer()
    consumer.hears("a", state, 9)
    assert consumer.hears("b", state, 9 + LAG_BUCKETS - 1) == []
    assert consumer.hears("b", state, 9 + LAG_BUCKETS) == ["reads b"]
    assert consumer.hears("a", state, 9 + LAG_BUCKETS + 1) == []


def test_how_far_one_in_up_failure_is_counts_with_what_is_tentative() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 10)
    assert consumer.hears("b", UP_FAILURE, 9, 10 + LAG_BUCKETS) == ["reads b"]


def test_3_3_one_that_is_stuck_in_its_failure_is_left_for_one_that_corrects_itself() -> None:
    """It answers nothing new, and the other one does, beside its correction."""
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 6, 16)
    assert consumer.hears("b", STABILIZATION, 20, 100) == ["reads b"]
    assert consumer.hears("a", UP_FAILURE, 6, 99) == ["corrects from b", "reads a"]


# -- replicas that go -----------------------------------------------------------------------------


def test_when_the_one_that_is_followed_goes_it_is_known_since_when() -> None:
    consumer = Consumer()
    consumer.hears("a", STABLE)
    assert consumer.loses("a", at=77) == ["drops a"]
    assert consumer.main is None
    assert consumer.hears("c", STABLE, at=80) == ["reads c"]
    actions = consumer.handle(Delivered(90, max(consumer.open), 1, 10, 9, STABLE))
    assert Switched("c", 13) in actions


def test_when_the_one_that_corrects_goes_another_does() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 12)
    consumer.hears("c", STABILIZATION, 11)
    assert consumer.loses("b", at=1) == ["corrects from c"]
    assert consumer.loses("c", at=2) == ["drops c"]
    assert (consumer.main, consumer.correcting) == ("a", None)


def test_when_only_the_one_that_corrects_is_left_it_is_followed() -> None:
    consumer = Consumer()
    consumer.hears("a", UP_FAILURE, 9, 14)
    consumer.hears("b", STABILIZATION, 12)
    assert consumer.loses("a", at=1) == ["drops b", "reads b"]


@pytest.mark.parametrize("order", list(permutations(REPLICAS)))
@pytest.mark.parametrize("states", list(permutations(OutputState)))
def test_replicas_that_die_in_any_order_are_replaced_until_none_is_left(
    order: tuple[str, ...], states: tuple[OutputState, ...]
) -> None:
    """The best of those that are left is followed: STABLE, else UP_FAILURE, else what is there."""
    consumer = Consumer()
    standing = dict(zip(REPLICAS, states, strict=True))
    for replica, state in standing.items():
        consumer.hears(replica, state)
    for dead in order:
        rank = [STABLE, UP_FAILURE, STABILIZATION]
        best = min(standing, key=lambda replica: rank.index(standing[replica]))
        assert consumer.main == best
        del standing[dead]
        consumer.loses(dead, at=1)
    assert (consumer.main, consumer.correcting) == (None, None)
    assert consumer.hears(order[0], STABILIZATION) == [f"reads {order[0]}"]


# -- how far behind is too far --------------------------------------------------------------------


def test_stable_rows_a_little_later_are_better_than_tentative_ones_now() -> None:
    consumer = Consumer(tolerance_buckets=20)
    consumer.hears("a", STABLE, 9)
    assert consumer.hears("b", UP_FAILURE, 9, 29) == []
    assert consumer.hears("b", UP_FAILURE, 9, 30) == ["corrects from a", "reads b"]


def test_a_stable_replica_that_comes_within_what_may_be_waited_is_read_again() -> None:
    consumer = Consumer(tolerance_buckets=20)
    consumer.hears("b", UP_FAILURE, 9, 60)
    assert consumer.hears("a", STABLE, 39) == ["corrects from a"]
    assert consumer.hears("a", STABLE, 40) == ["drops a", "reads a"]


def test_of_two_stable_replicas_the_one_that_has_what_is_wanted_is_read() -> None:
    consumer = Consumer(at=30, tolerance_buckets=50)
    assert consumer.hears("a", STABLE, 20) == ["reads a"]
    assert consumer.hears("b", STABLE, 29) == ["reads b"]


def test_a_replica_that_completed_the_stream_is_read_when_the_other_has_all_but_the_end() -> None:
    consumer = Consumer(at=30)
    assert consumer.hears("a", STABLE, 29) == ["reads a"]
    assert consumer.hears("b", STABLE, 29) == []
    assert consumer.hears("b", STABLE, 29, ended=True) == ["reads b"]
    assert consumer.hears("a", STABLE, 29, ended=True) == []


# -- whatever comes -------------------------------------------------------------------------------

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
def test_the_best_that_is_known_is_read_and_nobody_twice(
    at: int | None, story: list[tuple[Any, ...]]
) -> None:
    consumer = Consumer(at)
    known: dict[str, tuple[OutputState, int, int | None]] = {}
    for kind, replica, *more in story:
        read = replica in (consumer.main, consumer.correcting)
        if kind == "gets" and not read:
            continue
        chosen = kind != "gets" or known[replica][0] is not more[0]
        getattr(consumer, kind)(replica, *more)
        if kind == "hears":
            known[replica] = (more[0], more[1], more[2])
        elif kind == "loses":
            known.pop(replica, None)
        else:
            _, upto, tentative_upto = known[replica]
            known[replica] = (more[0], max(upto, more[1]), tentative_upto)
        assert (consumer.main is None) == (not known)
        if consumer.main is None:
            continue
        assert consumer.main in known and consumer.main != consumer.correcting
        furthest = max(max(upto, tentative or upto) for _, upto, tentative in known.values())
        near = [
            name
            for name, (state, upto, _) in known.items()
            if state is STABLE and furthest - upto < LAG_BUCKETS
        ]
        assert not (near and chosen) or consumer.main in near
        if consumer.correcting is not None:
            assert known[consumer.main][0] is UP_FAILURE
            assert known[consumer.correcting][0] is not UP_FAILURE
