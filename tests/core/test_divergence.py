"""Transcripts of replicas with different rows that determine which of them is wrong."""

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
    """One digest per bucket; an empty digest means no rows."""
    by_bucket = tuple((since + n, digest) for n, digest in enumerate(digests) if digest)
    return Window(since, since + len(digests) - 1, by_bucket)


def compared(
    machine: Divergence, own: Window, theirs: Window, *, at: int = 0, peer: str | None = None,
    found: Finding | None = None, bucket: int = 1,
) -> list[Action]:  # fmt: skip
    other = peer or ("a@2" if machine.name == "a" else "a")
    peer_finding = None if found is None else (bucket, found)
    return machine.handle(Compared(at, other, "s", own, theirs, peer_finding))


RIGHT, WRONG = made("x", "y", "z"), made("x", "Y", "Z")


def test_replicas_with_equal_digests_report_nothing() -> None:
    machine = Divergence("a@2", 2)
    for theirs in (RIGHT, made("x"), made("z", since=2), made("x", "y", "z", "4"), Window(0, -1)):
        assert compared(machine, RIGHT, theirs) == []


def test_a_bucket_without_rows_differs_from_one_with_rows() -> None:
    (report, ask) = compared(Divergence("a@2", 2), made("x", ""), made("x", "y"))
    assert isinstance(report, Report) and "here no rows, a y" in report.text
    assert ask == Recompute("s", 1)


def test_a_difference_is_reported_with_both_digests_and_the_bucket_is_recomputed() -> None:
    machine = Divergence("a@2", 2)
    report, ask = compared(machine, WRONG, RIGHT)
    assert report == Report(
        "bucket 1 of 's' differs between replicas: here Y, a y; own result: suspected"
    )
    assert ask == Recompute("s", 1)
    assert compared(machine, WRONG, RIGHT) == [], "reported once"
    assert machine.differences["s"].number == {"a": 2}


def test_a_replica_that_recomputes_the_digest_of_its_peer_is_refuted() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    report, refute = machine.handle(Recomputed(1, "s", 1, "y"))
    assert isinstance(refute, Refute) and isinstance(report, Report)
    why = "here Y, a y; own result: refuted (the recomputation gave the result of a peer)"
    assert why in refute.why
    assert compared(machine, WRONG, RIGHT, at=AGAIN_US) == []


def test_a_replica_that_recomputes_its_own_digest_is_confirmed() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, RIGHT, WRONG)
    (report,) = machine.handle(Recomputed(1, "s", 1, "y"))
    assert isinstance(report, Report) and "confirmed" in report.text
    assert machine.found() == {"s": (1, "confirmed")}


def test_replicas_recompute_one_after_the_other() -> None:
    """The last in the order of names goes first, so that both are never refuted at once."""
    first = Divergence("a", 2)
    (report,) = compared(first, WRONG, RIGHT)
    assert isinstance(report, Report)
    assert compared(first, WRONG, RIGHT, at=5) == []
    assert compared(first, WRONG, RIGHT, at=6, found="confirmed") == [Recompute("s", 1)]


def test_a_replica_that_cannot_recompute_lets_its_peer_try() -> None:
    second = Divergence("a@2", 2)
    compared(second, WRONG, RIGHT)
    (report,) = second.handle(Recomputed(1, "s", 1, None, "its checkpoint is newer"))
    assert isinstance(report, Report) and "unknown (its checkpoint is newer)" in report.text
    assert second.found() == {"s": (1, "unknown")}
    first = Divergence("a", 2)
    compared(first, RIGHT, WRONG)
    assert compared(first, RIGHT, WRONG, found="unknown") == [Recompute("s", 1)]


def test_a_replica_does_not_wait_for_a_peer_that_gives_no_finding_in_its_turn() -> None:
    first = Divergence("a", 2)
    compared(first, WRONG, RIGHT)
    assert compared(first, WRONG, RIGHT, at=TURN_US - 1) == []
    assert compared(first, WRONG, RIGHT, at=TURN_US) == [Recompute("s", 1)]


