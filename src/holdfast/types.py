"""Values that all layers share: time, buckets, segments. Frozen, without dependencies on Holdfast.

Time is an integer number of microseconds since 1970 (UTC), negative before. A bucket is a slice of
that time, `bucket = floor(time_us / width_us)`. Buckets are the unit of ordering, of
acknowledgements and of state versions (ARCHITECTURE.md).
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.frozen import dataclass

#: Version of the on-disk and on-wire formats. Any other version is refused.
FORMAT = 3


class Stability(StrEnum):
    STABLE = "STABLE"
    TENTATIVE = "TENTATIVE"


class OutputState(StrEnum):
    """The state of a replica for one of its outputs (Borealis section 3)."""

    #: No input is missing: results are stable.
    STABLE = "STABLE"
    #: Inputs are missing for longer than `max_delay` (X in Borealis): results are tentative.
    UP_FAILURE = "UP_FAILURE"
    #: Inputs are complete again and results are being corrected, or the replica is catching up.
    STABILIZATION = "STABILIZATION"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What a step does to shorten a recovery (`core.eventual_checkpoint`)."""

    #: Time windows and joins fold rows of the inputs that they refer to, as many as a step can.
    folds: bool = False
    #: Whether all layers of keyed state become one; None: when it is worthwhile for the steps.
    merges: bool | None = None


NO_UPKEEP = Upkeep()


def bucket_of(time_us: int, width_us: int) -> int:
    return time_us // width_us


def bucket_end_us(bucket: int, width_us: int) -> int:
    """First microsecond after the bucket."""
    return (bucket + 1) * width_us


@dataclass(frozen=True, slots=True, order=True)
class SegmentId:
    """The identity of a segment. State versions refer to input segments by identity, so that they
    never mix versions of a bucket."""

    stream: str
    partition: int
    bucket: int
    #: The version of a stable segment is above that of the tentative segment it replaces.
    version: int = 0
    #: Number of the piece, for a bucket that was logged in pieces before it was complete.
    part: int = 0

    def __str__(self) -> str:
        return f"{self.stream}/p{self.partition}/b{self.bucket}.v{self.version}.{self.part}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, as its manifest record describes it. A segment is never empty."""

    id: SegmentId
    stability: Stability
    #: Path of the Parquet file, relative to the root of its log.
    path: str
    rows: int
    #: Order-independent digest of the rows (`holdfast.storage.rows.digest`), 16 hex digits.
    checksum: str
    #: Greatest row time in the segment.
    t_max_us: int
    size_bytes: int
    #: Epoch of the instance that wrote the segment.
    epoch: int
    #: CRC-32 of the file.
    crc: int = 0


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The status of a stream in a log."""

    name: str
    #: Spark DDL of the rows, and the name of the time column in it.
    schema: str
    time: str
    #: First bucket that the stream can have; all buckets before are empty by definition.
    starts_at: int
    #: Every bucket up to this one is complete; `starts_at - 1` if none is.
    complete_upto: int
    #: Buckets up to this one have been deleted; `starts_at - 1` if none was.
    trimmed_upto: int
    epoch: int
    #: True once the stream has ended: `complete_upto` will never rise again.
    ended: bool = False
    #: Last tentative bucket, always above `complete_upto`; None: there is no tentative bucket.
    tentative_upto: int | None = None
    #: How often recovery has discarded tentative rows after a crash.
    undos: int = 0
