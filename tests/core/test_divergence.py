"""Replicas that made different rows find out which of them is wrong, as transcripts."""

from __future__ import annotations

from itertools import permutations

import pytest

from holdfast.core.divergence import (
    AGAIN_US,
    FRESH_US,
    RECOMPUTATIONS_MAX,
    TURN_US,
    WINDOW_BUCKETS,
    Action,
    Compared,
    CompareInputs,
    Divergence,
    Finding,
    InputCompared,
    Recompute,
    Recomputed,
    Refute,
    Report,
    Window,
    window_of,
)


def made(*digests: str, since: int = 0) -> Window:
    """One digest a bucket; an empty one: no rows."""
    listed = tuple((since + n, digest) for n, digest in enumerate(digests) if digest)
    return Window(since, since + len(digests) - 1, listed)


def compared(
    machine: Divergence, own: Window, theirs: Window, *, at: int = 0, peer: str | None = None,
    found: Finding | None = None, bucket: int = 1,
) -> list[Action]:  # fmt: skip
    other = peer or ("a@2" if machine.name == "a" else "a")
    said = None if found is None else (bucket, found)
    return machine.handle(Compared(at, other, "s", own, theirs, said))


RIGHT, WRONG = made("x", "y", "z"), made("x", "Y", "Z")


def test_replicas_that_made_the_same_say_nothing() -> None:
    machine = Divergence("a@2", 2)
    for theirs in (RIGHT, made("x"), made("z", since=2), made("x", "y", "z", "4"), Window(0, -1)):
        assert compared(machine, RIGHT, theirs) == []


def test_a_bucket_without_rows_differs_from_one_with_rows() -> None:
    (report, ask) = compared(Divergence("a@2", 2), made("x", ""), made("x", "y"))
    assert isinstance(report, Report) and "here no rows, a y" in report.text
    assert ask == Recompute("s", 1)


def test_a_difference_is_reported_at_once_with_both_digests_and_the_bucket_computed_again() -> None:
    machine = Divergence("a@2", 2)
    report, ask = compared(machine, WRONG, RIGHT)
    assert report == Report("bucket 1 of 's' was made otherwise: here Y, a y; suspected")
    assert ask == Recompute("s", 1)
    assert compared(machine, WRONG, RIGHT) == [], "once"
    assert machine.differences["s"].number == {"a": 2}


def test_who_computes_what_the_other_one_made_is_refuted() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    report, refute = machine.handle(Recomputed(1, "s", 1, "y"))
    assert isinstance(refute, Refute) and isinstance(report, Report)
    assert "here Y, a y; refuted (computed again, it is what the other one made)" in refute.why
    assert compared(machine, WRONG, RIGHT, at=AGAIN_US) == []


def test_who_computes_the_same_again_is_confirmed_and_says_so() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, RIGHT, WRONG)
    (report,) = machine.handle(Recomputed(1, "s", 1, "y"))
    assert isinstance(report, Report) and "confirmed" in report.text
    assert machine.found() == {"s": (1, "confirmed")}


def test_they_compute_one_after_the_other() -> None:
    """The last in the order of names first: never are both refuted at once."""
    first = Divergence("a", 2)
    (report,) = compared(first, WRONG, RIGHT)
    assert isinstance(report, Report)
    assert compared(first, WRONG, RIGHT, at=5) == []
    assert compared(first, WRONG, RIGHT, at=6, found="confirmed") == [Recompute("s", 1)]


def test_one_that_cannot_compute_it_again_lets_the_other_one_try() -> None:
    second = Divergence("a@2", 2)
    compared(second, WRONG, RIGHT)
    (report,) = second.handle(Recomputed(1, "s", 1, None, "its checkpoint is newer"))
    assert isinstance(report, Report) and "unknown (its checkpoint is newer)" in report.text
    assert second.found() == {"s": (1, "unknown")}
    first = Divergence("a", 2)
    compared(first, RIGHT, WRONG)
    assert compared(first, RIGHT, WRONG, found="unknown") == [Recompute("s", 1)]


