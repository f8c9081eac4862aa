"""Values every layer speaks of: time, buckets, segments. Frozen, plain, importing nothing of ours.

Time is a whole number of microseconds since 1970 (UTC), negative before. A bucket is a slice of
that time, `bucket = floor(time_us / width_us)`, and the unit of everything: of ordering, of
acknowledgement, of state versions (ARCHITECTURE.md).
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.frozen import dataclass

#: Version of the on-disk and on-wire formats. Readers refuse what is newer.
FORMAT = 2


class Stability(StrEnum):
    STABLE = "STABLE"
    TENTATIVE = "TENTATIVE"


class OutputState(StrEnum):
    """How a replica stands with one of its outputs (Borealis section 3)."""

    #: All inputs are there: results are stable.
    STABLE = "STABLE"
    #: Inputs are missing for longer than X: results are tentative.
    UP_FAILURE = "UP_FAILURE"
    #: Inputs are corrected, results are being so; also a replica that is still catching up.
    STABILIZATION = "STABILIZATION"


def bucket_of(time_us: int, width_us: int) -> int:
    return time_us // width_us


def bucket_start_us(bucket: int, width_us: int) -> int:
    return bucket * width_us


def bucket_end_us(bucket: int, width_us: int) -> int:
    """First instant after the bucket."""
    return (bucket + 1) * width_us


@dataclass(frozen=True, slots=True, order=True)
class SegmentId:
    """The identity of a segment. State refers to inputs by it, so versions never mix."""

    stream: str
    partition: int
    bucket: int
    #: Rises when a tentative segment is corrected.
    version: int = 0
    #: Pieces of one bucket that were logged before the bucket was whole.
    part: int = 0

    def __str__(self) -> str:
        return f"{self.stream}/p{self.partition}/b{self.bucket}.v{self.version}.{self.part}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A non-empty segment as its manifest record describes it."""

    id: SegmentId
    stability: Stability
    #: Where the Parquet file is: a path below the storage root of its log.
    path: str
    rows: int
    #: Order-independent digest of the rows (`holdfast.storage.rows.digest`), 16 hex digits.
    checksum: str
    #: Greatest row time in the segment.
    t_max_us: int
    size_bytes: int
    #: Epoch of the instance that wrote it.
    epoch: int


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a log can tell of one of its streams."""

    name: str
    #: Spark DDL of the rows, and the name of the time column in it.
    schema: str
    time: str
    #: First bucket the stream can have: everything before is empty by definition.
    starts_at: int
    #: Every bucket up to this one is whole; `starts_at - 1` when none is.
    complete_upto: int
    #: Buckets up to this one have been deleted; `starts_at - 1` when none was.
    trimmed_upto: int
    epoch: int
    #: True once the stream has ended: `complete_upto` will never rise again.
    ended: bool = False
    #: Last bucket that was given on partial input, always above `complete_upto`; None: none is.
    tentative_upto: int | None = None
    #: How often what a crash left of tentative rows was given up.
    undos: int = 0
