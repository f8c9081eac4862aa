"""`Delivery`, the unit in which a consumer receives a stream, and `Peer`, its way to a producer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from holdfast.errors import LogCorrupted, TransportError
from holdfast.frozen import dataclass
from holdfast.storage.segment import read_segment
from holdfast.streams.calls import Request
from holdfast.types import OutputState, Segment, StreamInfo

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Delivery:
    """All segments of the complete buckets `since` to `upto`, followed by tentative segments.

    A stable bucket replaces the tentative bucket that was delivered before."""

    stream: str
    #: `upto + 1` if no complete bucket is new, as in a heartbeat.
    since: int
    upto: int
    epoch: int
    segments: tuple[Segment, ...] = ()
    #: Absolute path of each segment if the consumer shares the storage; otherwise `tables`.
    paths: tuple[str, ...] = ()
    tables: tuple[pa.Table, ...] = ()
    ended: bool = False
    #: Set only in the first delivery of a connection.
    info: StreamInfo | None = None
    state: OutputState = OutputState.STABLE
    #: Last bucket that was computed without the inputs `missing`; None: no tentative bucket is new.
    tentative_upto: int | None = None
    missing: tuple[str, ...] = ()
    #: Of the tentative buckets: share of the inputs present, share of the expected rows present.
    partial: tuple[float, float] = (1.0, 1.0)
    #: Microseconds of the end-to-end wait budget that the newest stable buckets have used so far.
    spent_us: int = 0

    @property
    def is_sign_of_life(self) -> bool:
        """Whether this is a heartbeat: no new data, only the status of the replica."""
        has_news = self.ended or self.tentative_upto is not None
        return self.since > self.upto and self.info is None and not has_news

    def carrying(self, tables: tuple[Any, ...]) -> Delivery:
        """The same delivery with rows instead of paths, for a consumer without shared storage."""
        return Delivery(
            self.stream, self.since, self.upto, self.epoch, self.segments, (), tables, self.ended,
            self.info, self.state, self.tentative_upto, self.missing, self.partial, self.spent_us,
        )  # fmt: skip

    def table(self, number: int) -> pa.Table:
        """The verified rows of a segment, from its file or from the delivery itself."""
        if self.tables:
            return self.tables[number]
        segment, path = self.segments[number], self.paths[number]
        try:
            return read_segment(path, rows=segment.rows, checksum=segment.checksum)
        except LogCorrupted:
            if os.path.exists(path):
                raise
            raise TransportError(
                f"{path} was deleted, or its tentative bucket was replaced; requesting it again"
            ) from None


@dataclass(slots=True)
class Cursor:
    """The position of a connection in a stream."""

    #: The next stable bucket.
    at: int
    #: The next tentative bucket; None: the consumer wants no tentative buckets.
    tentative_at: int | None = None
    #: The last delivery if it was a heartbeat, with the `StreamInfo` it was made from.
    life: tuple[StreamInfo, Delivery] | None = None

    def news(self, info: StreamInfo) -> bool:
        tentative = self.tentative_at is not None and (
            info.tentative_upto is not None and info.tentative_upto >= self.tentative_at
        )
        return info.complete_upto >= self.at or info.ended or tentative


def verified(table: Any, segment: Segment, digest: Callable[[Any], str]) -> Any:
    """Return the rows that arrived if row count and digest match those of the segment."""
    if table.num_rows != segment.rows or digest(table) != segment.checksum:
        raise TransportError(f"segment {segment.id} arrived damaged; it will be requested again")
    return table


class Peer(Protocol):
    """Client interface to a node or source: in-process or over Flight."""

    def streams(self) -> list[StreamInfo]: ...

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: threading.Event,
        tentative_after: int | None = None,
    ) -> Iterator[Delivery]: ...

    def acknowledge(
        self, stream: str, consumer: str, received: int, needed: int, epoch: int
    ) -> None: ...

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None: ...

    def call(self, request: Request[R]) -> R: ...

    def close(self) -> None: ...
