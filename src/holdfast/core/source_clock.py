"""The clock by which a source closes buckets: monotonic time, anchored to the wall clock. Pure.

Rows carry wall clock times, so buckets must close by the wall clock; but a wall clock can be
stepped. A wall clock that is a day ahead for a moment would close a day of buckets permanently, and
a wall clock that is stepped back by an hour would close no bucket for an hour. The source clock
therefore runs with monotonic time, never goes back, never stops, and follows steps of the wall
clock by these rules:

- A step ahead is followed when it has lasted for its own length, at most `CONFIRM_US`. A step that
  is reverted at once has no effect. Further steps ahead, and steps back by a part of the first one,
  do not restart the wait: the offset that the wall clock had throughout the wait is followed.
- A step back is followed at half speed until both clocks agree, after twice the length of the step.
"""

from __future__ import annotations

from typing import Literal

from holdfast.frozen import dataclass

#: Smallest change of the wall clock against monotonic time that counts as a step and is reported.
#: A smaller change may be the pause between reading the two clocks.
STEP_US = 100_000
#: Longest wait before a step ahead is followed.
CONFIRM_US = 10_000_000
#: Factor by which the source clock runs slower while it is ahead of the wall clock.
SLOWER = 2


@dataclass(frozen=True, slots=True)
class Read:
    """Both clocks were read. `at` is monotonic time and never decreases."""

    at: int
    wall_us: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """The wall clock was stepped, ahead or back (`by_us` < 0). The source clock is now `apart_us`
    ahead of the wall clock (behind it if negative)."""

    at: int
    by_us: int
    apart_us: int


@dataclass(frozen=True, slots=True)
class Behind:
    """At start, the wall clock is behind the buckets that the source has already closed. Followed
    like a step back."""

    at: int
    by_us: int


@dataclass(frozen=True, slots=True)
class Followed:
    """A step ahead has lasted long enough: the source clock has jumped."""

    at: int
    by_us: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The source clock shows the time of the wall clock again."""

    at: int


ClockAction = Stepped | Behind | Followed | Agreed


class SourceClock:
    def __init__(self, not_before_us: int | None = None) -> None:
        """`not_before_us`: the time at which the last bucket that the source has closed was due.
        The source clock starts there if the wall clock is behind."""
        self._not_before_us = not_before_us
        self._at: int | None = None
        #: Offset from monotonic time of the wall clock when last read, and of the source clock.
        self._wall = 0
        self._shown = 0
        #: While the wall clock is ahead: (since, offset), the time since when its offset has been
        #: at least this value. Both ascend.
        self._offsets: list[tuple[int, int]] = []
        self._apart = False
        self.steps = 0

    @property
    def now_us(self) -> int:
        """Time of the source clock when the clocks were last read."""
        assert self._at is not None, "the clocks have not been read yet"
        return self._shown + self._at

    @property
    def apart_us(self) -> int:
        """By how much the source clock is ahead of the wall clock."""
        return self._shown - self._wall

    def handle(self, event: Read) -> list[ClockAction]:
        wall = event.wall_us - event.at
        if self._at is None:
            return self._begin(event.at, wall)
        elapsed_us, step_us = event.at - self._at, wall - self._wall
        assert elapsed_us >= 0, f"monotonic time went back from {self._at} to {event.at}"
        self._at, self._wall = event.at, wall
        actions: list[ClockAction] = []
        if abs(step_us) >= STEP_US:
            self.steps += 1
            actions.append(Stepped(event.at, step_us, self.apart_us))
        if -self.apart_us < STEP_US:
            self._offsets.clear()
            self._shown = max(wall, self._shown - elapsed_us // SLOWER)
        else:
            actions += self._follow(event.at)
        return actions + self._agreement(event.at)

    def _follow(self, at: int) -> list[ClockAction]:
        """Follow the wall clock to the offset that has lasted long enough."""
        since = at
        while self._offsets and self._offsets[-1][1] > self._wall:
            since, _ = self._offsets.pop()
        if self._wall - (self._offsets[-1][1] if self._offsets else self._shown) >= STEP_US:
            self._offsets.append((since, self._wall))
        before = self._shown
        while self._offsets:
            since, offset = self._offsets[0]
            if at - since < min(offset - self._shown, CONFIRM_US):
                break
            self._shown = offset
            del self._offsets[0]
        if self._shown == before:
            return []
        if self._wall - self._shown < STEP_US:
            self._shown = self._wall
        return [Followed(at, self._shown - before)]

    def _begin(self, at: int, wall: int) -> list[ClockAction]:
        self._at, self._wall = at, wall
        self._shown = wall if self._not_before_us is None else max(wall, self._not_before_us - at)
        if self.apart_us < STEP_US:
            return []
        self._apart = True
        return [Behind(at, self.apart_us)]

    def _agreement(self, at: int) -> list[ClockAction]:
        was_apart, self._apart = self._apart, abs(self.apart_us) >= STEP_US
        return [Agreed(at)] if was_apart and not self._apart else []


Course = Literal["slower", "confirms", "as before"]


def course_of(apart_us: int) -> tuple[Course, int]:
    """How a source clock that is `apart_us` ahead of the wall clock runs, and for how long."""
    if apart_us >= STEP_US:
        return "slower", SLOWER * apart_us
    if apart_us <= -STEP_US:
        return "confirms", min(-apart_us, CONFIRM_US)
    return "as before", 0
