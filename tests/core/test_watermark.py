"""Which buckets close, which rows are late or in the future, and how such rows are reported."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.source_clock import CONFIRM_US, Followed, Read, Stepped
from holdfast.core.watermark import (
    NEVER_US,
    SUMMARY_US,
    Action,
    Arrived,
    Close,
    Closed,
    Excluded,
    Idled,
    Report,
    Tick,
    Watermark,
    WatermarkPlan,
    Working,
)

S = 1_000_000
DAY = 86_400 * S
#: The wall clock when monotonic time is 0: the start of a bucket.
NOW = 1_700_000_000 * S
WALL = WatermarkPlan(S, "wall", grace_us=2 * S, ahead_us=60 * S, idle_us=None)
DATA = WatermarkPlan(S, "data", grace_us=2 * S, ahead_us=60 * S, idle_us=10 * S)


def began(plan: WatermarkPlan, closed_before: int | None = None) -> Watermark:
    """A source that starts; a restart if `closed_before` is set."""
    watermark = Watermark(plan, closed_before)
    watermark.handle(Read(0, NOW))
    return watermark


def opened(plan: WatermarkPlan) -> Watermark:
    watermark = began(plan)
    watermark.handle(Closed(0, NOW))
    return watermark


def tick(watermark: Watermark, at: int, off_us: int = 0) -> list[Action]:
    """Actions of a tick; buckets to be closed are closed."""
    actions = watermark.handle(Tick(at, NOW + at + off_us))
    for action in actions:
        if isinstance(action, Close):
            watermark.handle(Closed(at, action.to_us // S * S))
    return actions


# -- by the wall clock --------------------------------------------------------------------------


def test_a_bucket_closes_grace_after_its_end() -> None:
    watermark = opened(WALL)
    assert tick(watermark, 2 * S + 999_999) == []
    assert tick(watermark, 3 * S) == [Close(NOW + 1 * S)]
    assert tick(watermark, 3 * S + 500_000) == []
    assert watermark.open_us == NOW + 1 * S


def test_a_wall_clock_that_is_a_day_ahead_for_one_tick_closes_no_extra_bucket() -> None:
    watermark = opened(WALL)
    assert tick(watermark, 3 * S, DAY) == [Stepped(3 * S, DAY, -DAY), Close(NOW + 1 * S)]
    assert watermark.future_after_us == NOW + 63 * S
    closed = [tick(watermark, at * S)[-1] for at in range(4, 10)]
    assert closed == [Close(NOW + at * S) for at in range(2, 8)]


def test_a_wall_clock_that_stays_ahead_closes_buckets_up_to_its_time() -> None:
    watermark = opened(WALL)
    tick(watermark, 3 * S, DAY)
    at = 3 * S + CONFIRM_US
    assert tick(watermark, at, DAY)[0] == Followed(at, DAY)
    assert watermark.open_us == NOW + DAY + at - 2 * S


def test_after_a_step_back_buckets_close_at_half_speed() -> None:
    watermark = opened(WALL)
    tick(watermark, 10 * S)
    closed = [tick(watermark, 10 * S + at * S, -600 * S) for at in range(1, 9)]
    assert sum(isinstance(action, Close) for actions in closed for action in actions) == 4
    assert watermark.open_us == NOW + 12 * S


def test_after_a_restart_behind_the_log_closing_continues_at_the_last_closed_bucket() -> None:
    watermark = began(WALL, NOW + DAY)
    tick(watermark, 2 * S)
    assert watermark.open_us == NOW + DAY + 1 * S


# -- by the data --------------------------------------------------------------------------------


def test_buckets_close_grace_behind_the_newest_row_even_if_it_is_old() -> None:
    watermark = began(DATA)
    old_us = NOW - DAY
    assert watermark.starts_us(old_us) == old_us - 2 * S
    watermark.handle(Closed(0, old_us - 2 * S))
    watermark.handle(Arrived(0, old_us + 30 * S))
    assert tick(watermark, 1 * S) == [Close(old_us + 28 * S)]
    assert tick(watermark, 2 * S) == []
    watermark.handle(Arrived(2 * S, old_us + 20 * S))  # out of order: no effect
    assert tick(watermark, 3 * S) == []
    watermark.handle(Arrived(3 * S, old_us + 40 * S))
    assert tick(watermark, 4 * S) == [Close(old_us + 38 * S)]


def test_a_pause_closes_no_bucket_until_the_source_is_idle() -> None:
    """After a restart, rows that waited meanwhile are not late."""
    watermark = began(DATA, NOW - 50 * S)
    assert [tick(watermark, at * S) for at in range(10)] == [[]] * 10
    watermark.handle(Arrived(10 * S, NOW + 10 * S))
    assert tick(watermark, 10 * S) == [Close(NOW + 8 * S)]


def test_an_idle_source_closes_buckets_by_the_clock_until_a_row_arrives() -> None:
    watermark = opened(DATA)
    watermark.handle(Arrived(0, NOW))
    tick(watermark, 0)
    assert tick(watermark, 9_999_999) == []
    assert tick(watermark, 10 * S) == [Idled(10 * S), Close(NOW + 8 * S)]
    assert tick(watermark, 11 * S) == [Close(NOW + 9 * S)]
    watermark.handle(Arrived(12 * S, NOW + 11 * S))
    assert tick(watermark, 13 * S) == []


def test_a_working_feed_is_not_idle() -> None:
    watermark = began(DATA)
    for at in range(0, 60 * S, S):
        watermark.handle(Working(at))
        assert tick(watermark, at) == []
    assert tick(watermark, 69 * S) == [Idled(69 * S), Close(NOW + 67 * S)]


def test_a_source_without_idle_time_is_never_idle() -> None:
    watermark = began(replace(DATA, idle_us=None))
    assert tick(watermark, 0) == tick(watermark, DAY) == []


# -- rows ---------------------------------------------------------------------------------------


def test_rows_too_far_ahead_of_the_source_clock_are_future_rows() -> None:
    for plan in (WALL, DATA, replace(WALL, clock="live")):
        assert opened(plan).future_after_us == NOW + 60 * S
    assert opened(replace(WALL, clock="manual")).future_after_us == NEVER_US


def test_a_stream_starts_at_the_time_of_its_clock() -> None:
    assert began(WALL).starts_us(NOW - DAY) == NOW - 2 * S
    manual = replace(WALL, clock="manual", grace_us=0)
    assert began(manual).starts_us(NOW - DAY) == NOW - DAY


def test_late_rows_are_reported_at_once_and_then_in_summaries() -> None:
    watermark = opened(WALL)

    def late(at: int, rows: int) -> list[Action]:
        return watermark.handle(Excluded(at, "late", rows, NOW - S))

    assert late(1 * S, 3) == [Report(1 * S, "late", 3, 3, NOW - S, NOW)]
    assert late(2 * S, 5) == late(3 * S, 7) == []
    future = watermark.handle(Excluded(4 * S, "future", 1, NOW + DAY))
    assert future == [Report(4 * S, "future", 1, 1, NOW + DAY, NOW)]
    due = 1 * S + SUMMARY_US
    reports = [a for a in tick(watermark, due) if isinstance(a, Report)]
    assert reports == [Report(due, "late", 12, 15, NOW - S, NOW)]
    assert [a for a in tick(watermark, 3 * due) if isinstance(a, Report)] == []


def test_a_source_without_ticks_reports_late_rows_when_it_closes_a_bucket() -> None:
    watermark = opened(replace(WALL, clock="manual", grace_us=0))
    watermark.handle(Excluded(0, "late", 1, NOW - S))
    watermark.handle(Excluded(1, "late", 4, NOW - S))
    report = Report(SUMMARY_US, "late", 4, 5, NOW - S, NOW + S)
    assert watermark.handle(Closed(SUMMARY_US, NOW + S)) == [report]
