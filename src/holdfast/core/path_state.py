"""State that `core.progress` holds for one path."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from holdfast.core.consistency import Consistency
from holdfast.core.eventual_checkpoint import EventualCheckpoint
from holdfast.core.job_size import JobLimits, JobSize
from holdfast.core.progress_events import PathPlan
from holdfast.core.sunion import SUnion


@dataclass(slots=True)
class PathState:
    plan: PathPlan
    sunion: SUnion
    consistency: Consistency
    #: Bucket of the durable version that the path resumes from, first input bucket that the version
    #: needs, and origin of the path; None: the path does not resume.
    resumed: tuple[int, int, int] | None
    #: How many buckets the next step computes.
    job_size: JobSize
    origins: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Last bucket computed and logged; None before Start.
    position: int | None = None
    #: Last bucket of the stable step that is running; None: no step is running.
    running_upto: int | None = None
    #: The stable step that is running rebuilds a discarded state first.
    rebuilds: bool = False
    #: First input bucket that the current version needs. Then the bucket of the newest durable
    #: version, and the first input bucket that this one needs.
    needs_from: int = 0
    durable: tuple[int, int] | None = None
    #: A checkpoint is being written; another one follows at once.
    flushing: bool = False
    flushes_again: bool = False
    #: Set if checkpoints are eventual.
    eventual: EventualCheckpoint | None = None
    #: Bucket, rows and bytes, oldest first, of inputs that have not been processed.
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    #: Last bucket that may have results without further input; None before the first step.
    horizon: int | None = None
    #: Greatest boundary of any input.
    ended_upto: int | None = None
    ended: bool = False
    origin: int = 0
    #: Consecutive steps that took everything that was complete when they started.
    steps_caught_up: int = 0
    #: When the last step started, the holding time of a later bucket was already over.
    passed_over: bool = False

    @property
    def reached(self) -> int | None:
        """The last bucket that the path has given, stable or tentative; None before Start."""
        tentative = self.consistency.position
        if self.position is None or tentative is None:
            return self.position
        return max(self.position, tentative)

    def take_waiting(self, upto: int) -> dict[int, int]:
        """Forget the inputs up to a bucket, which were processed. Returns their rows by bucket,
        without those that only other paths needed."""
        end = self._waiting_upto(upto)
        rows: dict[int, int] = {}
        for bucket, count, _ in self.waiting[:end]:
            if bucket < self.needs_from:
                continue
            rows[bucket] = rows.get(bucket, 0) + count
        del self.waiting[:end]
        return rows

    def waiting_rows(self, upto: int) -> int:
        """Rows of inputs up to a bucket that have not been processed."""
        return sum(count for _, count, _ in self.waiting[: self._waiting_upto(upto)])

    def _waiting_upto(self, bucket: int) -> int:
        return bisect_right(self.waiting, bucket, key=lambda waits: waits[0])

    def begin(self, recovery: str) -> tuple[int, int] | str:
        """Where the path starts: the bucket of its first state, and the first bucket whose results
        are valid. A text: why it cannot start. Without a checkpoint, results whose inputs were
        deleted are skipped if all operators are convergent: `recovery="replay"` guarantees that
        consumers have released these results, with `"checkpoint"` they may be a reported loss, and
        `"cec"` promises that nothing is lost."""
        trimmed_upto = [trimmed for starts, trimmed in self.origins.values() if trimmed >= starts]
        if self.resumed is not None:
            bucket, self.needs_from, self.origin = self.resumed
            self.durable = (bucket, self.needs_from)
            return bucket, self.origin
        self.origin = min(starts for starts, _ in self.origins.values())
        if not trimmed_upto:
            self.needs_from = self.origin
            return self.origin - 1, self.origin
        if self.plan.convergent and recovery != "cec":
            bucket = max(trimmed_upto)
            self.needs_from = bucket + 1
            return bucket, bucket + 1 + self.plan.extent
        return (
            f"path {self.plan.name!r} cannot start: it has no usable checkpoint, and it needs its "
            f"inputs up to bucket {max(trimmed_upto)}, which were deleted; restore the folder of "
            "the node from a backup, or start with another storage (recovery='replay' survives the "
            "loss of a node's storage)"
        )


def path_state(
    plan: PathPlan,
    resumed: tuple[int, int, int] | None,
    me: str,
    piece: int,
    limits: JobLimits,
) -> PathState:
    policy = plan.policy
    patience_us = None if policy.on_failure == "block" else policy.patience_us
    sunion = SUnion(plan.inputs, patience_us, policy.own_us)
    if resumed is not None:
        sunion.resume(resumed[0])
    extent = plan.extent if plan.convergent else None
    consistency = Consistency(policy, sunion, plan.trees, me, piece, extent)
    return PathState(plan, sunion, consistency, resumed, JobSize(limits))
