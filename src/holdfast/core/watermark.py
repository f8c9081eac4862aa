"""Up to where a source's buckets are closed, and which rows are not taken as they are. Pure.

A bucket that is closed never opens again, so this is where event time is kept or lost:

- `wall`: buckets close `grace` after their end by the source clock (`core.source_clock`);
- `data`: up to the newest row less `grace`, so that a backlog is not late however old it is. When
  no row has come for `idle` and no feed is at work, the source clock closes, as with `wall`;
- `live` and `manual`: by whoever calls `advance`, a feed or the application.

A row of a closed bucket is late. A row further ahead of the clock than `ahead` is of the future,
and is put aside before it counts: one wrong time must not close the buckets before it. Both are
reported at once, then in summaries.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal, assert_never

from holdfast.core.source_clock import ClockAction, Read, SourceClock
from holdfast.frozen import dataclass
from holdfast.types import bucket_of

#: Between two reports of rows that are not taken as they are, for the same reason.
SUMMARY_US = 60_000_000
#: The longest time between two ticks.
_TICK_US = 500_000
#: Later than every row.
NEVER_US = 2**62

Reason = Literal["late", "future", "null time"]


@dataclass(frozen=True, slots=True)
class WatermarkPlan:
    """The options of a source that say when its buckets close."""

    width_us: int
    #: `wall`, `data`, `live` or `manual`.
    clock: str
    grace_us: int
    ahead_us: int
    #: None: only rows close buckets of a `data` source.
    idle_us: int | None


# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Both clocks were read, and buckets may be closed now."""

    at: int
    wall_us: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows were taken, the newest of this time."""

    at: int
    newest_us: int


@dataclass(frozen=True, slots=True)
class Working:
    """The feed is about to bring rows: the source is not idle."""

    at: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Every bucket before `open_us` is closed."""

    at: int
    open_us: int


@dataclass(frozen=True, slots=True)
class Excluded:
    """Rows that cannot be taken as they are; `example_us` is the time of one of them."""

    at: int
    reason: Reason
    rows: int
    example_us: int | None


Event = Read | Tick | Arrived | Working | Closed | Excluded

# -- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Close:
    """Close every bucket that ended before `to_us`."""

    to_us: int


@dataclass(frozen=True, slots=True)
class Idled:
    """No row has come for `idle`: from now on the source clock closes, until one does."""

    at: int


@dataclass(frozen=True, slots=True)
class Report:
    """So many rows since the last report, and `total` so far, were not taken as they are."""

    at: int
    reason: Reason
    rows: int
    total: int
    example_us: int | None
    #: None before the first bucket is open.
    closed_upto_us: int | None


Action = ClockAction | Close | Idled | Report


@dataclass(slots=True)
class _Told:
    """What was reported of one reason."""

    last_at: int | None = None
    rows: int = 0
    total: int = 0
    example_us: int | None = None


@dataclass(slots=True)
class Watermark:
    plan: WatermarkPlan
    #: First instant that is not closed; None before the stream is open.
    open_us: int | None
    clock: SourceClock = field(init=False)
    _newest_us: int | None = None
    #: When a row came last, or anything that promises one.
    _active_at: int | None = None
    _idle: bool = False
    _told: dict[Reason, _Told] = field(default_factory=dict)

    def __post_init__(self) -> None:
        follows = self.plan.clock in ("wall", "live") and self.open_us is not None
        self.clock = SourceClock((self.open_us or 0) + self.plan.grace_us if follows else None)

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Read():
                return list(self.clock.handle(event))
            case Tick():
                read = self.clock.handle(Read(event.at, event.wall_us))
                # Closing may fail for lack of space: what is only told comes first.
                return [*read, *self._reports(event.at), *self._close(event.at)]
            case Arrived():
                self._active_at, self._idle = event.at, False
                if self._newest_us is None or event.newest_us > self._newest_us:
                    self._newest_us = event.newest_us
                return []
            case Working():
                self._active_at, self._idle = event.at, False
                return []
            case Closed():
                self.open_us = event.open_us
                return self._reports(event.at)
            case Excluded():
                told = self._told.setdefault(event.reason, _Told())
                told.rows, told.total = told.rows + event.rows, told.total + event.rows
                told.example_us = event.example_us
                return self._reports(event.at)
            case _:
                assert_never(event)

    # -- what rows are held against ---------------------------------------------------------------

    @property
    def future_after_us(self) -> int:
        """Later rows are of the future. With a `manual` clock time need not be real."""
        manual = self.plan.clock == "manual"
        return NEVER_US if manual else self.clock.now_us + self.plan.ahead_us

    def starts_us(self, oldest_us: int) -> int:
        """Where the stream begins, if these are its first rows."""
        match self.plan.clock:
            case "wall":
                return self.clock.now_us - self.plan.grace_us
            case "data":
                return oldest_us - self.plan.grace_us
            case _:
                return oldest_us

    def due_in_us(self) -> int:
        """How long until the next tick: until the source clock closes the next bucket, but soon
        enough to notice steps of the wall clock and rows that close buckets."""
        past_us = (self.clock.now_us - self.plan.grace_us) % self.plan.width_us
        return min(self.plan.width_us - past_us, _TICK_US)

    # -- decisions --------------------------------------------------------------------------------

    def _close(self, at: int) -> list[Action]:
        match self.plan.clock:
            case "wall":
                return self._close_to(self.clock.now_us - self.plan.grace_us)
            case "data":
                return self._close_by_data(at)
            case _:
                return []

    def _close_by_data(self, at: int) -> list[Action]:
        actions: list[Action] = []
        to_us, idle_us = self._newest_us, self.plan.idle_us
        if self._active_at is None:
            self._active_at = at
        if idle_us is not None and at - self._active_at >= idle_us:
            if not self._idle:
                self._idle = True
                actions.append(Idled(at))
            now_us = self.clock.now_us
            to_us = now_us if to_us is None else max(to_us, now_us)
        return actions if to_us is None else actions + self._close_to(to_us - self.plan.grace_us)

    def _close_to(self, to_us: int) -> list[Action]:
        width_us = self.plan.width_us
        upto = None if self.open_us is None else bucket_of(self.open_us, width_us)
        return [Close(to_us)] if upto is None or bucket_of(to_us, width_us) > upto else []

    def _reports(self, at: int) -> list[Action]:
        actions: list[Action] = []
        for reason, told in self._told.items():
            due = told.last_at is None or at - told.last_at >= SUMMARY_US
            if told.rows and due:
                actions.append(
                    Report(at, reason, told.rows, told.total, told.example_us, self.open_us)
                )
                told.last_at, told.rows = at, 0
        return actions