def test_one_whose_turn_it_is_and_that_says_nothing_is_not_waited_for() -> None:
    first = Divergence("a", 2)
    compared(first, WRONG, RIGHT)
    assert compared(first, WRONG, RIGHT, at=TURN_US - 1) == []
    assert compared(first, WRONG, RIGHT, at=TURN_US) == [Recompute("s", 1)]


def test_the_inputs_of_what_stays_different_are_compared_now_and_then() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, RIGHT, WRONG)
    machine.handle(Recomputed(1, "s", 1, "y"))
    assert compared(machine, RIGHT, WRONG, at=2) == [CompareInputs("s")]
    assert compared(machine, RIGHT, WRONG, at=3) == []
    assert compared(machine, RIGHT, WRONG, at=2 + AGAIN_US) == [CompareInputs("s")]


def has_read(machine: Divergence, taken: Window, *made: Window, at: int = 3) -> list[Action]:
    """After its own result was confirmed."""
    compared(machine, WRONG, RIGHT)
    machine.handle(Recomputed(1, "s", 1, "Y"))
    compared(machine, WRONG, RIGHT, at=2)
    producers = {f"m{number}": window for number, window in enumerate(made)}
    return machine.handle(InputCompared(at, "s", "in", taken, producers))


def test_who_took_wrong_rows_from_a_producer_that_was_mended_since_is_refuted() -> None:
    told = has_read(Divergence("a@2", 2), made("1", "?", "3"), made("1", "2", "3"), made("1", "2"))
    assert isinstance(told[-1], Refute)
    assert (
        "it took ? for bucket 1 of its input 'in', of which every producer says 2" in told[-1].why
    )


def test_while_its_producers_differ_nobody_is_refuted_for_what_it_read() -> None:
    assert has_read(Divergence("a@2", 2), made("1", "?"), made("1", "2"), made("1", "?")) == []
    assert has_read(Divergence("a@2", 2), made("1", "2"), made("1", "2"), made("1", "2")) == []
    assert has_read(Divergence("a@2", 2), made("1", "2")) == [], "nobody answered"


def test_nobody_is_refuted_while_no_other_replica_is_there() -> None:
    """Its storage may be all that is left."""
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    (report,) = machine.handle(Recomputed(FRESH_US + 1, "s", 1, "y"))
    assert isinstance(report, Report) and "no other replica is there" in report.text
    assert compared(machine, WRONG, RIGHT, at=2 * FRESH_US) == [Recompute("s", 1)]
    assert isinstance(machine.handle(Recomputed(2 * FRESH_US, "s", 1, "y"))[-1], Refute)


def test_a_bucket_is_computed_again_a_few_times_at_most() -> None:
    machine, asked = Divergence("a@2", 2), 0
    for at in range(0, 20 * FRESH_US, 2 * FRESH_US):
        told = compared(machine, WRONG, RIGHT, at=at)
        asked += Recompute("s", 1) in told
        machine.handle(Recomputed(at + FRESH_US + 1, "s", 1, "y"))
    assert asked == RECOMPUTATIONS_MAX


def test_a_third_result_refutes_nobody() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    (report,) = machine.handle(Recomputed(1, "s", 1, "?"))
    assert isinstance(report, Report)
    assert "not deterministic (computed again, it is ?)" in report.text
    assert compared(machine, WRONG, RIGHT, at=9 * AGAIN_US) == []


def test_a_third_opinion_decides_without_computing() -> None:
    machine = Divergence("a", 3)
    compared(machine, WRONG, RIGHT, peer="a@2")
    told = compared(machine, WRONG, RIGHT, peer="a@3")
    assert isinstance(told[-1], Refute) and "2 of 3 replicas made y" in told[-1].why


def test_who_is_not_alone_with_its_result_leaves_it_to_the_other_one() -> None:
    machine = Divergence("a@3", 3)
    assert compared(machine, RIGHT, RIGHT, peer="a@2") == []
    compared(machine, RIGHT, made("x", "y", "?"), peer="a@2", at=1)
    machine = Divergence("a@2", 3)
    compared(machine, RIGHT, WRONG, peer="a@3")
    assert compared(machine, RIGHT, RIGHT, peer="a", at=1) == []
    assert compared(machine, RIGHT, WRONG, peer="a@3", at=2, found="unknown") == []


