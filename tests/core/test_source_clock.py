"""The source clock: what it makes of a wall clock that is set. Times are seconds in the tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.source_clock import (
    CONFIRM_US,
    SLOWER,
    STEP_US,
    Agreed,
    Behind,
    ClockAction,
    Followed,
    Read,
    SourceClock,
    Stepped,
)

S = 1_000_000
HOUR, DAY = 3_600 * S, 86_400 * S
#: The wall clock when monotonic time is 0.
NOW = 1_700_000_000 * S


def began() -> SourceClock:
    clock = SourceClock()
    assert clock.handle(Read(0, NOW)) == []
    return clock


def read(clock: SourceClock, at: int, off_us: int) -> tuple[list[ClockAction], int]:
    """The wall clock is `off_us` off; what happens, and what the source clock then shows."""
    actions = clock.handle(Read(at, NOW + at + off_us))
    return actions, clock.now_us - NOW


def test_a_clock_that_nobody_sets_is_the_wall_clock() -> None:
    clock = began()
    for at in range(0, 10 * S, 300_000):
        assert read(clock, at, 0) == ([], at)
    assert clock.steps == 0


def test_a_day_ahead_for_one_tick_is_not_followed() -> None:
    clock = began()
    assert read(clock, 1 * S, DAY) == ([Stepped(1 * S, DAY, -DAY)], 1 * S)
    assert read(clock, 2 * S, 0) == ([Stepped(2 * S, -DAY, 0), Agreed(2 * S)], 2 * S)
    assert read(clock, 60 * S, 0) == ([], 60 * S)
    assert clock.steps == 2


@pytest.mark.parametrize("step_us", [STEP_US, 3 * S, CONFIRM_US, HOUR, DAY])
def test_a_step_ahead_is_followed_when_it_has_stood_for_as_long_as_it_is(step_us: int) -> None:
    """At most `CONFIRM_US`."""
    clock = began()
    assert read(clock, 1 * S, step_us) == ([Stepped(1 * S, step_us, -step_us)], 1 * S)
    at = 1 * S + min(step_us, CONFIRM_US)
    assert read(clock, at - 1, step_us) == ([], at - 1)
    assert read(clock, at, step_us) == ([Followed(at, step_us), Agreed(at)], at + step_us)


def test_every_step_has_to_stand_by_itself() -> None:
    clock = began()
    read(clock, 1 * S, HOUR)
    assert read(clock, 9 * S, DAY) == ([Stepped(9 * S, DAY - HOUR, -DAY)], 9 * S)
    assert read(clock, 10 * S, DAY) == ([], 10 * S)
    assert read(clock, 11 * S, DAY) == ([Followed(11 * S, HOUR)], 11 * S + HOUR)
    assert read(clock, 18 * S, DAY) == ([], 18 * S + HOUR)
    assert read(clock, 19 * S, DAY)[1] == 19 * S + DAY


@pytest.mark.parametrize("small_us", [150_000, -150_000])
def test_a_small_step_does_not_put_off_the_large_one_that_stands(small_us: int) -> None:
    clock = began()
    read(clock, 1 * S, HOUR)
    assert read(clock, 9 * S, HOUR + small_us)[1] == 9 * S
    actions, shown = read(clock, 11 * S, HOUR + small_us)
    assert actions == [Followed(11 * S, HOUR + small_us), Agreed(11 * S)]
    assert shown == 11 * S + HOUR + small_us, "the small one has stood for as long as it is, too"


def test_what_was_taken_back_is_not_followed_with_the_rest() -> None:
    clock = began()
    read(clock, 1 * S, HOUR)
    read(clock, 2 * S, DAY)
    read(clock, 10 * S, HOUR)
    assert read(clock, 11 * S, HOUR)[1] == 11 * S + HOUR


def test_a_clock_that_never_stands_still_is_followed_as_far_as_it_has_stood() -> None:
    """An hour ahead, and from then on a step of 150 ms every 9 s, to and fro."""
    clock, followed = began(), []
    for at in range(S, 60 * S, S // 2):
        off_us = HOUR + (150_000 if at // (9 * S) % 2 else 0)
        followed += [it for it in read(clock, at, off_us)[0] if isinstance(it, Followed)]
        assert at < 11 * S or abs(clock.apart_us) <= 150_000
    assert (followed[0].at, followed[0].by_us) == (11 * S, HOUR + 150_000)


def test_a_wrong_clock_that_is_put_right_leaves_no_trace() -> None:
    clock = began()
    read(clock, 10 * S, -HOUR)
    assert read(clock, 18 * S, -HOUR)[1] == 9 * S  # half speed
    assert read(clock, 19 * S, 0)[1] == 10 * S
    assert read(clock, 28 * S, 0)[1] == 28 * S


def test_a_step_back_slows_the_clock_down_until_both_agree() -> None:
    clock = began()
    read(clock, 10 * S, 0)
    assert read(clock, 11 * S, -2 * S) == ([Stepped(11 * S, -2 * S, 2 * S)], 10 * S + 500_000)
    assert read(clock, 12 * S, -2 * S) == ([], 11 * S)
    assert read(clock, 14 * S, -2 * S) == ([Agreed(14 * S)], 12 * S)
    assert read(clock, 15 * S, -2 * S) == ([], 13 * S)


def test_a_clock_set_back_by_an_hour_agrees_after_two() -> None:
    clock = began()
    at = 0
    while clock.steps == 0 or clock.apart_us:
        at += S
        read(clock, at, -HOUR)
    assert at == SLOWER * HOUR


def test_the_clock_starts_at_what_was_closed_before() -> None:
    """Restarted with a wall clock behind the log: closing goes on, at half speed."""
    clock = SourceClock(NOW + 10 * S)
    assert clock.handle(Read(0, NOW)) == [Behind(0, 10 * S)]
    assert read(clock, 4 * S, 0) == ([], 12 * S)
    assert read(clock, 20 * S, 0) == ([Agreed(20 * S)], 20 * S)
    assert clock.steps == 0


def test_jitter_between_reading_the_two_clocks_is_no_step() -> None:
    clock = began()
    for at in range(S, 5 * S, 100_000):
        actions, shown = read(clock, at, (at // 100_000 % 3 - 1) * STEP_US // 3)
        assert actions == []
        assert abs(shown - at) <= STEP_US


@given(st.lists(st.tuples(st.integers(0, 3 * S), st.integers(-2 * DAY, 2 * DAY)), max_size=40))
def test_it_never_goes_back_and_never_runs_at_less_than_half_speed(
    readings: list[tuple[int, int]],
) -> None:
    clock, at, shown = began(), 0, 0
    for elapsed_us, off_us in readings:
        at += elapsed_us
        before, (actions, shown) = shown, read(clock, at, off_us)
        assert shown - before >= elapsed_us // SLOWER
        jumped = shown - before >= elapsed_us + STEP_US
        assert jumped == any(isinstance(action, Followed) for action in actions)
