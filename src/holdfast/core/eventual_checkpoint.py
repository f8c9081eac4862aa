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
Instead of Q and U, the user may state how long recovery may take (`recovery_costs.py`).

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

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.config import duration_us
from holdfast.core.recovery_costs import RecoveryCosts
from holdfast.errors import ProtocolViolation
from holdfast.model.protection import Protection


@dataclass(frozen=True, slots=True)
class Targets:
    """Footprints are written if recovery would have to read or to replay more than this."""

    #: Q: entries of the output log.
    entries: int | None = None
    #: U: input rows.
    rows: int | None = None
    #: How long recovery may take.
    recovery_us: int | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """At most `interval_us` (CI) of every `period_us` (CP) are spent on footprints of open
    windows."""

    interval_us: int = 5_000
    period_us: int = 100_000


@dataclass(frozen=True, slots=True)
class Checks:
    """Windows that should leave a footprint at the end of the step: those whose newest one is in
    bucket `upto` or earlier, the oldest first, at most `most`."""

    upto: int
    most: int


#: Most rows that recovery replays, unless the user states another limit.
_ROWS_MAX = 1_000_000
#: Most entries that recovery reads, unless the user states a limit; or so many times the open
#: windows. A record of the log costs as much as so many entries.
_ENTRIES_MAX, _ENTRIES_SHARE, _RECORD_ENTRIES = 1_000_000, 4, 100
#: At least so many windows leave a footprint in a period, if a target is missed.
CHECKS_MIN = 1_000
#: At least this share of the stated recovery time is for reading and replaying, also if everything
#: else takes longer than stated.
_VARIABLE_SHARE = 0.1
_PACE = Pace()
#: The share of the stated recovery time that is aimed at; the rest is for what was not predicted.
_AIM = 0.7
#: Shortest duration of a footprint that is assumed.
CHECK_US_MIN = 0.1
NOTHING = Checks(-(2**62), 0)
EVERYTHING = 2**62


@dataclass(frozen=True, slots=True)
class Settings:
    """How the operators of a path are checkpointed."""

    targets: Targets
    pace: Pace | None = _PACE
    #: Every window that opens leaves a footprint (Gopen), as in the paper; for comparison.
    literal: bool = False

    @staticmethod
    def of(protection: Protection) -> Settings:
        entries, rows = protection.recovery_entries, protection.recovery_rows
        if protection.recovery_time is not None:
            stated_us = duration_us(protection.recovery_time, of="recovery_time")
            return Settings(Targets(entries, rows, stated_us), pace=None)
        return Settings(Targets(entries, _ROWS_MAX if rows is None else rows))


@dataclass(frozen=True, slots=True)
class Committed:
    """A step up to the end of `bucket` was committed, with its results and footprints; or, after
    recovery, replayed."""

    bucket: int
    #: Input rows and new entries of the log, by bucket, in ascending order.
    rows: Mapping[int, int]
    entries: Mapping[int, int]
    #: How the number of open windows changed, by the bucket of the newest footprint.
    windows: Mapping[int, int]
    #: Footprints of open windows that were asked for, and the time that all footprints took.
    checks: int = 0
    took_us: int = 0
    #: Input rows that time windows and joins refer to.
    referred: int = 0
    #: Whether the log has a record of the step.
    logged: bool = False


