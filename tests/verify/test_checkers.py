"""Each checker fails on the history that was broken for it; a correct history passes them all."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.verify.checkers import CHECKERS, Verdict, check, verdict_table
from holdfast.verify.history import (
    Accepted,
    Began,
    Concluded,
    Event,
    Given,
    History,
    Ideal,
    Owed,
    Pending,
    Reading,
    Relied,
    Reported,
    Stopped,
)
from tests.verify.histories import (
    BROKE,
    EMPTY,
    END_US,
    HEALED,
    end_us,
    failed,
    given_as,
    of_bucket,
    rows,
    story,
)


def test_a_correct_run_passes_all_checkers_in_order() -> None:
    verdicts = check(story(), monitored=True)
    assert [v.checker for v in verdicts] == [checker.__name__ for checker in CHECKERS]
    assert {v.outcome for v in verdicts} == {"ok"}, verdict_table(verdicts)
    assert failed(story(), monitored=True) == {}


def test_rows_of_a_bucket_have_no_order_and_nan_equals_nan() -> None:
    assert failed(story(change=given_as(3, reversed(rows(3))))) == {}
    other = [(1, float("nan"), None), (1, float("nan"), None), (2, "x", 1.5)]
    ideal = [(2, "x", 1.5), (1, float("nan"), None), (1, float("nan"), None)]
    history = story(
        Ideal(end_us(EMPTY), "out", EMPTY, tuple(ideal)),
        Given(end_us(EMPTY) + 5_000, "c", "out", EMPTY, tuple(other)),
        without=of_bucket(Ideal, EMPTY),
    )
    assert failed(history) == {}


# -- all together -------------------------------------------------------------------------------


def test_a_checker_that_raises_counts_as_failed() -> None:
    """A broken checker must not look like a passed one."""
    verdicts = check(story(without=lambda event: isinstance(event, Began)), monitored=True)
    assert {v.outcome for v in verdicts} == {"ok", "failed"}
    assert "does not state the bounds of the run" in verdict_table(verdicts)
    assert len(check(History())) == len(CHECKERS)
    odd = check(story(change=given_as(7, [([1], 2)])))
    assert {v.checker for v in odd if v.outcome == "failed"} >= {"wrong", "doubled", "lost"}


def test_reported_is_unknown_without_a_monitor() -> None:
    (verdict,) = [v for v in check(story()) if v.checker == "reported"]
    assert verdict.outcome == "unknown"


def test_a_history_keeps_its_verdicts_when_written_and_read(tmp_path: Path) -> None:
    """Covers every kind of event, and rows with every kind of value."""
    odd = ((1, None, "ü", 0.1, True, ("a", 2)),)
    history = story(
        BROKE, HEALED, Concluded(END_US, "c", "out", 99),
        Reported(END_US, "out", 7, "within", True), Stopped(END_US, "n1", "ours", "why"),
        Accepted(END_US, "two", odd), Given(END_US, "c", "out", 21, odd, "TENTATIVE", 2),
        Owed(END_US, "c", "out", None), Reading(1, "c", "out", "n1", "", 5),
        Relied(1, "n1", "out", "answers", ("n2",), ("n2",)), Relied(2, "n1", "out", "answers"),
        Pending(3, "n1", "timers", 2, 1),
    )  # fmt: skip
    path = tmp_path / "history.jsonl"
    history.write(path)
    again = History.read(path)
    assert again.events == history.events
    assert check(again) == check(history)
    assert failed(again).keys() == {"alive", "accepted", "corrected", "held", "labelled"}


def test_the_verdict_table_has_one_line_per_verdict() -> None:
    verdicts = [Verdict("lost", "ok"), Verdict("order", "failed", "bucket 7 after 8", 2_500_000)]
    assert verdict_table(verdicts).splitlines() == [
        "checker  outcome  at      why",
        "lost     ok",
        "order    failed   2.500s  bucket 7 after 8",
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_checking_a_history_takes_milliseconds(turned: bool) -> None:
    """A few milliseconds each; the bound is generous because machines may be busy."""

    def change(event: Event) -> Event:
        return (
            replace(event, rows=event.rows[::-1]) if turned and isinstance(event, Given) else event
        )

    history = story(buckets=60, change=change)
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        assert failed(history) == {}
        spent.append(time.perf_counter() - began)
    assert min(spent) < 0.03
