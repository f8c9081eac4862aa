"""Checkers of internal properties: each history is broken for one checker."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


def test_replicas_produce_the_same_rows() -> None:
    other = Made(END_US, "n2", 2, "out", 7, "STABLE", "beef")
    assert failed(story(other)) == {"converge": "bucket 7 of out differs between n1 and n2"}
    assert failed(story(replace(other, stability="TENTATIVE"))) == {}
    assert failed(story(replace(other, bucket=99))) == {}


def test_accepted_rows_are_in_the_log() -> None:
    def without_one(event: Event) -> Event:
        if isinstance(event, Logged) and event.bucket == 7:
            return replace(event, rows=event.rows[1:])
        return event

    violations = failed(story(change=without_one))
    assert violations.keys() == {"accepted"}
    assert str(rows(7)[0]) in violations["accepted"]
    again = Accepted(END_US, "one", rows(7)[:1])
    assert failed(story(again)).keys() == {"accepted"}  # once in the log, accepted twice
    unanswered = Logged(END_US, "two", 3, rows(3))
    assert failed(story(unanswered)) == {}


def test_no_process_stops_because_of_a_bug() -> None:
    stopped = Stopped(BROKE_US + 5, "n1", "ours", "illegal move")
    violations = failed(story(BROKE, HEALED, stopped))
    assert violations == {"alive": "n1 stopped (fault of: ours): illegal move"}


def test_no_process_blames_a_fault_before_the_first_fault() -> None:
    stopped = Stopped(BROKE_US, "n1", "world", "no space left")
    assert failed(story(BROKE, HEALED, stopped)) == {}
    assert failed(story(BROKE, HEALED, replace(stopped, at=END_US))) == {}
    assert "no space left" in failed(story(stopped))["alive"]
    early = replace(stopped, at=BROKE_US - 1)
    assert failed(story(BROKE, HEALED, early)).keys() == {"alive"}
    again = (replace(BROKE, at=END_US), replace(HEALED, at=END_US))
    assert failed(story(BROKE, HEALED, *again, stopped)) == {}


def test_rows_logged_twice_by_a_source_fail_accepted() -> None:
    def again(event: Event) -> Event:
        if isinstance(event, Logged) and event.bucket == 3:
            return replace(event, rows=(*event.rows, *event.rows))
        return event

    assert failed(story(change=again)).keys() == {"accepted"}


# -- held ---------------------------------------------------------------------------------------


def test_every_bucket_of_a_failure_may_add_one_retained_bucket() -> None:
    """Three buckets are always allowed; the failure has lasted for two and a half buckets."""
    at = BROKE_US + 250_000
    held = [Held(at, "n1 log", "one", buckets) for buckets in (6, 7)]
    assert failed(story(BROKE, HEALED, held[0])) == {}
    assert failed(story(BROKE, HEALED, held[1])) == {
        "held": "n1 log holds 7 buckets of one, 0.25s after a fault began, allowed: 6"
    }


def test_a_node_may_read_all_buckets_again_during_a_failure() -> None:
    """Ten buckets since the start, although the failure has lasted for two and a half buckets."""
    held = Held(BROKE_US + 250_000, "n1 inputs", "one", 13)
    assert failed(story(BROKE, HEALED, held)) == {}
    assert failed(story(BROKE, HEALED, replace(held, buckets=14))).keys() == {"held"}


@pytest.mark.parametrize("fault", ["wipe", "replace"])
def test_the_log_of_a_node_that_lost_its_storage_may_hold_all_buckets_again(fault: str) -> None:
    """Its consumers have yet to acknowledge the results to the new instance."""
    held = Held(BROKE_US + 250_000, "n1 log", "one", 13)
    broke, healed = replace(BROKE, fault=fault, on="n1"), replace(HEALED, fault=fault, on="n1")
    assert failed(story(broke, healed, held)) == {}
    assert failed(story(broke, healed, replace(held, buckets=14))).keys() == {"held"}
    other = replace(held, where="n2 log")
    assert failed(story(broke, healed, other)).keys() == {"held"}


def test_retained_buckets_are_released_after_the_failure() -> None:
    over_us = HEALED_US + RECOVERY_US
    held = Held(over_us, "n1 log", "one", 9)
    assert failed(story(BROKE, HEALED, held)) == {}
    assert failed(story(BROKE, HEALED, replace(held, at=over_us + 1))).keys() == {"bounded"}


def test_overlapping_failures_count_as_one_longer_failure() -> None:
    again = [Broke(HEALED_US + 100_000, "cut", "a->b"), Healed(HEALED_US + 200_000, "cut", "a->b")]
    held = Held(HEALED_US + 150_000, "n1 log", "one", 8)
    assert failed(story(BROKE, HEALED, *again, held)) == {}
    assert failed(story(*again, held)).keys() == {"held"}


def test_the_entries_to_scan_do_not_grow_during_a_failure() -> None:
    pending = Pending(HEALED_US - 1, "n1", "deadlines of out", 12, 12)
    assert failed(story(BROKE, HEALED, pending)) == {}
    assert failed(story(BROKE, HEALED, replace(pending, entries=13))) == {
        "held": "n1: deadlines of out has 13 entries to scan, allowed: 12"
    }