MADE_BY_FOUR = {"a": "X", "a@2": "X", "a@3": "Y", "a@4": "Y"}


@pytest.mark.parametrize("order", list(permutations(MADE_BY_FOUR)))
def test_two_against_two_compute_again_whoever_answers_first(order: tuple[str, ...]) -> None:
    for name, digest in MADE_BY_FOUR.items():
        machine = Divergence(name, 4)
        told = [
            action
            for at, peer in enumerate([*order, *order])
            if peer != name
            for action in compared(
                machine, made("x", digest), made("x", MADE_BY_FOUR[peer]), at=at, peer=peer
            )
        ]
        assert not any(isinstance(action, Refute) for action in told)
        assert (Recompute("s", 1) in told) == (digest == "Y"), "the last in the order first"


def test_a_majority_of_all_decides_also_about_two_that_agree() -> None:
    machine = Divergence("a", 5)
    assert compared(machine, WRONG, WRONG, peer="a@2") == []
    for peer in ("a@3", "a@4"):
        compared(machine, WRONG, RIGHT, peer=peer)
    told = compared(machine, WRONG, RIGHT, peer="a@5")
    assert isinstance(told[-1], Refute) and "3 of 5 replicas made y" in told[-1].why


def test_one_that_was_rebuilt_does_not_vote_as_before() -> None:
    machine = Divergence("a", 3)
    compared(machine, WRONG, RIGHT, peer="a@2")
    compared(machine, WRONG, made("x", "Y", "?"), peer="a@2", at=1)
    told = compared(machine, WRONG, RIGHT, peer="a@3", at=2)
    assert not any(isinstance(action, Refute) for action in told)


def test_when_the_other_one_was_rebuilt_they_agree_again() -> None:
    machine = Divergence("a", 2)
    compared(machine, RIGHT, WRONG)
    (report,) = compared(machine, RIGHT, RIGHT, at=5)
    assert report == Report("replicas agree on 's' again", resolved=True)
    assert machine.differences == {} and machine.found() == {}


def test_also_when_it_was_rebuilt_while_this_one_computes() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, RIGHT, WRONG)
    assert compared(machine, RIGHT, RIGHT, at=5) == []
    (report,) = machine.handle(Recomputed(6, "s", 1, "y"))
    assert isinstance(report, Report) and report.resolved and machine.differences == {}


def test_one_that_is_not_that_far_yet_does_not_agree() -> None:
    machine = Divergence("a", 2)
    compared(machine, RIGHT, WRONG)
    assert compared(machine, RIGHT, made("x"), at=5) == []
    assert machine.differences


def test_when_the_bucket_is_not_kept_any_more_the_next_one_is_looked_at() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    machine.handle(Recomputed(1, "s", 1, None, "inputs are gone"))
    told = compared(machine, made("Z", "W", since=2), made("z", "w", since=2), at=AGAIN_US + 1)
    assert told[-1] == Recompute("s", 2)
    assert machine.differences["s"].own == "Z"


@pytest.mark.parametrize("late", [Recomputed(1, "t", 1, "y"), Recomputed(1, "s", 0, "x")])
def test_what_nobody_asked_for_is_not_heard(late: Recomputed) -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    assert machine.handle(late) == []
    assert machine.differences["s"].state == "recomputing"


def test_a_window_is_bounded_and_knows_parts_of_a_bucket() -> None:
    found = window_of(0, 99, [(n, str(n)) for n in range(100)])
    assert (found.since, found.upto) == (100 - WINDOW_BUCKETS, 99)
    assert len(found.digests) == WINDOW_BUCKETS
    assert window_of(3, 5, [(2, "a"), (4, "b"), (4, "c"), (6, "d")]) == Window(3, 5, ((4, "b+c"),))
