"""How the source clock follows a wall clock that is stepped."""

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
    """Read a wall clock that is `off_us` off; return the actions and the source clock's time."""
    actions = clock.handle(Read(at, NOW + at + off_us))
    return actions, clock.now_us - NOW


def test_without_steps_the_source_clock_shows_the_wall_clock() -> None:
    clock = began()
    for at in range(0, 10 * S, 300_000):
        assert read(clock, at, 0) == ([], at)
    assert clock.steps == 0


def test_a_step_of_a_day_ahead_for_one_tick_is_not_followed() -> None:
    clock = began()
    assert read(clock, 1 * S, DAY) == ([Stepped(1 * S, DAY, -DAY)], 1 * S)
    assert read(clock, 2 * S, 0) == ([Stepped(2 * S, -DAY, 0), Agreed(2 * S)], 2 * S)
    assert read(clock, 60 * S, 0) == ([], 60 * S)
    assert clock.steps == 2


@pytest.mark.parametrize("step_us", [STEP_US, 3 * S, CONFIRM_US, HOUR, DAY])
def test_a_step_ahead_is_followed_when_it_has_lasted_for_its_own_length(step_us: int) -> None:
    """The wait is at most `CONFIRM_US`."""
    clock = began()
    assert read(clock, 1 * S, step_us) == ([Stepped(1 * S, step_us, -step_us)], 1 * S)
    at = 1 * S + min(step_us, CONFIRM_US)
    assert read(clock, at - 1, step_us) == ([], at - 1)
    assert read(clock, at, step_us) == ([Followed(at, step_us), Agreed(at)], at + step_us)


def test_every_step_has_its_own_wait() -> None:
    clock = began()
    read(clock, 1 * S, HOUR)
    assert read(clock, 9 * S, DAY) == ([Stepped(9 * S, DAY - HOUR, -DAY)], 9 * S)
    assert read(clock, 10 * S, DAY) == ([], 10 * S)
    assert read(clock, 11 * S, DAY) == ([Followed(11 * S, HOUR)], 11 * S + HOUR)
    assert read(clock, 18 * S, DAY) == ([], 18 * S + HOUR)
    assert read(clock, 19 * S, DAY)[1] == 19 * S + DAY


@pytest.mark.parametrize("small_us", [150_000, -150_000])
def test_a_small_step_does_not_postpone_a_large_one(small_us: int) -> None:
    clock = began()
    read(clock, 1 * S, HOUR)
    assert read(clock, 9 * S, HOUR + small_us)[1] == 9 * S
    actions, shown = read(clock, 11 * S, HOUR + small_us)
    assert actions == [Followed(11 * S, HOUR + small_us), Agreed(11 * S)]
    assert shown == 11 * S + HOUR + small_us, "the small step has also lasted for its own length"


def test_a_step_that_was_reverted_is_not_followed_with_an_earlier_one() -> None:
    clock = began()
    read(clock, 1 * S, HOUR)
    read(clock, 2 * S, DAY)
    read(clock, 10 * S, HOUR)
    assert read(clock, 11 * S, HOUR)[1] == 11 * S + HOUR


def test_a_wall_clock_with_repeated_steps_is_followed_by_its_lasting_offset() -> None:
    """An hour ahead, and then a step of 150 ms every 9 s, alternately ahead and back."""
    clock, followed = began(), []
    for at in range(S, 60 * S, S // 2):
        off_us = HOUR + (150_000 if at // (9 * S) % 2 else 0)
        followed += [
            action for action in read(clock, at, off_us)[0] if isinstance(action, Followed)
        ]
        assert at < 11 * S or abs(clock.apart_us) <= 150_000
    assert (followed[0].at, followed[0].by_us) == (11 * S, HOUR + 150_000)


def test_a_wrong_wall_clock_that_is_corrected_has_no_lasting_effect() -> None:
    clock = began()
    read(clock, 10 * S, -HOUR)
    assert read(clock, 18 * S, -HOUR)[1] == 9 * S  # half speed
    assert read(clock, 19 * S, 0)[1] == 10 * S
    assert read(clock, 28 * S, 0)[1] == 28 * S


def test_a_step_back_slows_the_source_clock_down_until_both_clocks_agree() -> None:
    clock = began()
    read(clock, 10 * S, 0)
    assert read(clock, 11 * S, -2 * S) == ([Stepped(11 * S, -2 * S, 2 * S)], 10 * S + 500_000)
    assert read(clock, 12 * S, -2 * S) == ([], 11 * S)
    assert read(clock, 14 * S, -2 * S) == ([Agreed(14 * S)], 12 * S)
    assert read(clock, 15 * S, -2 * S) == ([], 13 * S)


def test_after_a_step_back_by_an_hour_both_clocks_agree_after_two_hours() -> None:
    clock = began()
    at = 0
    while clock.steps == 0 or clock.apart_us:
        at += S
        read(clock, at, -HOUR)
    assert at == SLOWER * HOUR


def test_the_source_clock_starts_at_the_last_closed_time() -> None:
    """After a restart with a wall clock behind the log, closing continues at half speed."""
    clock = SourceClock(NOW + 10 * S)
    assert clock.handle(Read(0, NOW)) == [Behind(0, 10 * S)]
    assert read(clock, 4 * S, 0) == ([], 12 * S)
    assert read(clock, 20 * S, 0) == ([Agreed(20 * S)], 20 * S)
    assert clock.steps == 0


def test_jitter_between_reading_the_two_clocks_is_not_a_step() -> None:
    clock = began()
    for at in range(S, 5 * S, 100_000):
        actions, shown = read(clock, at, (at // 100_000 % 3 - 1) * STEP_US // 3)
        assert actions == []
        assert abs(shown - at) <= STEP_US


@given(st.lists(st.tuples(st.integers(0, 3 * S), st.integers(-2 * DAY, 2 * DAY)), max_size=40))
def test_the_source_clock_never_goes_back_and_never_runs_at_less_than_half_speed(
    readings: list[tuple[int, int]],
) -> None:
    clock, at, shown = began(), 0, 0
    for elapsed_us, off_us in readings:
        at += elapsed_us
        before, (actions, shown) = shown, read(clock, at, off_us)
        assert shown - before >= elapsed_us // SLOWER
        jumped = shown - before >= elapsed_us + STEP_US
        assert jumped == any(isinstance(action, Followed) for action in actions)
