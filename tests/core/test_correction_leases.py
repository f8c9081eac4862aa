"""Transcripts of replicas that rely on each other during a correction (Borealis section 3.4.3).

First a single replica, then several replicas in virtual time (`replicas`).
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
    handle,
    plan_of,
    stable,
    tentative_done,
    tentative_run,
)

WITH_PEER = replace(PROCESS, while_correcting="process", peers=("p.2",))
WITH_TWO = replace(WITH_PEER, peers=("p.2", "p.3"))


def answered(at: int, answer: Answer, peer: str = "p.2", correction: int = 1) -> Answered:
    """A peer that answers `answering` makes progress."""
    reached = at if answer == "answering" else None
    return Answered(at, "p", peer, correction, answer, reached)


def asked(at: int, peer: str = "p.2", position: int = 4, ticket: int = 7, done: bool = False,
          correction: int = 1, started: bool = True) -> Asked:  # fmt: skip
    return Asked(at, ticket, "p", peer, correction, position, started, done)


def answer(core: Progress, event: Asked) -> Answer:
    first, *_ = handle(core, event)
    assert isinstance(first, Reply) and first.ticket == event.ticket
    return first.answer


# -- the correcting replica -----------------------------------------------------------------------


def test_3_4_3_before_a_correction_a_replica_asks_a_peer_to_keep_giving_results() -> None:
    core = failed(WITH_PEER, me="p.1")
    ask = Ask("p", correction=1, position=4)
    assert handle(core, came(1_200, "s2", 5)) == [ask, Wake(1_200 + RENEW_US)]
    assert handle(core, Tick(1_250)) == [Wake(1_200 + RENEW_US)]  # asked once
    assert handle(core, answered(1_300, "answering"))[:2] == [STABILIZATION, Run("p", 5, 5)]


def test_3_4_3_new_buckets_wait_while_the_peer_gives_results() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert handle(core, came(1_400, "s1", 6)) == []
    assert handle(core, came(10_000, "s2", 6), done(10_100, 5))[:2] == [
        Leave("p"), Run("p", 6, 6, spent_us=8_700),
    ]  # fmt: skip


def test_3_4_3_a_replica_that_has_caught_up_notifies_its_peers() -> None:
    """The peers need not wait any longer."""
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert handle(core, done(10_000, 5)) == [Leave("p"), STABLE, Ask("p", 1, 5, done=True)]


def test_3_4_3_a_replica_without_a_peer_runs_both_lines_itself() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5))
    assert handle(core, answered(1_300, "away"))[:2] == [STABILIZATION, Run("p", 5, 5)]
    handle(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    assert handle(core, Tick(2_400))[0] == tentative_run(6, 6)


def test_a_replica_does_not_rely_on_the_promise_of_a_peer_that_is_far_behind() -> None:
    """The peer hangs, or its disk is full, but it still answers requests."""
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5))
    stuck = Answered(1_300, "p", "p.2", 1, "answering", 5 - LAG_BUCKETS - 1)
    assert handle(core, stuck)[:2] == [STABILIZATION, Run("p", 5, 5)]
    handle(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    assert handle(core, Tick(2_400))[0] == tentative_run(6, 6)


def test_3_4_3_a_refused_replica_continues_as_tentative_and_asks_again() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5))
    assert handle(core, answered(1_300, "refused")) == [Wake(1_300 + ASK_AGAIN_US)]
    again = 1_300 + ASK_AGAIN_US
    assert handle(core, Tick(again)) == [
        Ask("p", 1, 4)
    ]  # a tick before the next renewal is already set
    handle(core, answered(again + 10, "refused"), came(again + 20, "s1", 6))
    assert handle(core, Tick(again + 1_020))[0] == tentative_run(6, 6)


def test_3_4_3_an_obsolete_request_is_withdrawn_and_made_again() -> None:
    """A new bucket was given as tentative before the answer arrived."""
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5), came(1_250, "s1", 6), answered(1_260, "refused"))
    assert handle(core, Tick(2_250))[0] == tentative_run(6, 6)
    # Bucket 6 must be corrected too, but is not complete yet. The stable line continues.
    assert handle(core, tentative_done(2_260, 6))[:2] == [Run("p", 5, 5), Ask("p", 1, 4, done=True)]
    assert handle(core, answered(2_300, "answering")) == [], "the request was withdrawn"
    assert handle(core, came(2_900, "s2", 6)) == []
    assert handle(core, done(3_000, 5))[0] == Ask("p", 1, 5)


def test_3_4_3_a_refused_replica_asks_again_even_if_its_inputs_have_ended() -> None:
    core = failed(WITH_PEER, me="p.1")
    for stream in ("s1", "s2"):
        actions = handle(core, BoundaryArrived(1_200, stream, 5, ended=True))
    assert actions[0] == Ask("p", 1, 4)
    assert handle(core, answered(1_300, "refused")) == [Wake(1_300 + ASK_AGAIN_US)]
    assert handle(core, Tick(1_300 + ASK_AGAIN_US))[0] == Ask("p", 1, 4)


def test_the_promise_of_one_peer_is_enough_to_start_a_correction() -> None:
    core = failed(WITH_TWO, me="p.1")
    handle(core, came(1_200, "s2", 5))
    assert handle(core, answered(1_300, "refused")) == []
    assert handle(core, answered(1_310, "answering", "p.3"))[0] == STABILIZATION


def test_a_correction_without_a_promise_starts_only_if_all_peers_are_away() -> None:
    core = failed(WITH_TWO, me="p.1")
    handle(core, came(1_200, "s2", 5))
    assert handle(core, answered(1_300, "away")) == []
    assert handle(core, answered(1_310, "away", "p.3"))[0] == STABILIZATION
    core = failed(WITH_TWO, me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "away"))
    assert STABILIZATION not in handle(core, answered(1_310, "refused", "p.3"))


def test_an_answer_about_another_correction_changes_nothing() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5))
    assert handle(core, answered(1_300, "answering", correction=0)) == []
    assert handle(core, answered(1_300, "answering", correction=2)) == []
    assert core.paths["p"].consistency.state is OutputState.UP_FAILURE


# -- leases ---------------------------------------------------------------------------------------


def correcting() -> Progress:
    """p.2 promised results at 1300; the correction is in progress."""
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert core.paths["p"].consistency.state is OutputState.STABILIZATION
    return core


def test_a_renewal_of_a_promise_carries_the_position_of_the_correction() -> None:
    core = correcting()
    handle(core, BoundaryArrived(1_400, "s1", 9), BoundaryArrived(1_400, "s2", 9))
    renew = 1_200 + RENEW_US
    assert handle(core, Tick(renew - 1)) == [Wake(renew)]
    assert handle(core, Tick(renew))[0] == Ask("p", 1, 4, started=True)
    handle(core, answered(renew + 10, "answering"))
    assert handle(core, Tick(renew + RENEW_US))[0] == Ask("p", 1, 4, started=True)


def test_if_the_promising_peer_dies_the_corrector_gives_results_at_the_next_renewal() -> None:
    core = correcting()
    handle(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    assert handle(core, Tick(1_400 + 1_000)) == [Wake(1_200 + RENEW_US)], "p.2 gives results"
    renew = 1_200 + RENEW_US
    handle(core, Tick(renew))
    actions = handle(core, answered(renew + 5, "away"))
    assert actions[0] == tentative_run(6, 6)


def test_without_an_answer_of_the_promising_peer_the_lease_expires() -> None:
    """The peer hangs or is cut off: there is neither an answer nor an error."""
    core = correcting()
    handle(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    ends, at, wakes = 1_300 + RELY_US, 1_400, []
    while at < ends - 1:
        (*requests, wake) = handle(core, Tick(at := min(at + RENEW_US, ends - 1))) or [None]
        wakes += [wake] if isinstance(wake, Wake) else []
        assert all(isinstance(action, Ask) for action in requests)
    assert Wake(ends) in wakes, "a wake-up is set for the end of the lease"
    assert handle(core, Tick(ends))[0] == tentative_run(6, 6)


def test_a_replica_does_not_rely_on_a_promising_peer_that_makes_no_progress() -> None:
    core = correcting()
    handle(core, came(1_400, "s1", 6), came(1_400, "s2", 6))
    hung, ends = Answered(RENEW_US, "p", "p.2", 1, "answering", reached=5), 1_300 + RELY_US
    assert tentative_run(6, 6) not in handle(core, hung, replace(hung, at=ends - 1))
    actions = handle(core, Tick(ends))
    assert tentative_run(6, 6) in actions, "the replica gives results itself"
    handle(core, replace(hung, at=ends + 1, reached=6))
    assert core.paths["p"].consistency.promises.covered(ends + 2), "the peer makes progress again"


def test_a_replica_relies_on_a_promising_peer_that_has_no_work() -> None:
    core = correcting()
    idle = Answered(0, "p", "p.2", 1, "answering", reached=5)
    for at in range(1_400, 60_000_000, RENEW_US):
        handle(core, replace(idle, at=at))
        assert core.paths["p"].consistency.promises.covered(at + RENEW_US)


def test_one_of_two_promises_is_enough() -> None:
    core = failed(WITH_TWO, me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    handle(core, answered(1_300, "answering", "p.3"), came(1_400, "s1", 6), came(1_400, "s2", 6))
    handle(core, Tick(1_200 + RENEW_US))
    assert handle(core, answered(1_210 + RENEW_US, "away")) == []
    assert handle(core, answered(1_220 + RENEW_US, "refused", "p.3"))[0] == tentative_run(6, 6)


def test_a_new_failure_during_the_correction_releases_the_peer() -> None:
    core = failed(replace(WITH_PEER, while_correcting="delay"), me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "away"), came(1_400, "s1", 6))
    handle(core, Tick(2_400), tentative_done(2_410, 6))
    assert handle(core, done(2_500, 5)) == [
        Change("p", OutputState.UP_FAILURE), Ask("p", 1, 5, done=True),
    ]  # fmt: skip


# -- the replica that keeps giving results --------------------------------------------------------


def test_3_4_3_a_replica_that_promised_results_continues_as_tentative() -> None:
    core = failed(WITH_PEER, me="p.1")
    assert answer(core, asked(1_150)) == "answering"
    assert handle(core, came(1_200, "s2", 5)) == []  # can be corrected, but p.2 goes first
    handle(core, came(1_300, "s1", 6))
    assert handle(core, came(1_300, "s2", 6)) == [tentative_run(6, 6)]
    handle(core, tentative_done(1_310, 6))
    assert handle(core, asked(1_400, done=True))[:2] == [Reply(7, "away"), Ask("p", 1, 4)]


def test_a_promise_that_is_not_renewed_expires() -> None:
    """The corrector died without a message."""
    core = failed(WITH_PEER, me="p.1")
    ends = 1_150 + PROMISE_US
    assert handle(core, asked(1_150))[-1] == Wake(ends)
    handle(core, came(1_200, "s2", 5))
    assert handle(core, Tick(ends - 1)) == [Wake(ends)]
    assert handle(core, Tick(ends))[0] == Ask("p", 1, 4)


def test_a_renewed_promise_continues() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, asked(1_150), came(1_200, "s2", 5))
    for number in range(1, 20):
        at = 1_150 + number * RENEW_US
        actions = handle(core, asked(at, position=4 + number))
        assert actions[0] == Reply(7, "answering", reached=5)
        assert not any(isinstance(action, Ask) for action in actions)


def test_a_promise_to_a_correction_that_makes_no_progress_expires() -> None:
    """The disk of the corrector is full: it sends renewals, but its position does not change."""
    core = failed(WITH_PEER, me="p.1")
    handle(core, asked(1_150), came(1_200, "s2", 5))
    at = 1_150
    while (at := at + RENEW_US) < 1_150 + STALLED_US:
        assert handle(core, asked(at))[0] == Reply(7, "answering", reached=5)
    assert handle(core, asked(at))[:2] == [Reply(7, "refused"), Ask("p", 1, 4)]


def test_progress_of_the_correction_restarts_the_stall_timeout() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, asked(1_150), came(1_200, "s2", 5))

    def answers(since: int, until: int, position: int) -> list[Answer]:
        times = range(since, until, RENEW_US)
        return [answer(core, asked(at, position=position)) for at in times]

    moved = 1_150 + STALLED_US - RENEW_US
    assert set(answers(1_150 + RENEW_US, moved, position=4)) == {"answering"}
    assert set(answers(moved, moved + STALLED_US, position=5)) == {"answering"}
    assert answer(core, asked(moved + STALLED_US, position=5)) == "refused"


def test_a_replica_does_not_wait_for_a_correction_that_is_slower_than_its_input() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, asked(1_150), came(1_200, "s2", 5))
    answers = []
    for number, at in enumerate(range(1_150, 1_151 + STALLED_US, RENEW_US)):
        handle(core, came(at, "s1", 5 + number), tentative_done(at, 5 + number))
        answers.append(answer(core, asked(at, position=4 + number // 2)))
    assert set(answers[:-1]) == {"answering"} and answers[-1] == "refused"


def test_a_replica_without_a_correction_of_its_own_keeps_its_promise_to_a_stuck_peer() -> None:
    core = stable(plan_of(WITH_PEER), me="p.1")
    for at in range(1_150, 1_150 + 3 * STALLED_US, RENEW_US):
        assert answer(core, asked(at)) == "answering"


def test_another_correction_has_its_own_stall_timeout() -> None:
    core = failed(WITH_PEER, me="p.1")
    for number in range(STALLED_US // RENEW_US):
        assert answer(core, asked(1_150 + number * RENEW_US)) == "answering"
    assert answer(core, asked(1_150 + STALLED_US, correction=2)) == "answering"


def test_3_4_3_of_two_replicas_that_want_to_correct_the_first_by_name_goes_first() -> None:
    one, two = failed(WITH_PEER, me="p.1"), failed(replace(WITH_PEER, peers=("p.1",)), me="p.2")
    for core in (one, two):
        assert handle(core, came(1_200, "s2", 5))[0] == Ask("p", 1, 4)
    assert answer(one, asked(1_210, peer="p.2")) == "refused"
    # p.2 also withdraws its own request before it is answered; otherwise others would wait for
    # p.2.
    assert handle(two, asked(1_210, peer="p.1")) == [
        Reply(7, "answering", reached=5), Ask("p", 1, 4, done=True),
    ]  # fmt: skip
    assert handle(one, answered(1_220, "answering"))[0] == STABILIZATION
    assert handle(two, answered(1_220, "refused", "p.1")) == []
    assert handle(two, Tick(1_400)) == [Wake(1_210 + PROMISE_US)]  # p.1 corrects
    assert handle(one, done(1_500, 5))[-1] == Ask("p", 1, 5, done=True)
    assert handle(two, asked(1_510, peer="p.1", done=True))[1] == Ask("p", 1, 4)


def test_a_replica_that_relies_on_a_promise_refuses_to_promise() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "answering"))
    assert answer(core, asked(1_400, peer="p.3")) == "refused"


def test_a_replica_that_is_still_starting_is_away() -> None:
    started = Progress([plan_of(WITH_PEER)], me="p.1")
    assert handle(started, asked(100)) == [Reply(7, "away")]


def test_a_stable_replica_promises_results() -> None:
    core = failed(WITH_PEER, me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "away"), done(1_400, 5))
    assert core.paths["p"].consistency.state is OutputState.STABLE
    assert answer(core, asked(1_500)) == "answering"


def test_a_replica_that_runs_both_lines_promises_results() -> None:
    core = failed(replace(WITH_PEER, peers=("p.0",)), me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "away", "p.0"))
    assert answer(core, asked(1_400, peer="p.0")) == "answering"


def test_a_replica_that_suspends_its_results_is_away() -> None:
    core = failed(replace(WITH_PEER, while_correcting="suspend"), me="p.1")
    handle(core, came(1_200, "s2", 5), answered(1_300, "away"))
    assert answer(core, asked(1_400)) == "away"


def test_3_4_3_a_replica_that_suspends_its_results_asks_its_peers_first() -> None:
    """A replica may suspend its results only while a peer gives results."""
    core = failed(replace(WITH_PEER, while_correcting="suspend"), me="p.1")
    assert handle(core, came(1_200, "s2", 5))[0] == Ask("p", 1, 4)
    handle(core, answered(1_300, "refused"), came(1_350, "s1", 6))
    assert handle(core, Tick(2_350))[0] == tentative_run(6, 6)


def test_a_path_that_has_ended_neither_asks_nor_promises() -> None:
    core = failed(WITH_PEER, me="p.1")
    for stream in ("s1", "s2"):
        actions = handle(core, BoundaryArrived(1_200, stream, 5, ended=True))
    assert actions[0] == Ask("p", 1, 4)
    handle(core, answered(1_300, "away"))
    assert handle(core, done(1_400, 5)) == [
        Leave("p"), STABLE, End("p"), Ask("p", 1, 5, done=True),
    ]  # fmt: skip
    assert handle(core, answered(1_500, "refused"), asked(1_600)) == [Reply(7, "away")]


def test_peers_that_were_not_asked_are_not_notified_of_the_end_of_a_correction() -> None:
    promises = Promises("p.1", ["p.2"])
    promises.begin(1)
    assert not promises.end()


# -- several replicas in virtual time -------------------------------------------------------------

#: The correction takes about five seconds, longer than any lease. A step runs three buckets with
#: rows of both inputs.
STEP_US = 3 * 60 * MS
SLOWLY = {"cost_us": 60 * MS, "group": 6}
#: Latest time after its end at which a bucket is given, as long as one replica is able to.
BOUND_US = X + 2 * WIDTH + 2 * STEP_US
HEALS = 40 * WIDTH + 50 * MS


def failing(*names: str, policy: Policy = POLICY, last: int = 300, **options: int) -> Replicas:
    """s1 continues. s2 is missing from bucket 5 to bucket 40, which then arrive all at once."""
    world = Replicas(names, policy, **options)
    world.feed("s1", 5, last)
    world.at(HEALS, lambda: world.bring("s2", 40))
    world.feed("s2", 41, last)
    return world


def first_corrects(*names: str, **options: int) -> Replicas:
    """The first replica corrects and gives no results; the others do."""
    world = failing(*names, **(options or SLOWLY))
    world.until(HEALS + 100 * MS)
    assert [name for name in names if world[name].is_silent(world.now)] == ["a"]
    return world


def corrected_within(world: Replicas, us: int, *names: str) -> None:
    """Check that each of these replicas becomes STABLE within `us`."""
    since, until = world.now, world.now + us
    world.until(until)
    for name in names:
        states = [s for at, s in world[name].states if since <= at <= until]
        assert OutputState.STABLE in states, f"{name} is {world[name].state} after {us} us"


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c")])
def test_replicas_correct_one_after_the_other_and_one_always_gives_results(
    names: tuple[str, ...],
) -> None:
    world = failing(*names)
    world.until(20_000 * MS)
    assert [replica.state for replica in world.all.values()] == [OutputState.STABLE] * len(names)
    assert world.latest_us(5, 195) <= BOUND_US
    spans = [span(replica.states) for replica in world.all.values()]
    assert spans == sorted(spans), "replicas correct in the order of their names"
    assert all(one[1] <= next[0] for one, next in pairwise(spans)), (
        "two replicas corrected at the same time"
    )


def span(states: list[tuple[int, OutputState]]) -> tuple[int, int]:
    """Start and end of the correction of a replica."""
    began = next(at for at, state in states if state is OutputState.STABILIZATION)
    return began, next(at for at, state in states if at >= began and state is OutputState.STABLE)


@pytest.mark.parametrize("stabilization", ["process", "delay", "suspend"])
def test_new_rows_are_given_in_time_during_a_long_correction(stabilization: str) -> None:
    policy = replace(POLICY, while_correcting=stabilization)  # type: ignore[arg-type]
    world = failing("a", "b", policy=policy, cost_us=80 * MS, group=6)
    world.until(20_000 * MS)
    assert world.latest_us(5, 180) <= BOUND_US + 3 * 20 * MS


def test_the_second_replica_waits_until_the_first_has_caught_up_with_its_inputs() -> None:
    world = failing("a", "b", **SLOWLY)
    world.until(30_000 * MS)
    one, two = (span(replica.states) for replica in world.all.values())
    assert one[1] <= two[0]


def test_if_the_peer_dies_the_corrector_gives_results_in_time_after_the_next_renewal() -> None:
    world = first_corrects("a", "b")
    world["b"].dead = True
    died_at = world.now
    world.until(died_at + RENEW_US + 10 * MS)
    assert not world["a"].is_silent(world.now)
    world.until(8_500 * MS)
    assert world["a"].state is OutputState.STABILIZATION, "the correction is still in progress"
    assert world.latest_us(5, 74) <= BOUND_US + RENEW_US


def test_if_the_peer_hangs_the_corrector_gives_results_in_time_after_the_lease() -> None:
    world = first_corrects("a", "b")
    world["b"].hung = True
    world.until(world.now + PROMISE_US + 10 * MS)
    assert not world["a"].is_silent(world.now)
    world.until(8_500 * MS)
    assert world["a"].state is OutputState.STABILIZATION, "the correction is still in progress"
    assert world.latest_us(5, 74) <= BOUND_US + PROMISE_US


@pytest.mark.parametrize("failure", ["dead", "hung"])
def test_of_three_replicas_two_promise_and_one_promise_is_enough(failure: str) -> None:
    world = first_corrects("a", "b", "c")
    setattr(world["b"], failure, True)
    world.until(HEALS + PROMISE_US + 100 * MS)
    assert world["a"].is_silent(world.now), "c gives results"
    assert world.latest_us(5, 45) <= BOUND_US


@pytest.mark.parametrize("failure", ["dead", "hung"])
def test_if_the_corrector_is_gone_its_peer_starts_its_own_correction_after_the_lease(
    failure: str,
) -> None:
    world = first_corrects("a", "b")
    setattr(world["a"], failure, True)
    failed_at = world.now
    world.until(failed_at + RENEW_US)
    assert world["b"].state is OutputState.UP_FAILURE
    corrected_within(world, PROMISE_US + 15_000 * MS, "b")
    answer_timeout_us = SILENCE if failure == "hung" else 0
    assert span(world["b"].states)[0] <= failed_at + PROMISE_US + answer_timeout_us + 2 * WIDTH
    assert world.latest_us(5, 200) <= BOUND_US


@pytest.mark.parametrize("failure", ["dead", "hung"])
def test_if_one_of_three_fails_during_its_correction_the_others_correct_in_turn(
    failure: str,
) -> None:
    world = first_corrects("a", "b", "c", cost_us=20 * MS, group=20)
    setattr(world["a"], failure, True)
    corrected_within(world, 20_000 * MS, "b", "c")
    assert world.latest_us(5, 230) <= BOUND_US


def test_the_last_live_replica_gives_results_during_its_correction() -> None:
    world = failing("a", "b", "c", **SLOWLY)
    world["b"].dead = world["c"].dead = True
    world.until(HEALS + 100 * MS)
    assert world["a"].state is OutputState.STABILIZATION
    world.until(12_000 * MS)
    assert world.latest_us(5, 100) <= BOUND_US


def stuck_corrector(full: str, healthy: str) -> Replicas:
    """The disk of the corrector is full from the start of its correction."""
    world = failing("a", "b")
    world[full].full = True
    if full == "b":  # `b` would not go first otherwise
        world.at(HEALS - 10 * MS, lambda: world.bring("s2", 40, "b"))
    world.until(HEALS + 200 * MS)
    assert world[full].is_silent(world.now)
    assert world[healthy].state is OutputState.UP_FAILURE, (
        "the healthy replica promised to give results"
    )
    return world


@pytest.mark.parametrize(
    ("full", "healthy"),
    [
        ("a", "b"),
        ("b", "a"),
    ],
)
def test_a_stuck_corrector_delays_its_healthy_peer_for_a_limited_time(
    full: str, healthy: str
) -> None:
    world = stuck_corrector(full, healthy)
    corrected_within(world, STALLED_US + 2 * PROMISE_US, healthy)
    assert world.latest_us(5, 80) <= BOUND_US


@pytest.mark.parametrize(("full", "healthy"), [("a", "b"), ("b", "a")])
def test_a_stuck_corrector_continues_when_it_has_space_again(full: str, healthy: str) -> None:
    world = stuck_corrector(full, healthy)
    world.until(HEALS + 8_000 * MS)
    world.has_space(full)
    corrected_within(world, 10_000 * MS, full)


def test_a_request_that_others_refused_for_long_is_granted_in_the_end() -> None:
    """p.1 promised results to p.2, which could not start its correction because of p.3."""
    core = failed(WITH_TWO, me="p.1")
    assert answer(core, asked(2_000, started=False)) == "answering"
    later = 2_000 + STALLED_US + PROMISE_US  # the promise has expired, and p.2 has not started
    assert answer(core, asked(later, started=False)) == "answering"
