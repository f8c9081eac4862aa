"""Replicas use each other while one corrects itself (Borealis section 3.4.3), as transcripts.

First what one replica does, then several of them in virtual time (`replicas`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from holdfast.core.correction_leases import (
    ASK_AGAIN_US,
    PROMISE_US,
    RELY_US,
    RENEW_US,
    STALLED_US,
    Answer,
    Promises,
)
from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Answered,
    Ask,
    Asked,
    BoundaryArrived,
    Change,
    End,
    Leave,
    Reply,
    Run,
    Tick,
    Wake,
)
from holdfast.core.replica_selector import LAG_BUCKETS
from holdfast.types import OutputState
from tests.core.replicas import MS, POLICY, SILENCE, WIDTH, Replicas, X
from tests.core.transcripts import (
    PROCESS,
    STABILIZATION,
    STABLE,
    came,
    done,
    failed,
    guess,
    guessed,
    plan_of,
    said,
    stable,
)

WITH_PEER = replace(PROCESS, while_correcting="process", peers=("p.2",))
WITH_TWO = replace(WITH_PEER, peers=("p.2", "p.3"))


def answered(at: int, answer: Answer, peer: str = "p.2", correction: int = 1) -> Answered:
    """A peer that goes on answering gets on meanwhile."""
    reached = at if answer == "answering" else None
    return Answered(at, "p", peer, correction, answer, reached)


def asked(at: int, peer: str = "p.2", position: int = 4, ticket: int = 7, done: bool = False,
          correction: int = 1, started: bool = True) -> Asked:  # fmt: skip
    return Asked(at, ticket, "p", peer, correction, position, started, done)


def answer(core: Progress, event: Asked) -> Answer:
    first, *_ = said(core, event)
    assert isinstance(first, Reply) and first.ticket == event.ticket
    return first.answer


# -- the one that corrects itself -----------------------------------------------------------------


def test_3_4_3_before_reconciling_a_node_asks_another_replica_to_go_on_answering() -> None:
    core = failed(WITH_PEER, me="p.1")
    ask = Ask("p", correction=1, position=4)
    assert said(core, came(1_200, "s2", 5)) == [ask, Wake(1_200 + RENEW_US)]
    assert said(core, Tick(1_250)) == [Wake(1_200 + RENEW_US)]  # asked once
    assert said(core, answered(1_300, "answering"))[:2] == [STABILIZATION, Run("p", 5, 5)]


def test_3_4_3_while_the_peer_answers_new_buckets_wait_here() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert said(core, came(1_400, "s1", 6)) == []
    assert said(core, came(10_000, "s2", 6), done(10_100, 5))[:2] == [
        Leave("p"), Run("p", 6, 6, spent_us=8_700),
    ]  # fmt: skip


def test_3_4_3_who_has_caught_up_tells_its_peers() -> None:
    """They need not wait any longer."""
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert said(core, done(10_000, 5)) == [Leave("p"), STABLE, Ask("p", 1, 5, done=True)]


def test_3_4_3_where_no_peer_is_there_a_replica_runs_both_versions_itself() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5))
    assert said(core, answered(1_300, "away"))[:2] == [STABILIZATION, Run("p", 5, 5)]
    said(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    assert said(core, Tick(2_400))[0] == guess(6, 6)


def test_a_promise_of_one_that_is_far_behind_is_not_relied_on() -> None:
    """It hangs, or has a full disk, and answers questions all the same."""
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5))
    stuck = Answered(1_300, "p", "p.2", 1, "answering", 5 - LAG_BUCKETS - 1)
    assert said(core, stuck)[:2] == [STABILIZATION, Run("p", 5, 5)]
    said(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    assert said(core, Tick(2_400))[0] == guess(6, 6)


def test_3_4_3_refused_it_goes_on_as_tentative_and_asks_again() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5))
    assert said(core, answered(1_300, "refused")) == [Wake(1_300 + ASK_AGAIN_US)]
    again = 1_300 + ASK_AGAIN_US
    assert said(core, Tick(again)) == [Ask("p", 1, 4)]  # a tick before the next renewal is set
    said(core, answered(again + 10, "refused"), came(again + 20, "s1", 6))
    assert said(core, Tick(again + 1_020))[0] == guess(6, 6)


def test_3_4_3_a_wish_that_is_void_is_taken_back_and_made_again() -> None:
    """A new bucket was given as tentative before the answer came."""
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5), came(1_250, "s1", 6), answered(1_260, "refused"))
    assert said(core, Tick(2_250))[0] == guess(6, 6)
    # Bucket 6 is to be corrected, too, and cannot be yet. The stable line goes on meanwhile.
    assert said(core, guessed(2_260, 6))[:2] == [Run("p", 5, 5), Ask("p", 1, 4, done=True)]
    assert said(core, answered(2_300, "answering")) == [], "nobody asked for it any more"
    assert said(core, came(2_900, "s2", 6)) == []
    assert said(core, done(3_000, 5))[0] == Ask("p", 1, 5)


def test_3_4_3_refused_it_asks_again_also_when_nothing_more_comes() -> None:
    core = failed(WITH_PEER, me="p.1")
    for stream in ("s1", "s2"):
        told = said(core, BoundaryArrived(1_200, stream, 5, ended=True))
    assert told[0] == Ask("p", 1, 4)
    assert said(core, answered(1_300, "refused")) == [Wake(1_300 + ASK_AGAIN_US)]
    assert said(core, Tick(1_300 + ASK_AGAIN_US))[0] == Ask("p", 1, 4)


def test_one_peer_that_goes_on_answering_is_enough() -> None:
    core = failed(WITH_TWO, me="p.1")
    said(core, came(1_200, "s2", 5))
    assert said(core, answered(1_300, "refused")) == []
    assert said(core, answered(1_310, "answering", "p.3"))[0] == STABILIZATION


def test_who_is_away_counts_only_when_all_have_answered() -> None:
    core = failed(WITH_TWO, me="p.1")
    said(core, came(1_200, "s2", 5))
    assert said(core, answered(1_300, "away")) == []
    assert said(core, answered(1_310, "away", "p.3"))[0] == STABILIZATION
    core = failed(WITH_TWO, me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "away"))
    assert STABILIZATION not in said(core, answered(1_310, "refused", "p.3"))


def test_an_answer_about_another_correction_changes_nothing() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5))
    assert said(core, answered(1_300, "answering", correction=0)) == []
    assert said(core, answered(1_300, "answering", correction=2)) == []
    assert core.paths["p"].consistency.state is OutputState.UP_FAILURE


# -- leases ---------------------------------------------------------------------------------------


def correcting() -> Progress:
    """p.2 promised at 1300; a correction is under way."""
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert core.paths["p"].consistency.state is OutputState.STABILIZATION
    return core


def test_a_promise_is_renewed_with_how_far_the_correction_is() -> None:
    core = correcting()
    said(core, BoundaryArrived(1_400, "s1", 9), BoundaryArrived(1_400, "s2", 9))
    renew = 1_200 + RENEW_US
    assert said(core, Tick(renew - 1)) == [Wake(renew)]
    assert said(core, Tick(renew))[0] == Ask("p", 1, 4, started=True)
    said(core, answered(renew + 10, "answering"))
    assert said(core, Tick(renew + RENEW_US))[0] == Ask("p", 1, 4, started=True)


def test_when_the_promiser_dies_the_corrector_answers_again_with_the_next_renewal() -> None:
    core = correcting()
    said(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    assert said(core, Tick(1_400 + 1_000)) == [Wake(1_200 + RENEW_US)], "p.2 answers"
    renew = 1_200 + RENEW_US
    said(core, Tick(renew))
    told = said(core, answered(renew + 5, "away"))
    assert told[0] == guess(6, 6)


def test_when_nothing_is_heard_of_the_promiser_the_lease_ends_by_the_clock() -> None:
    """It hangs, or is cut off: no answer comes, and no word that there is none."""
    core = correcting()
    said(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    ends, at, wakes = 1_300 + RELY_US, 1_400, []
    while at < ends - 1:
        (*told, wake) = said(core, Tick(at := min(at + RENEW_US, ends - 1))) or [None]
        wakes += [wake] if isinstance(wake, Wake) else []
        assert all(isinstance(action, Ask) for action in told)
    assert Wake(ends) in wakes, "it asked to be woken then"
    assert said(core, Tick(ends))[0] == guess(6, 6)


def test_a_promiser_that_answers_questions_but_makes_no_progress_is_not_relied_on() -> None:
    core = correcting()
    said(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    hung, ends = Answered(RENEW_US, "p", "p.2", 1, "answering", reached=5), 1_300 + RELY_US
    assert guess(6, 6) not in said(core, hung, replace(hung, at=ends - 1))
    told = said(core, Tick(ends))
    assert guess(6, 6) in told, "it answers by itself"
    said(core, replace(hung, at=ends + 1, reached=6))
    assert core.paths["p"].consistency.promises.covered(ends + 2), "the peer gets on again"


def test_a_promiser_that_has_nothing_to_do_is_relied_on() -> None:
    core = correcting()
    idle = Answered(0, "p", "p.2", 1, "answering", reached=5)
    for at in range(1_400, 60_000_000, RENEW_US):
        said(core, replace(idle, at=at))
        assert core.paths["p"].consistency.promises.covered(at + RENEW_US)


def test_of_two_promises_one_is_enough() -> None:
    core = failed(WITH_TWO, me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    said(core, answered(1_300, "answering", "p.3"), came(1_400, "s1", 6), came(1_400, "s2", 6))
    said(core, Tick(1_200 + RENEW_US))
    assert said(core, answered(1_210 + RENEW_US, "away")) == []
    assert said(core, answered(1_220 + RENEW_US, "refused", "p.3"))[0] == guess(6, 6)


def test_a_new_failure_during_the_correction_releases_the_peer() -> None:
    core = failed(replace(WITH_PEER, while_correcting="delay"), me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "away"), came(1_400, "s1", 6))
    said(core, Tick(2_400), guessed(2_410, 6))
    assert said(core, done(2_500, 5)) == [
        Change("p", OutputState.UP_FAILURE), Ask("p", 1, 5, done=True),
    ]  # fmt: skip


# -- the one that goes on answering ---------------------------------------------------------------


def test_3_4_3_a_node_that_promised_goes_on_as_tentative() -> None:
    core = failed(WITH_PEER, me="p.1")
    assert answer(core, asked(1_150)) == "answering"
    assert said(core, came(1_200, "s2", 5)) == []  # all is corrected, but its turn comes later
    said(core, came(1_300, "s1", 6))
    assert said(core, came(1_300, "s2", 6)) == [guess(6, 6)]
    said(core, guessed(1_310, 6))
    assert said(core, asked(1_400, done=True))[:2] == [Reply(7, "away"), Ask("p", 1, 4)]


def test_a_promise_that_is_not_renewed_ends_by_the_clock() -> None:
    """The corrector died: no message says so."""
    core = failed(WITH_PEER, me="p.1")
    ends = 1_150 + PROMISE_US
    assert said(core, asked(1_150))[-1] == Wake(ends)
    said(core, came(1_200, "s2", 5))
    assert said(core, Tick(ends - 1)) == [Wake(ends)]
    assert said(core, Tick(ends))[0] == Ask("p", 1, 4)


def test_a_renewed_promise_goes_on() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, asked(1_150), came(1_200, "s2", 5))
    for number in range(1, 20):
        at = 1_150 + number * RENEW_US
        told = said(core, asked(at, position=4 + number))
        assert told[0] == Reply(7, "answering", reached=5)
        assert not any(isinstance(action, Ask) for action in told)


def test_a_promise_to_a_correction_that_makes_no_progress_ends_by_itself() -> None:
    """A full disk: the corrector answers and asks, and is where it was."""
    core = failed(WITH_PEER, me="p.1")
    said(core, asked(1_150), came(1_200, "s2", 5))
    at = 1_150
    while (at := at + RENEW_US) < 1_150 + STALLED_US:
        assert said(core, asked(at))[0] == Reply(7, "answering", reached=5)
    assert said(core, asked(at))[:2] == [Reply(7, "refused"), Ask("p", 1, 4)]


def test_progress_of_the_correction_is_what_renews_the_patience() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, asked(1_150), came(1_200, "s2", 5))

    def asks(since: int, until: int, position: int) -> list[Answer]:
        times = range(since, until, RENEW_US)
        return [answer(core, asked(at, position=position)) for at in times]

    moved = 1_150 + STALLED_US - RENEW_US
    assert set(asks(1_150 + RENEW_US, moved, position=4)) == {"answering"}
    assert set(asks(moved, moved + STALLED_US, position=5)) == {"answering"}
    assert answer(core, asked(moved + STALLED_US, position=5)) == "refused"


def test_a_correction_that_is_slower_than_its_input_is_not_waited_for() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, asked(1_150), came(1_200, "s2", 5))
    answers = []
    for number, at in enumerate(range(1_150, 1_151 + STALLED_US, RENEW_US)):
        said(core, came(at, "s1", 5 + number), guessed(at, 5 + number))
        answers.append(answer(core, asked(at, position=4 + number // 2)))
    assert set(answers[:-1]) == {"answering"} and answers[-1] == "refused"


def test_who_has_nothing_to_correct_goes_on_answering_for_one_that_is_stuck() -> None:
    core = stable(plan_of(WITH_PEER), me="p.1")
    for at in range(1_150, 1_150 + 3 * STALLED_US, RENEW_US):
        assert answer(core, asked(at)) == "answering"


def test_another_correction_has_a_patience_of_its_own() -> None:
    core = failed(WITH_PEER, me="p.1")
    for number in range(STALLED_US // RENEW_US):
        assert answer(core, asked(1_150 + number * RENEW_US)) == "answering"
    assert answer(core, asked(1_150 + STALLED_US, correction=2)) == "answering"


def test_3_4_3_where_both_want_to_correct_themselves_the_first_by_name_goes_first() -> None:
    one, two = failed(WITH_PEER, me="p.1"), failed(replace(WITH_PEER, peers=("p.1",)), me="p.2")
    for core in (one, two):
        assert said(core, came(1_200, "s2", 5))[0] == Ask("p", 1, 4)
    assert answer(one, asked(1_210, peer="p.2")) == "refused"
    # And says that it does not want to any more, though nobody has answered yet: else others
    # would wait for it.
    assert said(two, asked(1_210, peer="p.1")) == [
        Reply(7, "answering", reached=5), Ask("p", 1, 4, done=True),
    ]  # fmt: skip
    assert said(one, answered(1_220, "answering"))[0] == STABILIZATION
    assert said(two, answered(1_220, "refused", "p.1")) == []
    assert said(two, Tick(1_400)) == [Wake(1_210 + PROMISE_US)]  # p.1 corrects itself
    assert said(one, done(1_500, 5))[-1] == Ask("p", 1, 5, done=True)
    assert said(two, asked(1_510, peer="p.1", done=True))[1] == Ask("p", 1, 4)


def test_who_relies_on_a_promise_itself_refuses() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert answer(core, asked(1_400, peer="p.3")) == "refused"


def test_who_only_catches_up_is_no_help() -> None:
    started = Progress([plan_of(WITH_PEER)], me="p.1")
    assert said(started, asked(100)) == [Reply(7, "away")]


def test_who_is_stable_answers() -> None:
    core = failed(WITH_PEER, me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "away"), done(1_400, 5))
    assert core.paths["p"].consistency.state is OutputState.STABLE
    assert answer(core, asked(1_500)) == "answering"


def test_who_runs_both_versions_itself_answers() -> None:
    core = failed(replace(WITH_PEER, peers=("p.0",)), me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "away", "p.0"))
    assert answer(core, asked(1_400, peer="p.0")) == "answering"


def test_who_suspends_its_answers_is_no_help() -> None:
    core = failed(replace(WITH_PEER, while_correcting="suspend"), me="p.1")
    said(core, came(1_200, "s2", 5), answered(1_300, "away"))
    assert answer(core, asked(1_400)) == "away"


def test_3_4_3_who_suspends_its_answers_asks_too() -> None:
    """Suspending is right while another replica answers, and only then."""
    core = failed(replace(WITH_PEER, while_correcting="suspend"), me="p.1")
    assert said(core, came(1_200, "s2", 5))[0] == Ask("p", 1, 4)
    said(core, answered(1_300, "refused"), came(1_350, "s1", 6))
    assert said(core, Tick(2_350))[0] == guess(6, 6)


def test_a_path_that_has_ended_asks_and_gives_nothing_more() -> None:
    core = failed(WITH_PEER, me="p.1")
    for stream in ("s1", "s2"):
        told = said(core, BoundaryArrived(1_200, stream, 5, ended=True))
    assert told[0] == Ask("p", 1, 4)
    said(core, answered(1_300, "away"))
    assert said(core, done(1_400, 5)) == [Leave("p"), End("p"), Ask("p", 1, 5, done=True)]
    assert said(core, answered(1_500, "refused"), asked(1_600)) == [Reply(7, "away")]


def test_nobody_is_told_of_the_end_of_a_correction_that_nobody_was_asked_about() -> None:
    promises = Promises("p.1", ["p.2"])
    promises.begin(1)
    assert not promises.end()


# -- several replicas in virtual time -------------------------------------------------------------

#: The correction of the failure takes about five seconds, more than any lease; a step three buckets
#: with rows of both inputs.
STEP_US = 3 * 60 * MS
SLOWLY = {"cost_us": 60 * MS, "group": 6}
#: No bucket is given later than this after its end, as long as one replica is able to.
BOUND_US = X + 2 * WIDTH + 2 * STEP_US
HEALS = 40 * WIDTH + 50 * MS


def failing(*names: str, policy: Policy = POLICY, last: int = 300, **how: int) -> Replicas:
    """s1 goes on. s2 is away from bucket 5 to bucket 40, then everything of it comes at once."""
    world = Replicas(names, policy, **how)
    world.feed("s1", 5, last)
    world.at(HEALS, lambda: world.bring("s2", 40))
    world.feed("s2", 41, last)
    return world


def first_corrects(*names: str, **how: int) -> Replicas:
    """The first of them corrects itself, and gives nothing; the others answer."""
    world = failing(*names, **(how or SLOWLY))
    world.until(HEALS + 100 * MS)
    assert [name for name in names if world[name].is_silent(world.now)] == ["a"]
    return world


def corrected_within(world: Replicas, us: int, *names: str) -> None:
    """Each of them is STABLE at some time until then."""
    since, until = world.now, world.now + us
    world.until(until)
    for name in names:
        states = [s for at, s in world[name].states if since <= at <= until]
        assert OutputState.STABLE in states, f"{name} is {world[name].state} after {us} us"


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c")])
def test_replicas_correct_themselves_one_after_the_other_and_one_always_answers(
    names: tuple[str, ...],
) -> None:
    world = failing(*names)
    world.until(20_000 * MS)
    assert [replica.state for replica in world.all.values()] == [OutputState.STABLE] * len(names)
    assert world.latest_us(5, 195) <= BOUND_US
    spans = [span(replica.states) for replica in world.all.values()]
    assert spans == sorted(spans), "in the order of their names"
    assert all(one[1] <= next[0] for one, next in pairwise(spans)), "no two at a time"


def span(states: list[tuple[int, OutputState]]) -> tuple[int, int]:
    """From when to when a replica corrected itself."""
    began = next(at for at, state in states if state is OutputState.STABILIZATION)
    return began, next(at for at, state in states if at >= began and state is OutputState.STABLE)


@pytest.mark.parametrize("stabilization", ["process", "delay", "suspend"])
def test_while_one_corrects_itself_for_long_new_rows_come_in_time(stabilization: str) -> None:
    policy = replace(POLICY, while_correcting=stabilization)  # type: ignore[arg-type]
    world = failing("a", "b", policy=policy, cost_us=80 * MS, group=6)
    world.until(20_000 * MS)
    assert world.latest_us(5, 180) <= BOUND_US + 3 * 20 * MS


def test_the_second_waits_until_the_first_has_caught_up_with_its_inputs() -> None:
    world = failing("a", "b", **SLOWLY)
    world.until(30_000 * MS)
    one, two = (span(replica.states) for replica in world.all.values())
    assert one[1] <= two[0]


def test_when_the_one_that_promised_dies_the_corrector_answers_again_with_its_next_renewal() -> (
    None
):
    world = first_corrects("a", "b")
    world["b"].dead = True
    died = world.now
    world.until(died + RENEW_US + 10 * MS)
    assert not world["a"].is_silent(world.now)
    world.until(8_500 * MS)
    assert world["a"].state is OutputState.STABILIZATION, "the correction still goes on"
    assert world.latest_us(5, 74) <= BOUND_US + RENEW_US


def test_when_the_one_that_promised_hangs_the_corrector_answers_again_when_the_lease_ends() -> None:
    world = first_corrects("a", "b")
    world["b"].hung = True
    world.until(world.now + PROMISE_US + 10 * MS)
    assert not world["a"].is_silent(world.now)
    world.until(8_500 * MS)
    assert world["a"].state is OutputState.STABILIZATION, "the correction still goes on"
    assert world.latest_us(5, 74) <= BOUND_US + PROMISE_US


@pytest.mark.parametrize("how", ["dead", "hung"])
def test_of_three_replicas_two_promise_and_one_of_them_is_enough(how: str) -> None:
    world = first_corrects("a", "b", "c")
    setattr(world["b"], how, True)
    world.until(HEALS + PROMISE_US + 100 * MS)
    assert world["a"].is_silent(world.now), "c goes on answering"
    assert world.latest_us(5, 45) <= BOUND_US


@pytest.mark.parametrize("how", ["dead", "hung"])
def test_when_the_corrector_is_gone_the_one_that_promised_corrects_itself_after_the_lease(
    how: str,
) -> None:
    world = first_corrects("a", "b")
    setattr(world["a"], how, True)
    gone = world.now
    world.until(gone + RENEW_US)
    assert world["b"].state is OutputState.UP_FAILURE
    corrected_within(world, PROMISE_US + 15_000 * MS, "b")
    asks = SILENCE if how == "hung" else 0
    assert span(world["b"].states)[0] <= gone + PROMISE_US + asks + 2 * WIDTH
    assert world.latest_us(5, 200) <= BOUND_US


@pytest.mark.parametrize("how", ["dead", "hung"])
def test_when_one_of_three_dies_in_its_correction_the_others_go_one_after_the_other(
    how: str,
) -> None:
    world = first_corrects("a", "b", "c", cost_us=20 * MS, group=20)
    setattr(world["a"], how, True)
    corrected_within(world, 20_000 * MS, "b", "c")
    assert world.latest_us(5, 230) <= BOUND_US


def test_the_last_one_corrects_itself_and_answers_meanwhile() -> None:
    world = failing("a", "b", "c", **SLOWLY)
    world["b"].dead = world["c"].dead = True
    world.until(HEALS + 100 * MS)
    assert world["a"].state is OutputState.STABILIZATION
    world.until(12_000 * MS)
    assert world.latest_us(5, 100) <= BOUND_US


def stuck_corrector(full: str, healthy: str) -> Replicas:
    """The disk of the one that corrects itself is full from the start of its correction on."""
    world = failing("a", "b")
    world[full].full = True
    if full == "b":  # it would not go first by itself
        world.at(HEALS - 10 * MS, lambda: world.bring("s2", 40, "b"))
    world.until(HEALS + 200 * MS)
    assert world[full].is_silent(world.now)
    assert world[healthy].state is OutputState.UP_FAILURE, "it promised to answer meanwhile"
    return world


@pytest.mark.parametrize(
    ("full", "healthy"),
    [
        ("a", "b"),
        ("b", "a"),
    ],
)
def test_a_corrector_that_is_stuck_keeps_its_healthy_peer_for_so_long_and_no_longer(
    full: str, healthy: str
) -> None:
    world = stuck_corrector(full, healthy)
    corrected_within(world, STALLED_US + 2 * PROMISE_US, healthy)
    assert world.latest_us(5, 80) <= BOUND_US


@pytest.mark.parametrize(("full", "healthy"), [("a", "b"), ("b", "a")])
def test_a_corrector_that_was_stuck_goes_on_when_it_has_space_again(
    full: str, healthy: str
) -> None:
    world = stuck_corrector(full, healthy)
    world.until(HEALS + 8_000 * MS)
    world.has_space(full)
    corrected_within(world, 10_000 * MS, full)


def test_a_wish_that_was_refused_by_others_for_long_is_granted_in_the_end() -> None:
    """p.1 has promised to p.2, which could not start, because p.3 was in its way."""
    core = failed(WITH_TWO, me="p.1")
    assert answer(core, asked(2_000, started=False)) == "answering"
    later = 2_000 + STALLED_US + PROMISE_US  # the promise is over, and p.2 never started
    assert answer(core, asked(later, started=False)) == "answering"