def test_the_inputs_of_a_lasting_difference_are_compared_periodically() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, RIGHT, WRONG)
    machine.handle(Recomputed(1, "s", 1, "y"))
    assert compared(machine, RIGHT, WRONG, at=2) == [CompareInputs("s")]
    assert compared(machine, RIGHT, WRONG, at=3) == []
    assert compared(machine, RIGHT, WRONG, at=2 + AGAIN_US) == [CompareInputs("s")]


def has_read(machine: Divergence, taken: Window, *windows: Window, at: int = 3) -> list[Action]:
    """Compare the inputs after the own result was confirmed."""
    compared(machine, WRONG, RIGHT)
    machine.handle(Recomputed(1, "s", 1, "Y"))
    compared(machine, WRONG, RIGHT, at=2)
    producers = {f"m{number}": window for number, window in enumerate(windows)}
    return machine.handle(InputCompared(at, "s", "in", taken, producers))


def test_a_replica_that_read_wrong_rows_from_a_producer_rebuilt_since_is_refuted() -> None:
    actions = has_read(
        Divergence("a@2", 2), made("1", "?", "3"), made("1", "2", "3"), made("1", "2")
    )
    assert isinstance(actions[-1], Refute)
    assert (
        "the replica used ? for bucket 1 of its input 'in', but every producer has 2"
        in actions[-1].why
    )


def test_a_replica_is_not_refuted_for_its_input_while_its_producers_differ() -> None:
    assert has_read(Divergence("a@2", 2), made("1", "?"), made("1", "2"), made("1", "?")) == []
    assert has_read(Divergence("a@2", 2), made("1", "2"), made("1", "2"), made("1", "2")) == []
    assert has_read(Divergence("a@2", 2), made("1", "2")) == [], "no producer answered"


def test_a_replica_is_not_refuted_while_no_peer_is_alive() -> None:
    """Its storage may be the only remaining one."""
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    (report,) = machine.handle(Recomputed(FRESH_US + 1, "s", 1, "y"))
    assert isinstance(report, Report) and "no peer has answered recently" in report.text
    assert compared(machine, WRONG, RIGHT, at=2 * FRESH_US) == [Recompute("s", 1)]
    assert isinstance(machine.handle(Recomputed(2 * FRESH_US, "s", 1, "y"))[-1], Refute)


def test_a_bucket_is_recomputed_a_few_times_at_most() -> None:
    machine, recomputations = Divergence("a@2", 2), 0
    for at in range(0, 20 * FRESH_US, 2 * FRESH_US):
        actions = compared(machine, WRONG, RIGHT, at=at)
        recomputations += Recompute("s", 1) in actions
        machine.handle(Recomputed(at + FRESH_US + 1, "s", 1, "y"))
    assert recomputations == RECOMPUTATIONS_MAX


def test_a_third_digest_shows_nondeterminism_and_refutes_no_replica() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    (report,) = machine.handle(Recomputed(1, "s", 1, "?"))
    assert isinstance(report, Report)
    assert "not deterministic (the recomputation gave a third result, ?)" in report.text
    assert compared(machine, WRONG, RIGHT, at=9 * AGAIN_US) == []


def test_a_third_replica_decides_without_a_recomputation() -> None:
    machine = Divergence("a", 3)
    compared(machine, WRONG, RIGHT, peer="a@2")
    actions = compared(machine, WRONG, RIGHT, peer="a@3")
    assert isinstance(actions[-1], Refute) and "2 of 3 replicas have y" in actions[-1].why


def test_a_replica_that_agrees_with_another_one_does_not_recompute() -> None:
    machine = Divergence("a@3", 3)
    assert compared(machine, RIGHT, RIGHT, peer="a@2") == []
    compared(machine, RIGHT, made("x", "y", "?"), peer="a@2", at=1)
    machine = Divergence("a@2", 3)
    compared(machine, RIGHT, WRONG, peer="a@3")
    assert compared(machine, RIGHT, RIGHT, peer="a", at=1) == []
    assert compared(machine, RIGHT, WRONG, peer="a@3", at=2, found="unknown") == []


