"""Continuous eventual checkpoints (CEC): which windows leave a footprint in the output log, and
when. Pure.

The state of an operator consists of open windows. A window is checkpointed alone, as a *footprint*
between the results in the output log: when it opens (Gopen), now and then while it is open
(Gcheck), and when it closes (Gclose; in the paper, its result). After a crash, the newest
footprints of the windows that were open are read from the log, and the input is replayed from T,
the oldest of them. Each window ignores the rows that its footprint contains (section II.B).

So recovery takes the longer,

q   the more entries the log has since T, the *extent*, which have to be read, and
u   the more rows the input has since T, which have to be replayed.

Windows that stay open for long hold T back. They leave a new footprint when q exceeds Q or u
exceeds U, the oldest footprint first (section III.A). Time for this is limited to an interval CI in
every period CP (section III). Neither limit matters for correctness, only for the time of recovery.

Time is a bucket; a footprint contains the rows up to the end of its bucket. The windows themselves
are in files of the engine. Here they are only counted, by the bucket of the newest footprint.
A window that opened after T needs no footprint: replaying its rows opens it again. It counts as if
it had one at the end of the step before. So T is always the end of a step: a window that opens and
closes within a step is replayed as a whole, or not at all, and leaves nothing.

Time windows and joins are not replayed. Their footprints are files of panes and of rows, which
never change, and rows in the inputs that they refer to. Recovery reads these rows again, so they
count as well: if there are more than U, they are folded into files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class Targets:
    """Footprints are written if recovery would have to read or to replay more than this."""

    #: Q: entries of the output log.
    entries: int | None = None
    #: U: input rows.
    rows: int | None = None

    def met(self, entries: int, rows: int) -> bool:
        return (self.entries is None or entries <= self.entries) and (
            self.rows is None or rows <= self.rows
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """At most `interval_us` of every `period_us` are spent on footprints of open windows."""

    interval_us: int
    period_us: int


@dataclass(frozen=True, slots=True)
class Checks:
    """Windows that should leave a footprint at the end of the step: those whose newest one is in
    bucket `upto` or earlier, the oldest first, at most `most`."""

    upto: int
    most: int


#: Most rows that recovery replays, unless the user states another number.
_ROWS_MAX = 1_000_000
#: CI and CP.
_PACE = Pace(5_000, 100_000)
#: Shortest duration of a footprint that is assumed.
CHECK_US_MIN = 0.1
NOTHING = Checks(-(2**62), 0)
EVERYTHING = 2**62


@dataclass(frozen=True, slots=True)
class Committed:
    """A step up to the end of `bucket` was committed, with its results and footprints; or, after
    recovery, replayed."""

    bucket: int
    #: Input rows and new entries of the log, by bucket.
    rows: Mapping[int, int]
    entries: Mapping[int, int]
    #: How the number of open windows changed, by the bucket of the newest footprint.
    windows: Mapping[int, int]
    #: Footprints of open windows that were asked for, and the time that they took.
    checks: int = 0
    took_us: int = 0
    #: Input rows that time windows and joins refer to.
    referred: int = 0


@dataclass(slots=True)
class EventualCheckpoint:
    """Counts of one operator."""

    targets: Targets
    pace: Pace | None = None
    #: Duration of a footprint, measured.
    check_us: float = 1.0
    #: Open windows by the bucket of the newest footprint, and what recovery would have to process.
    windows: dict[int, int] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    #: Input rows that time windows and joins refer to.
    referred: int = 0
    #: Last bucket that was processed.
    bucket: int = -(2**62)
    #: After recovery: the last bucket that was committed before. Until then buckets are replayed,
    #: footprints of later buckets are known, and windows that open later are not.
    replays_upto: int = -(2**62)
    #: The bucket that recovery began with.
    restored_at: int = -(2**62)
    #: T in the log.
    logged: int | None = None
    _next_us: int = -(2**62)

    @staticmethod
    def began(bucket: int, entries_max: int | None, rows_max: int | None) -> EventualCheckpoint:
        """Of a path without windows, whose first bucket follows. Limits: those of the user."""
        targets = Targets(entries_max, _ROWS_MAX if rows_max is None else rows_max)
        return EventualCheckpoint(targets, _PACE, bucket=bucket)

    def recover(self, entries: Mapping[int, int], replays_upto: int) -> None:
        """Begin at the bucket of the oldest footprint. `entries`: of the log since then, by
        bucket; `replays_upto`: the last bucket that was committed."""
        self.entries, self.replays_upto = dict(entries), replays_upto
        self.restored_at = self.logged = self.bucket

    @property
    def oldest(self) -> int:
        """T: the bucket of the oldest footprint that recovery needs. Rows after it are replayed."""
        return min(self.windows, default=self.bucket)

    @property
    def open(self) -> int:
        """N: the number of open windows."""
        return sum(self.windows.values())

    @property
    def extent(self) -> int:
        """q: entries of the log that recovery reads."""
        return self._entries_from(self.oldest)

    @property
    def replayed(self) -> int:
        """u: input rows that recovery replays, or reads for time windows and joins. Both are the
        newest rows of the inputs, so the larger number contains the other."""
        return max(self._rows_after(self.oldest), self.referred)

    @property
    def replays(self) -> bool:
        """The next step replays buckets whose results are logged."""
        return self.bucket < self.replays_upto

    @property
    def opened(self) -> int:
        """The mark of windows that open in the next step. During a replay, nothing is logged, so
        only the bucket that recovery began with is safe."""
        return self.restored_at if self.replays else self.bucket

    def last(self, hi: int) -> int:
        """Last bucket of the next step, at most `hi`. A step does not end a replay and go on: T may
        become the bucket between."""
        return min(hi, self.replays_upto) if self.replays else hi

    def must_log(self, footprints: bool) -> bool:
        """Whether the log needs a record of the step that was just counted: not if it left no
        footprints, and T is the same."""
        return footprints or self.logged != self.oldest

    def folds(self, referred: int) -> bool:
        """Whether time windows and joins should fold the rows that they refer to."""
        return not self.targets.met(0, referred)

    def _entries_from(self, bucket: int) -> int:
        return sum(count for at, count in self.entries.items() if at >= bucket)

    def _rows_after(self, bucket: int) -> int:
        return sum(count for at, count in self.rows.items() if at > bucket)

    def checks(self, at_us: int) -> Checks:
        """The windows that should leave a footprint in the next step."""
        if not self.windows or self.replays or at_us < self._next_us:
            return NOTHING
        if self.targets.met(self.extent, self._rows_after(self.oldest)):
            return NOTHING
        most = EVERYTHING
        if self.pace is not None:
            most = max(1, int(self.pace.interval_us / self.check_us))
            self._next_us = at_us + self.pace.period_us
        return Checks(self._upto(most), most)

    def _upto(self, most: int) -> int:
        """Windows whose newest footprint is in this bucket or earlier leave another one. Recovery
        then begins at the next bucket that windows still have their newest footprint in."""
        entries, rows = _Sums(self.entries), _Sums(self.rows)
        buckets, checked = sorted(self.windows), 0
        for bucket, following in zip(buckets, [*buckets[1:], self.bucket], strict=True):
            checked += self.windows[bucket]
            left = entries.since(following) + checked
            if checked >= most or self.targets.met(left, rows.since(following + 1)):
                return bucket
        return buckets[-1]

    def committed(self, step: Committed) -> None:
        if step.bucket < self.bucket:
            raise ProtocolViolation(f"bucket {step.bucket} was committed after {self.bucket}")
        self.bucket, self.referred = step.bucket, step.referred
        for bucket, change in step.windows.items():
            count = self.windows.pop(bucket, 0) + change
            if count < 0 or bucket > max(step.bucket, self.replays_upto):
                raise ProtocolViolation(
                    f"{count} windows have their newest footprint in bucket {bucket}, after a step "
                    f"up to bucket {step.bucket}"
                )
            if count:
                self.windows[bucket] = count
        for held, new in ((self.entries, step.entries), (self.rows, step.rows)):
            for bucket, count in new.items():
                if count:
                    held[bucket] = held.get(bucket, 0) + count
        if step.checks:
            measured = max(CHECK_US_MIN, step.took_us / step.checks)
            self.check_us += 0.2 * (measured - self.check_us)
        oldest = self.oldest
        for held in (self.entries, self.rows):
            for bucket in [at for at in held if at < oldest]:
                del held[bucket]


class _Sums:
    """Sums of counts from a bucket on, for buckets in ascending order."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._left = sorted(counts.items(), reverse=True)
        self._sum = sum(counts.values())

    def since(self, bucket: int) -> int:
        while self._left and self._left[-1][0] < bucket:
            self._sum -= self._left.pop()[1]
        return self._sum
