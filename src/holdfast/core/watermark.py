"""When the buckets of a source close, and which rows are excluded. Pure.

A closed bucket never opens again. The `clock` option of a source determines when buckets close:

- `wall`: a bucket closes `grace` after its end by the source clock (`core.source_clock`).
- `data`: buckets close up to the time of the newest row less `grace`, so a backlog of any age is
  not late. When no row has arrived for `idle` and no feed is working, the source clock closes
  buckets, as with `wall`.
- `live` and `manual`: a feed or the application closes buckets by calling `advance`.

A row of a closed bucket is late. A row further ahead of the clock than `ahead` is a future row. A
future row is excluded before it counts as the newest row: one wrong time must not close all buckets
before it. Both kinds are reported at once, then in summaries.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal, assert_never

from holdfast.core.source_clock import ClockAction, Read, SourceClock
from holdfast.frozen import dataclass
from holdfast.types import bucket_of

#: Shortest time between two reports of excluded rows with the same reason.
SUMMARY_US = 60_000_000
#: The longest time between two ticks.
_TICK_US = 500_000
#: Later than every row.
NEVER_US = 2**62

Reason = Literal["late", "future", "null time"]


@dataclass(frozen=True, slots=True)
class WatermarkPlan:
    """The options of a source that determine when its buckets close."""

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
    """Rows were accepted; the newest of them has the time `newest_us`."""

    at: int
    newest_us: int


@dataclass(frozen=True, slots=True)
class Working:
    """The feed is about to deliver rows: the source is not idle."""

    at: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Every bucket before `open_us` is closed."""

    at: int
    open_us: int


@dataclass(frozen=True, slots=True)
class Excluded:
    """Rows were excluded; `example_us` is the time of one of them."""

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
    """No row has arrived for `idle`: the source clock closes buckets until a row arrives."""

    at: int


@dataclass(frozen=True, slots=True)
class Report:
    """Number of rows that were excluded since the last report (`rows`), and in total."""

    at: int
    reason: Reason
    rows: int
    total: int
    example_us: int | None
    #: None before the first bucket is open.
    closed_upto_us: int | None


Action = ClockAction | Close | Idled | Report


@dataclass(slots=True)
class _Excluded:
    """Excluded rows with one reason, and the last report of them."""

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
    #: Time at which rows last arrived, or the feed last announced rows.
    _active_at: int | None = None
    _idle: bool = False
    _excluded: dict[Reason, _Excluded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        follows = self.plan.clock in ("wall", "live") and self.open_us is not None
        self.clock = SourceClock((self.open_us or 0) + self.plan.grace_us if follows else None)

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Read():
                return list(self.clock.handle(event))
            case Tick():
                read = self.clock.handle(Read(event.at, event.wall_us))
                # Closing may fail when the disk is full, so reports come first.
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
                excluded = self._excluded.setdefault(event.reason, _Excluded())
                excluded.rows, excluded.total = (
                    excluded.rows + event.rows,
                    excluded.total + event.rows,
                )
                excluded.example_us = event.example_us
                return self._reports(event.at)
            case _:
                assert_never(event)

    # -- limits for rows --------------------------------------------------------------------------

    @property
    def future_after_us(self) -> int:
        """Rows later than this are future rows. A `manual` clock has no limit, because its times
        need not be real."""
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
        """Time until the next tick: until the source clock closes the next bucket, but short enough
        to notice steps of the wall clock and rows that close buckets."""
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
        for reason, excluded in self._excluded.items():
            due = excluded.last_at is None or at - excluded.last_at >= SUMMARY_US
            if excluded.rows and due:
                actions.append(
                    Report(
                        at, reason, excluded.rows, excluded.total, excluded.example_us, self.open_us
                    )
                )
                excluded.last_at, excluded.rows = at, 0
        return actions