MADE_BY_FOUR = {"a": "X", "a@2": "X", "a@3": "Y", "a@4": "Y"}


@pytest.mark.parametrize("order", list(permutations(MADE_BY_FOUR)))
def test_two_against_two_recompute_in_whatever_order_the_answers_arrive(
    order: tuple[str, ...],
) -> None:
    for name, digest in MADE_BY_FOUR.items():
        machine = Divergence(name, 4)
        actions = [
            action
            for at, peer in enumerate([*order, *order])
            if peer != name
            for action in compared(
                machine, made("x", digest), made("x", MADE_BY_FOUR[peer]), at=at, peer=peer
            )
        ]
        assert not any(isinstance(action, Refute) for action in actions)
        assert (Recompute("s", 1) in actions) == (digest == "Y"), (
            "the last in the order of names recomputes first"
        )


def test_a_majority_of_all_replicas_refutes_two_that_agree() -> None:
    machine = Divergence("a", 5)
    assert compared(machine, WRONG, WRONG, peer="a@2") == []
    for peer in ("a@3", "a@4"):
        compared(machine, WRONG, RIGHT, peer=peer)
    actions = compared(machine, WRONG, RIGHT, peer="a@5")
    assert isinstance(actions[-1], Refute) and "3 of 5 replicas have y" in actions[-1].why


def test_the_earlier_vote_of_a_rebuilt_replica_does_not_count() -> None:
    machine = Divergence("a", 3)
    compared(machine, WRONG, RIGHT, peer="a@2")
    compared(machine, WRONG, made("x", "Y", "?"), peer="a@2", at=1)
    actions = compared(machine, WRONG, RIGHT, peer="a@3", at=2)
    assert not any(isinstance(action, Refute) for action in actions)


def test_replicas_agree_again_when_the_peer_was_rebuilt() -> None:
    machine = Divergence("a", 2)
    compared(machine, RIGHT, WRONG)
    (report,) = compared(machine, RIGHT, RIGHT, at=5)
    assert report == Report("replicas agree on 's' again", resolved=True)
    assert machine.differences == {} and machine.found() == {}


def test_replicas_agree_again_when_the_peer_was_rebuilt_during_a_recomputation() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, RIGHT, WRONG)
    assert compared(machine, RIGHT, RIGHT, at=5) == []
    (report,) = machine.handle(Recomputed(6, "s", 1, "y"))
    assert isinstance(report, Report) and report.resolved and machine.differences == {}


def test_a_peer_that_has_not_reached_the_bucket_does_not_count_as_agreeing() -> None:
    machine = Divergence("a", 2)
    compared(machine, RIGHT, WRONG)
    assert compared(machine, RIGHT, made("x"), at=5) == []
    assert machine.differences


def test_when_the_bucket_is_no_longer_retained_the_next_difference_is_examined() -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    machine.handle(Recomputed(1, "s", 1, None, "inputs are gone"))
    actions = compared(machine, made("Z", "W", since=2), made("z", "w", since=2), at=AGAIN_US + 1)
    assert actions[-1] == Recompute("s", 2)
    assert machine.differences["s"].own == "Z"


@pytest.mark.parametrize("late", [Recomputed(1, "t", 1, "y"), Recomputed(1, "s", 0, "x")])
def test_a_recomputation_that_was_not_requested_is_ignored(late: Recomputed) -> None:
    machine = Divergence("a@2", 2)
    compared(machine, WRONG, RIGHT)
    assert machine.handle(late) == []
    assert machine.differences["s"].state == "recomputing"


def test_a_window_is_bounded_and_joins_the_segments_of_a_bucket() -> None:
    window = window_of(0, 99, [(n, str(n)) for n in range(100)])
    assert (window.since, window.upto) == (100 - WINDOW_BUCKETS, 99)
    assert len(window.digests) == WINDOW_BUCKETS
    assert window_of(3, 5, [(2, "a"), (4, "b"), (4, "c"), (6, "d")]) == Window(3, 5, ((4, "b+c"),))
