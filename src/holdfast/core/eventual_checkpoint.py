"""Continuous eventual checkpoints (CEC): when the footprints of windows become durable, so that
recovery takes no longer than stated. Pure.

The state of an operator consists of windows; here, of keys. In the paper (section II.B), a window
is checkpointed alone, as a *footprint* in the output log: when it opens (Gopen), now and then while
it is open (Gcheck), and when it closes (its result). Here every window that a step opens, changes
or closes leaves a footprint: its entry in the layer that the step writes anyway
(docs/design/0015-keyed-state-in-layers.md). A layer counts for recovery from the moment at which
its file is durable and a record of the output log names it. Recovery takes the longer,

q   the more entries the named layers have, and rows the other files, the *extent*, which have to
    be read and verified, and
u   the more rows the inputs have since the newest record, which have to be replayed.

A record is due when u exceeds U, or when all layers have become one because q exceeds Q (section
III.A), or when the predicted time of a recovery exceeds the stated one (`recovery_costs.py`), or
when one of the first recoveries was measured, so that its costs are not lost. Files become durable
beside the steps; at most an interval CI of every period CP is spent on it (section III). Windows
that stay open for long keep old layers alive: if q exceeds Q, all layers become one. None of these
limits matters for correctness, only for the time of recovery.

All footprints of a record are as of the end of one bucket, so the windows need not remember which
rows they have seen: a replay begins with the bucket after the record, for all of them.

Time windows and joins also refer to rows of their inputs. Recovery reads these rows again, so they
count among u. If they are too many, they are folded into files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config import duration_us
from holdfast.core.recovery_costs import Recovery, RecoveryCosts
from holdfast.model.protection import Protection
from holdfast.types import NO_UPKEEP, Upkeep


@dataclass(frozen=True, slots=True)
class Targets:
    """What recovery may have to read or to replay. More rows, or a longer time: a record is due.
    More entries: the layers become one first."""

    #: Q: entries of layers, and rows of other files.
    entries: int | None = None
    #: U: input rows.
    rows: int | None = None
    #: How long recovery may take.
    recovery_us: int | None = None


#: Longest pause after a record that took long.
_PAUSE_US_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """At most one record in `period_us` (CP), and at most the share `interval_us` (CI) of it is
    spent on making records durable, apart from those due after `checkpoint_buckets` buckets."""

    interval_us: int = 5_000
    period_us: int = 100_000

    def pause_us(self, took_us: int) -> int:
        """How long after the start of a record, which took so long, the next one may start."""
        pause_us = max(self.period_us, took_us * self.period_us // self.interval_us)
        return min(pause_us, took_us + _PAUSE_US_MAX)


#: Most rows that recovery replays, unless the user states another limit.
_ROWS_MAX = 1_000_000
#: At least this share of the stated recovery time is for the rows that are replayed, also if
#: everything else takes longer than stated.
_REPLAY_SHARE = 0.1
_PACE = Pace()
#: The costs of so many first recoveries are logged at once, those of later ones with a record that
#: is due for another reason.
_LEARNED = 3
#: Layers are merged again if they have this many times as many entries as would be left.
_MERGED_AGAIN = 1.25
#: At least this share of the target of entries is for layers.
_LAYERED_SHARE = 0.25
#: Steps in which all layers should have become one, apart from those with a merge beside them.
_MERGING_STEPS = 16
#: The share of the stated recovery time that is aimed at; the rest is for what was not predicted.
_AIM = 0.7


@dataclass(frozen=True, slots=True)
class Settings:
    """How the state of a path is checkpointed."""

    targets: Targets
    pace: Pace | None = _PACE

    @staticmethod
    def of(protection: Protection) -> Settings:
        entries, rows = protection.recovery_entries, protection.recovery_rows
        if protection.recovery_time is not None:
            stated_us = duration_us(protection.recovery_time, of="recovery_time")
            return Settings(Targets(entries, rows, stated_us), pace=None)
        return Settings(Targets(entries, _ROWS_MAX if rows is None else rows))


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a restarted node has read from its output log."""

    #: The last bucket whose results are logged.
    upto: int
    #: Entries of the layers, and the time to read and to verify them.
    entries: int
    load_us: int
    #: The time to open the log.
    opening_us: int
    #: Costs that earlier recoveries have measured.
    costs: RecoveryCosts


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step was committed up to the end of `bucket`."""

    bucket: int
    #: Input rows by bucket, in ascending order.
    rows: Mapping[int, int]
    #: Entries of the layers and rows of other files; rows of keyed state.
    entries: int
    open: int
    took_us: int
    #: Entries of the layers.
    layered: int = 0
    #: Layers are being merged beside the steps.
    merging: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """A record that names the state after a bucket is durable."""

    #: First bucket of the inputs that recovery needs.
    needs_from: int
    #: Entries of its layers, and those of them that no earlier record has named.
    entries: int
    new_entries: int
    took_us: int


class _Counts:
    """Counts by bucket, in ascending order, with their sum."""

    def __init__(self) -> None:
        self.sum = 0
        self._counts: dict[int, int] = {}

    def add(self, counts: Mapping[int, int]) -> None:
        for bucket, count in counts.items():
            if count:
                self._counts[bucket] = self._counts.get(bucket, 0) + count
                self.sum += count

    def forget_before(self, first: int) -> None:
        while self._counts and (oldest := next(iter(self._counts))) < first:
            self.sum -= self._counts.pop(oldest)

    def since(self, first: int) -> int:
        """The sum of the counts from bucket `first` on, which is mostly one of the newest."""
        found = 0
        for bucket, count in reversed(self._counts.items()):
            if bucket < first:
                break
            found += count
        return found


class EventualCheckpoint:
    """The footprints of one path."""

    def __init__(self, settings: Settings, recovered: Recovered | None = None) -> None:
        self.targets, self.pace = settings.targets, settings.pace
        self.costs = RecoveryCosts() if recovered is None else recovered.costs
        #: q: entries of the newest record, which recovery would read; and of the newest state.
        self.extent = 0 if recovered is None else recovered.entries
        self.entries = self.extent
        #: Rows of keyed state: N, if each window has one.
        self.open = 0
        #: Input rows that recovery would need.
        self._rows = _Counts()
        #: Footprints in records, without those that a later record has named again.
        self.footprints = 0
        #: The recovery that is under way, until the first new bucket is committed.
        self.recovery: Recovery | None = None
        if recovered is not None:
            self.recovery = Recovery(
                recovered.upto, recovered.entries, recovered.load_us, recovered.opening_us
            )
        #: How long the last recovery took.
        self.recovery_us: int | None = None
        #: Entries of the layers of the newest state, and how many were left when merging them has
        #: not helped.
        self.layered = self._unmerged = 0
        #: For so many steps, all layers have been becoming one; 0: they need not.
        self._merging = 0
        #: Layers have become one, and no record names the result.
        self._merged = False
        #: One of the first recoveries was measured, and no record has its costs.
        self._learned = False
        self._next_us = -(2**62)
        self._publish()

    @property
    def replayed(self) -> int:
        """u: input rows that recovery would replay, or read for time windows and joins."""
        return self._rows.sum

    @property
    def predicted_us(self) -> float:
        """How long recovery would take."""
        return self.costs.predicted_us(self.extent, self.replayed)

    def last(self, position: int, hi: int) -> int:
        """Last bucket of the next step, at most `hi`. A replay and the first new bucket are steps
        of their own, so that recoveries are measured."""
        if self.recovery is None:
            return hi
        upto = self.recovery.upto
        return min(hi, upto if position < upto else position + 1)

    def upkeep(self, at_us: int, needs_from: int, coming: int) -> Upkeep:
        """What the next step does to shorten a recovery. `needs_from`: the first bucket of the
        inputs that the state refers to; `coming`: the rows of the step."""
        folds = not self._met(self._rows.since(needs_from) + coming)
        if self.targets.entries is None:
            return Upkeep(folds=True) if folds else NO_UPKEEP
        most = max(self._layered_max(), int(_MERGED_AGAIN * self._unmerged))
        if not self._merging and self.layered > most and at_us >= self._next_us:
            self._merging = 1
        return Upkeep(folds, bool(self._merging))

    def _layered_max(self) -> int:
        """Most entries of layers. Below the number of open windows, merging does not help, and not
        much if the other files alone have more rows than the target."""
        most = self.targets.entries
        assert most is not None
        left = max(most - (self.entries - self.layered), int(_LAYERED_SHARE * most))
        return max(left, int(_MERGED_AGAIN * self.open))

    def stepped(self, step: Stepped) -> None:
        before, self.layered = self.layered, step.layered
        self.entries, self.open = step.entries, step.open
        self._unmerged = min(self._unmerged, self.layered)
        if self.targets.entries is not None:
            fell = _MERGED_AGAIN * self.layered < before
            self._merged |= fell and before > self._layered_max()
            self._merge_further(step.merging)
        self._rows.add(step.rows)
        recovery = self.recovery
        if recovery is None:
            self.costs.stepped(sum(step.rows.values()), step.took_us)
        elif step.bucket <= recovery.upto:
            recovery.replayed(step.rows, step.took_us)
        else:
            self.recovery_us = recovery.finished(step.rows, step.took_us, self.costs)
            self.recovery, self._learned = None, self.costs.recoveries <= _LEARNED
        self._publish()

    def _merge_further(self, beside: bool) -> None:
        """`beside`: layers are being merged beside the steps."""
        if not self._merging:
            return
        if self.layered <= self._layered_max():
            self._merging, self._merged = 0, True
        elif self._merging >= _MERGING_STEPS:
            self._merging, self._unmerged = 0, self.layered
        elif not beside:
            self._merging += 1

    def is_due(self, at_us: int, needs_from: int) -> bool:
        """Whether a record of the current state is due. `needs_from`: the first bucket of the
        inputs that the state refers to."""
        if at_us < self._next_us or self.recovery is not None:
            return False
        if self._merged or self._learned:
            return True
        shortens = self._rows.since(needs_from) < self.replayed
        return shortens and not self._met(self.replayed)

    def began(self, at_us: int) -> None:
        """The current state is being made durable."""
        self._merged = self._learned = False
        self._next_us = at_us + (0 if self.pace is None else self.pace.period_us)

    def named(self, at_us: int, record: Named) -> None:
        self._rows.forget_before(record.needs_from)
        self.extent = record.entries
        self.footprints += record.new_entries
        if self.pace is not None:
            pause_us = self.pace.pause_us(record.took_us) - record.took_us
            self._next_us = max(self._next_us, at_us + pause_us)
        self._publish()

    def _met(self, rows: int) -> bool:
        """Whether recovery may replay so many rows. A record does not shorten the rest of it."""
        targets = self.targets
        if targets.rows is not None and rows > targets.rows:
            return False
        if targets.recovery_us is None:
            return True
        rest_us = self.costs.predicted_us(self.extent, 0) + self.costs.step_us
        left_us = max(_AIM * targets.recovery_us - rest_us, _REPLAY_SHARE * targets.recovery_us)
        return self.costs.row_us * rows <= left_us

    def _publish(self) -> None:
        stated_us, last_us = self.targets.recovery_us, self.recovery_us
        #: What recovery would have to do, and how long the last one took. Replaced as a whole, so
        #: that other threads may read it at any time.
        self.status: dict[str, int | None] = {
            "open": self.open, "entries_to_read": self.extent, "rows_to_replay": self.replayed,
            "footprints": self.footprints,
            "recovery_ms_predicted": round(self.predicted_us / 1_000),
            "recovery_ms_fixed": round(self.costs.fixed_us / 1_000),
            "recoveries_measured": self.costs.recoveries,
            "recovery_ms_stated": None if stated_us is None else stated_us // 1_000,
            "recovery_ms_last": None if last_us is None else round(last_us / 1_000),
        }  # fmt: skip
