"""Which replica a reader follows, as transcripts. Sections and properties are Borealis'."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.following import Following
from holdfast.core.upstream import LAG_BUCKETS, Action, Drop, Follow, Gone, Heard, Upstream
from holdfast.types import OutputState

STABLE = OutputState.STABLE
UP_FAILURE = OutputState.UP_FAILURE
STABILIZATION = OutputState.STABILIZATION
REPLICAS = ("a", "b", "c")


def reader(at: int | None = 10, replicas: tuple[str, ...] = REPLICAS) -> Upstream:
    """It has everything up to bucket 9."""
    return Upstream(replicas, Following(at, tentative=True))


def stands(
    upstream: Upstream,
    replica: str,
    state: OutputState,
    upto: int = 9,
    tentative_upto: int | None = None,
) -> list[Action]:
    return upstream.handle(Heard(0, replica, state, upto, tentative_upto))


def follows(replica: str) -> Follow:
    return Follow(replica, correcting=False)


def corrects(replica: str) -> Follow:
    return Follow(replica, correcting=True)


# -- section 3.3: the choice ----------------------------------------------------------------------


def test_the_first_that_answers_is_followed_whatever_its_state() -> None:
    for state in OutputState:
        assert stands(reader(), "b", state) == [follows("b")]


def test_3_3_a_stable_replica_is_kept_while_it_is_stable() -> None:
    upstream = reader()
    assert stands(upstream, "b", STABLE) == [follows("b")]
    assert stands(upstream, "a", STABLE) == []
    assert stands(upstream, "b", STABLE, 10) == []
    assert upstream.main == "b"


@pytest.mark.parametrize("state", [UP_FAILURE, STABILIZATION])
def test_3_3_a_neighbour_that_is_no_longer_stable_is_left_for_one_that_is(
    state: OutputState,
) -> None:
    upstream = reader()
    stands(upstream, "a", STABLE)
    stands(upstream, "b", STABLE)
    assert stands(upstream, "a", state) == [follows("b")]


def test_3_3_without_a_stable_one_a_replica_in_up_failure_keeps_things_going() -> None:
    upstream = reader()
    stands(upstream, "a", STABILIZATION)
    assert stands(upstream, "b", UP_FAILURE) == [follows("b"), corrects("a")]


def test_3_3_what_comes_with_the_rows_counts_as_much_as_an_answer() -> None:
    upstream = reader()
    stands(upstream, "a", STABLE)
    stands(upstream, "b", STABLE)
    assert upstream.said(0, "a", STABLE, 10) == []
    assert upstream.said(0, "a", UP_FAILURE, 10) == [follows("b")]
    assert upstream.said(0, "c", STABLE, 10) == []  # nobody knows how that one stands
    assert upstream.main == "b"


def test_rows_that_came_since_the_last_answer_show_how_far_a_replica_is() -> None:
    """Else a reader would take whom it reads for one that is behind: it has its last bucket."""
    upstream = reader(at=10)
    stands(upstream, "a", STABLE, 9)
    stands(upstream, "b", UP_FAILURE, 9, 14)
    upstream.said(0, "a", STABLE, 12)
    upstream.following.taken(12)
    assert stands(upstream, "b", UP_FAILURE, 9, 15) == []
    upstream.said(0, "a", STABLE, 11)  # less than it said before
    assert stands(upstream, "b", UP_FAILURE, 9, 16) == []


def test_nobody_switches_without_a_reason() -> None:
    """Two equals: the one that is followed is."""
    for state in OutputState:
        upstream = reader()
        stands(upstream, "b", state)
        assert [a for a in stands(upstream, "a", state) if a == follows("a")] == []
        assert upstream.main == "b"


# -- section 3.5: the four cases of property 2 ----------------------------------------------------


def test_property_2_1_from_stable_to_stable_it_goes_on_where_it_was() -> None:
    upstream = reader(at=10)
    stands(upstream, "a", STABLE, 12)
    stands(upstream, "b", STABLE, 12)
    assert upstream.handle(Gone(1, "a")) == [follows("b")]
    assert upstream.following.at == 10


def test_property_2_2_from_up_failure_to_stable() -> None:
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 14)
    upstream.following.taken_tentative(14)
    assert stands(upstream, "b", STABLE, 12) == [follows("b")]
    # The new one is told both: the last stable bucket and the last tentative one.
    assert (upstream.following.at, upstream.following.tentative_after) == (10, 14)


def test_property_2_3_to_up_failure_only_what_is_younger_is_taken() -> None:
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 14)
    upstream.following.taken_tentative(14)
    stands(upstream, "b", UP_FAILURE, 9, 15)
    assert upstream.handle(Gone(1, "a")) == [follows("b")]
    assert upstream.takes_tentative("b") and not upstream.takes_tentative("a")
    assert [upstream.following.is_younger(bucket) for bucket in (13, 14, 15)] == [
        False,
        False,
        True,
    ]


def test_property_2_4_one_in_stabilization_only_corrects_in_the_background() -> None:
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 14)
    assert stands(upstream, "b", STABILIZATION, 9) == [corrects("b")]
    assert upstream.takes_tentative("a") and not upstream.takes_tentative("b")
    assert (upstream.main, upstream.correcting) == ("a", "b")


def test_corrections_are_over_when_the_one_that_gave_them_is_stable() -> None:
    """REC_DONE came: it is followed for everything, and from nobody else is anything wanted."""
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 14)
    stands(upstream, "b", STABILIZATION, 9)
    assert stands(upstream, "b", STABLE, 14) == [Drop(correcting=True), follows("b")]
    assert (upstream.main, upstream.correcting) == ("b", None)


def test_corrections_come_from_whoever_has_the_most_of_them() -> None:
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 14)
    stands(upstream, "b", STABILIZATION, 10)
    assert stands(upstream, "c", STABILIZATION, 12) == [corrects("c")]


def test_while_stable_rows_come_nobody_is_followed_beside() -> None:
    upstream = reader()
    stands(upstream, "a", STABLE)
    assert stands(upstream, "b", STABILIZATION, 20) == []
    assert upstream.correcting is None


# -- stable, and yet no better --------------------------------------------------------------------


def test_a_stable_replica_that_has_less_than_the_reader_is_not_preferred() -> None:
    """It was cut off, and does not know yet: what it would give is old."""
    upstream = reader(at=10)
    stands(upstream, "a", UP_FAILURE, 9, 11)
    assert stands(upstream, "b", STABLE, 8) == [corrects("b")]
    assert upstream.main == "a"
    assert stands(upstream, "b", STABLE, 9) == [Drop(correcting=True), follows("b")]


def test_a_replica_that_was_cut_off_from_all_its_inputs_is_left() -> None:
    """It knows of no failure, so it calls itself stable, and does not get on."""
    upstream = reader(at=10)
    stands(upstream, "a", STABLE, 9)
    stands(upstream, "b", UP_FAILURE, 9, 9 + LAG_BUCKETS - 1)
    assert upstream.main == "a"
    assert stands(upstream, "b", UP_FAILURE, 9, 9 + LAG_BUCKETS) == [follows("b"), corrects("a")]


def test_a_stable_replica_that_is_behind_is_still_better_than_one_in_stabilization() -> None:
    upstream = reader(at=10)
    stands(upstream, "a", STABILIZATION, 5)
    assert stands(upstream, "b", STABLE, 5) == [follows("b")]


def test_a_reader_that_has_nothing_finds_nobody_behind_itself() -> None:
    upstream = reader(at=None)
    stands(upstream, "a", UP_FAILURE, 0, 2)
    assert stands(upstream, "b", STABLE, 0) == [follows("b")]


@pytest.mark.parametrize("state", [STABLE, UP_FAILURE])
def test_one_that_lags_far_behind_its_equal_is_left_for_it(state: OutputState) -> None:
    upstream = reader()
    stands(upstream, "a", state, 9)
    assert stands(upstream, "b", state, 9 + LAG_BUCKETS - 1) == []
    assert stands(upstream, "b", state, 9 + LAG_BUCKETS) == [follows("b")]
    assert stands(upstream, "a", state, 9 + LAG_BUCKETS + 1) == []


def test_how_far_one_in_up_failure_is_counts_with_what_is_tentative() -> None:
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 10)
    assert stands(upstream, "b", UP_FAILURE, 9, 10 + LAG_BUCKETS) == [follows("b")]


# -- replicas that go -----------------------------------------------------------------------------


def test_when_the_one_that_is_followed_goes_it_is_known_since_when() -> None:
    upstream = reader()
    stands(upstream, "a", STABLE)
    assert upstream.handle(Gone(77, "a")) == []
    assert (upstream.main, upstream.lost_at) == (None, 77)
    assert stands(upstream, "c", STABLE) == [follows("c")]


def test_when_the_one_that_corrects_goes_another_does() -> None:
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 14)
    stands(upstream, "b", STABILIZATION, 12)
    stands(upstream, "c", STABILIZATION, 11)
    assert upstream.handle(Gone(1, "b")) == [corrects("c")]
    assert upstream.handle(Gone(2, "c")) == []
    assert (upstream.main, upstream.correcting) == ("a", None)


def test_when_only_the_one_that_corrects_is_left_it_is_followed() -> None:
    upstream = reader()
    stands(upstream, "a", UP_FAILURE, 9, 14)
    stands(upstream, "b", STABILIZATION, 12)
    assert upstream.handle(Gone(1, "a")) == [Drop(correcting=True), follows("b")]


@pytest.mark.parametrize("order", list(permutations(REPLICAS)))
@pytest.mark.parametrize("states", list(permutations(OutputState)))
def test_replicas_that_die_in_any_order_are_replaced_until_none_is_left(
    order: tuple[str, ...], states: tuple[OutputState, ...]
) -> None:
    """The best of those that are left is followed: STABLE, else UP_FAILURE, else what is there."""
    upstream = reader()
    standing = dict(zip(REPLICAS, states, strict=True))
    for replica, state in standing.items():
        stands(upstream, replica, state)
    for dead in order:
        rank = [STABLE, UP_FAILURE, STABILIZATION]
        best = min(standing, key=lambda replica: rank.index(standing[replica]))
        assert upstream.main == best
        del standing[dead]
        upstream.handle(Gone(1, dead))
    assert (upstream.main, upstream.correcting) == (None, None)
    assert stands(upstream, order[0], STABILIZATION) == [follows(order[0])]


# -- whatever comes -------------------------------------------------------------------------------

positions = st.integers(0, 30)
news = st.one_of(
    st.builds(
        Heard, st.just(0), st.sampled_from(REPLICAS), st.sampled_from(OutputState), positions,
        st.one_of(st.none(), st.integers(31, 60)),
    ),
    st.builds(Gone, st.just(0), st.sampled_from(REPLICAS)),
    st.tuples(st.sampled_from(REPLICAS), st.sampled_from(OutputState), positions),
)  # fmt: skip


@given(st.one_of(st.none(), positions), st.lists(st.tuples(news, positions), max_size=40))
def test_the_best_that_is_known_is_followed_and_nobody_twice(
    at: int | None, story: list[tuple[Heard | Gone | tuple[str, OutputState, int], int]]
) -> None:
    upstream = reader(at)
    known: dict[str, Heard] = {}
    #: Whom the shell reads in which role, by the actions alone.
    lines: dict[bool, str] = {}
    for event, taken in story:
        chosen = True
        if isinstance(event, tuple):
            replica, state, upto = event
            chosen = replica in known and known[replica].state is not state
            actions = upstream.said(0, replica, state, upto)
            if replica in known:
                heard = known[replica]
                known[replica] = replace(heard, state=state, upto=max(upto, heard.upto))
        else:
            actions = upstream.handle(event)
            if isinstance(event, Heard):
                known[event.replica] = event
            else:
                known.pop(event.replica, None)
                lines = {role: name for role, name in lines.items() if name != event.replica}
        for action in actions:
            if isinstance(action, Drop):
                del lines[action.correcting]
            else:
                assert lines.get(action.correcting) != action.replica
                lines[action.correcting] = action.replica

        assert (lines.get(False), lines.get(True)) == (upstream.main, upstream.correcting)
        assert (upstream.main is None) == (not known)
        if upstream.main is None:
            continue
        assert upstream.main in known and upstream.main != upstream.correcting
        reached = upstream.following.at
        furthest = max(
            heard.upto if heard.tentative_upto is None else heard.tentative_upto
            for heard in known.values()
        )
        stable = [
            heard.replica
            for heard in known.values()
            if heard.state is STABLE
            and (reached is None or heard.upto >= reached - 1)
            and furthest - heard.upto < LAG_BUCKETS
        ]
        assert not (stable and chosen) or upstream.main in stable
        if upstream.correcting is not None:
            assert known[upstream.main].state is UP_FAILURE
            assert known[upstream.correcting].state is not UP_FAILURE
        upstream.following.taken(taken)
