"""What happened inside: histories in which somebody lost, kept or stopped too much."""

from __future__ import annotations

from dataclasses import replace

from holdfast.verify.history import (
    Accepted,
    Broke,
    Event,
    Healed,
    Held,
    Logged,
    Made,
    Pending,
    Stopped,
)
from tests.verify.histories import (
    BROKE,
    BROKE_US,
    END_US,
    HEALED,
    HEALED_US,
    RECOVERY_US,
    failed,
    rows,
    story,
)

# -- converge, accepted, alive ------------------------------------------------------------------


def test_replicas_make_the_same() -> None:
    other = Made(END_US, "n2", 2, "out", 7, "STABLE", "beef")
    assert failed(story(other)) == {"converge": "bucket 7 of out differs at n1, n2"}
    assert failed(story(replace(other, stability="TENTATIVE"))) == {}
    assert failed(story(replace(other, bucket=99))) == {}


def test_accepted_rows_are_in_the_log() -> None:
    def without_one(event: Event) -> Event:
        if isinstance(event, Logged) and event.bucket == 7:
            return replace(event, rows=event.rows[1:])
        return event

    found = failed(story(change=without_one))
    assert found.keys() == {"accepted"}
    assert str(rows(7)[0]) in found["accepted"]
    again = Accepted(END_US, "one", rows(7)[:1])
    assert failed(story(again)).keys() == {"accepted"}  # once in the log, accepted twice
    unanswered = Logged(END_US, "two", 3, rows(3))
    assert failed(story(unanswered)) == {}


def test_nobody_stops_over_a_mistake_of_ours() -> None:
    stopped = Stopped(BROKE_US + 5, "n1", "ours", "illegal move")
    found = failed(story(BROKE, HEALED, stopped))
    assert found == {"alive": "n1 stopped, the fault of ours: illegal move"}


def test_nobody_blames_the_world_before_it_broke() -> None:
    stopped = Stopped(BROKE_US, "n1", "world", "no space left")
    assert failed(story(BROKE, HEALED, stopped)) == {}
    assert failed(story(BROKE, HEALED, replace(stopped, at=END_US))) == {}
    assert "no space left" in failed(story(stopped))["alive"]
    early = replace(stopped, at=BROKE_US - 1)
    assert failed(story(BROKE, HEALED, early)).keys() == {"alive"}
    again = (replace(BROKE, at=END_US), replace(HEALED, at=END_US))
    assert failed(story(BROKE, HEALED, *again, stopped)) == {}


def test_rows_logged_twice_are_noticed_at_the_source() -> None:
    def again(event: Event) -> Event:
        if isinstance(event, Logged) and event.bucket == 3:
            return replace(event, rows=(*event.rows, *event.rows))
        return event

    assert failed(story(change=again)).keys() == {"accepted"}


# -- held ---------------------------------------------------------------------------------------


def test_in_a_failure_one_bucket_more_is_kept_with_every_bucket() -> None:
    """Three are granted anyway; the failure has lasted for two buckets and a half."""
    at = BROKE_US + 250_000
    kept = [Held(at, "n1 log", "one", buckets) for buckets in (6, 7)]
    assert failed(story(BROKE, HEALED, kept[0])) == {}
    assert failed(story(BROKE, HEALED, kept[1])) == {
        "held": "n1 log holds 7 buckets of one, 0.25s after something broke; 6 are granted"
    }


def test_in_a_failure_a_node_may_read_all_buckets_again() -> None:
    """Ten of them, when the failure has lasted for two and a half."""
    kept = Held(BROKE_US + 250_000, "n1 inputs", "one", 13)
    assert failed(story(BROKE, HEALED, kept)) == {}
    assert failed(story(BROKE, HEALED, replace(kept, buckets=14))).keys() == {"held"}


def test_what_is_kept_goes_back_after_the_failure() -> None:
    over_us = HEALED_US + RECOVERY_US
    kept = Held(over_us, "n1 log", "one", 9)
    assert failed(story(BROKE, HEALED, kept)) == {}
    assert failed(story(BROKE, HEALED, replace(kept, at=over_us + 1))).keys() == {"bounded"}


def test_a_failure_that_follows_another_adds_to_it() -> None:
    again = [Broke(HEALED_US + 100_000, "cut", "a->b"), Healed(HEALED_US + 200_000, "cut", "a->b")]
    kept = Held(HEALED_US + 150_000, "n1 log", "one", 8)
    assert failed(story(BROKE, HEALED, *again, kept)) == {}
    assert failed(story(*again, kept)).keys() == {"held"}


def test_what_decisions_go_through_does_not_grow_in_a_failure() -> None:
    pending = Pending(HEALED_US - 1, "n1", "deadlines of out", 12, 12)
    assert failed(story(BROKE, HEALED, pending)) == {}
    assert failed(story(BROKE, HEALED, replace(pending, entries=13))) == {
        "held": "n1: deadlines of out has 13 entries to go through, and at most 12 are granted"
    }