class _Counts:
    """Counts by bucket, in ascending order, with their sum."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self.sum = 0
        self._counts: dict[int, int] = {}
        self.add(counts)

    def add(self, counts: Mapping[int, int]) -> None:
        for bucket, count in counts.items():
            if count:
                self._counts[bucket] = self._counts.get(bucket, 0) + count
                self.sum += count

    def forget_before(self, first: int) -> None:
        for bucket, count in self._up_to(first - 1):
            del self._counts[bucket]
            self.sum -= count

    def since(self, first: int) -> int:
        """The sum of the counts from bucket `first` on, which is one of the oldest."""
        return self.sum - sum(count for _, count in self._up_to(first - 1))

    def _up_to(self, last: int) -> list[tuple[int, int]]:
        found = []
        for bucket, count in self._counts.items():
            if bucket > last:
                break
            found.append((bucket, count))
        return found

    def decreasing(self) -> Iterator[tuple[int, int]]:
        """Each bucket with the sum of the counts after it."""
        left = self.sum
        for bucket, count in self._counts.items():
            left -= count
            yield bucket, left


class EventualCheckpoint:
    """Counts of one path."""

    def __init__(self, settings: Settings, bucket: int) -> None:
        self.targets, self.pace = settings.targets, settings.pace
        self.costs = RecoveryCosts()
        #: Duration of a footprint, measured.
        self.check_us = 1.0
        #: Open windows by the bucket of the newest footprint, and these buckets in order.
        self._windows: dict[int, int] = {}
        self._order: list[int] = []
        #: N: the number of open windows.
        self.open = 0
        #: What recovery would have to process, since T.
        self._entries, self._rows = _Counts({}), _Counts({})
        #: Records of the log, since T.
        self._records = _Counts({})
        #: Input rows that time windows and joins refer to.
        self.referred = 0
        #: Last bucket that was processed.
        self.bucket = bucket
        #: After recovery: the last bucket that was committed before. Until then buckets are
        #: replayed, footprints of later buckets are known, and windows that open later are not.
        self.replays_upto = -(2**62)
        #: The bucket that recovery began with.
        self.restored_at = -(2**62)
        #: T in the log.
        self.logged: int | None = None
        #: How often windows were asked for footprints. If many have equally old ones, each time
        #: others are asked.
        self.turn = 0
        self._next_us = -(2**62)

    @staticmethod
    def is_behind(bucket: int, complete_upto: int) -> bool:
        """Whether the log has results after this bucket that are older than its first record, from
        another form of recovery. Recovery then replays up to the newest record only, and computes
        the buckets after it again."""
        return bucket < complete_upto

    def recover(self, entries: Mapping[int, int], replays_upto: int) -> None:
        """Begin at the bucket of the oldest footprint. `entries`: those of each record of the log
        since then, by bucket; `replays_upto`: the last bucket that was committed."""
        self._entries, self.replays_upto = _Counts(entries), replays_upto
        self._records = _Counts(dict.fromkeys(entries, 1))
        self.restored_at = self.logged = self.bucket

    @property
    def oldest(self) -> int:
        """T: the bucket of the oldest footprint that recovery needs. Rows after it are replayed."""
        return self._order[0] if self._order else self.bucket

    @property
    def extent(self) -> int:
        """q: entries of the log that recovery reads."""
        return self._entries.sum

    @property
    def replayed(self) -> int:
        """u: input rows that recovery replays, or reads for time windows and joins. Both are the
        newest rows of the inputs, so the larger number contains the other."""
        return max(self._replayed, self.referred)

    @property
    def _replayed(self) -> int:
        return self._rows.since(self.oldest + 1)

    @property
    def predicted_us(self) -> float:
        """How long recovery would take."""
        return self.costs.predicted_us(self.extent, self.replayed)

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

    def must_log(self, step: Committed, footprints: bool) -> bool:
        """Whether the log needs a record of a step: not if it left no footprints, and T stays the
        same. A replay is not logged."""
        return not self.replays and (footprints or self.logged != self.oldest_after(step))

    def oldest_after(self, step: Committed) -> int:
        """T after a step."""
        counts = {
            bucket: self._windows.get(bucket, 0) + change for bucket, change in step.windows.items()
        }
        known = (bucket for bucket in self._order if counts.get(bucket, 1) > 0)
        new = [bucket for bucket, count in counts.items() if count > 0]
        return min([*new, next(known, step.bucket)], default=step.bucket)

    def checks(self, at_us: int) -> Checks:
        """The windows that should leave a footprint in the next step."""
        if not self._order or self.replays or at_us < self._next_us:
            return NOTHING
        if self._met(self.extent, self._replayed, self._records.sum):
            return NOTHING
        most = EVERYTHING
        if self.pace is not None:
            most = max(CHECKS_MIN, int(self.pace.interval_us / self.check_us))
            self._next_us = at_us + self.pace.period_us
        upto = self._upto(most)
        if upto is None:
            return NOTHING
        self.turn += 1
        return Checks(upto, most)

    def folds(self, referred: int) -> bool:
        """Whether time windows and joins should fold the rows that they refer to."""
        return not self._met(0, referred, 0)

    def _met(self, entries: int, rows: int, records: int) -> bool:
        targets = self.targets
        if targets.entries is not None:
            if entries > targets.entries:
                return False
        elif entries + _RECORD_ENTRIES * records > max(_ENTRIES_MAX, _ENTRIES_SHARE * self.open):
            return False
        if targets.rows is not None and rows > targets.rows:
            return False
        if targets.recovery_us is None:
            return True
        fixed_us = self.costs.predicted_us(0, 0)
        left_us = max(_AIM - fixed_us / targets.recovery_us, _VARIABLE_SHARE) * targets.recovery_us
        return self.costs.predicted_us(entries, rows) - fixed_us <= left_us

    def _upto(self, most: int) -> int | None:
        """Windows whose newest footprint is in this bucket or earlier leave another one. Recovery
        then begins at the next bucket that windows still have their newest footprint in. If no
        number of footprints is enough, all windows leave one; for a recovery time, as many as
        shorten it most (None: none)."""
        entries, rows, records = map(_Left, (self._entries, self._rows, self._records))
        checked, shortest_us, best = 0, self.predicted_us, None
        for number, bucket in enumerate(self._order):
            last = number + 1 == len(self._order)
            following = self.bucket if last else self._order[number + 1]
            checked += self._windows[bucket]
            left = entries.after(following - 1) + checked, rows.after(following)
            if checked >= most or self._met(*left, records.after(following - 1) + 1):
                return bucket
            if (left_us := self.costs.predicted_us(*left)) < shortest_us:
                shortest_us, best = left_us, bucket
        return self._order[-1] if self.targets.recovery_us is None else best

    def committed(self, step: Committed) -> None:
        if step.bucket < self.bucket:
            raise ProtocolViolation(f"bucket {step.bucket} was committed after {self.bucket}")
        self.bucket, self.referred = step.bucket, step.referred
        for bucket, change in step.windows.items():
            before = self._windows.pop(bucket, 0)
            count = before + change
            if count < 0 or bucket > max(step.bucket, self.replays_upto):
                raise ProtocolViolation(
                    f"{count} windows have their newest footprint in bucket {bucket}, after a step "
                    f"up to bucket {step.bucket}"
                )
            self.open += change
            if count:
                self._windows[bucket] = count
            if count and not before:
                insort(self._order, bucket)
            elif before and not count:
                self._order.remove(bucket)
        self._entries.add(step.entries)
        self._records.add({step.bucket: int(step.logged)})
        self._rows.add(step.rows)
        if step.checks:
            footprints = max(step.checks, sum(step.entries.values()))
            measured = max(CHECK_US_MIN, step.took_us / footprints)
            self.check_us += 0.2 * (measured - self.check_us)
        for held in (self._entries, self._rows, self._records):
            held.forget_before(self.oldest)


class _Left:
    """Sums of counts after a bucket, for buckets in ascending order."""

    def __init__(self, counts: _Counts) -> None:
        self._following = counts.decreasing()
        self._sum = counts.sum
        self._next = next(self._following, None)

    def after(self, bucket: int) -> int:
        while self._next is not None and self._next[0] <= bucket:
            self._sum = self._next[1]
            self._next = next(self._following, None)
        return self._sum
