"""What a reader gets of a stream, one `Delivery` after another, and how it asks for it (`Peer`)."""

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
    """All segments of the buckets `since` to `upto`, which are complete; then the tentative ones.

    A stable bucket takes the place of the tentative one that was delivered before."""

    stream: str
    #: One more than `upto` when nothing is new: a sign of life.
    since: int
    upto: int
    epoch: int
    segments: tuple[Segment, ...] = ()
    #: Absolute path of each segment, where the reader shares the storage; else the rows.
    paths: tuple[str, ...] = ()
    tables: tuple[pa.Table, ...] = ()
    ended: bool = False
    #: What the stream is: said once per connection, with its first delivery.
    info: StreamInfo | None = None
    state: OutputState = OutputState.STABLE
    #: Up to here buckets were computed without the inputs `missing`; None: nothing of that is new.
    tentative_upto: int | None = None
    missing: tuple[str, ...] = ()
    #: The shares of the inputs, and of the rows to be expected, that were there.
    partial: tuple[float, float] = (1.0, 1.0)
    #: How much of what a bucket may wait on its whole way was spent on the newest stable ones.
    spent_us: int = 0

    @property
    def is_sign_of_life(self) -> bool:
        """Nothing happened; only how the replica stands is told."""
        happened = self.ended or self.tentative_upto is not None
        return self.since > self.upto and self.info is None and not happened

    def carrying(self, tables: tuple[Any, ...]) -> Delivery:
        """The same with the rows themselves, for a reader that does not share the storage."""
        return Delivery(
            self.stream, self.since, self.upto, self.epoch, self.segments, (), tables, self.ended,
            self.info, self.state, self.tentative_upto, self.missing, self.partial, self.spent_us,
        )  # fmt: skip

    def table(self, number: int) -> pa.Table:
        """Rows of a segment, verified, whichever way they came."""
        if self.tables:
            return self.tables[number]
        segment, path = self.segments[number], self.paths[number]
        try:
            return read_segment(path, rows=segment.rows, checksum=segment.checksum)
        except LogCorrupted:
            if os.path.exists(path):
                raise
            raise TransportError(
                f"{path} is gone, or was taken back; it is asked for again"
            ) from None


@dataclass(slots=True)
class Cursor:
    """Where a connection is in a stream."""

    #: The next stable bucket.
    at: int
    #: The next tentative bucket; None: nothing tentative is wanted.
    tentative_at: int | None = None
    #: The last sign of life, and what the log said of the stream then.
    life: tuple[StreamInfo, Delivery] | None = None

    def news(self, info: StreamInfo) -> bool:
        tentative = self.tentative_at is not None and (
            info.tentative_upto is not None and info.tentative_upto >= self.tentative_at
        )
        return info.complete_upto >= self.at or info.ended or tentative


def verified(table: Any, segment: Segment, digest: Callable[[Any], str]) -> Any:
    """The rows that arrived, if they are those that were sent."""
    if table.num_rows != segment.rows or digest(table) != segment.checksum:
        raise TransportError(f"segment {segment.id} arrived damaged; it will be asked for again")
    return table


class Peer(Protocol):
    """How others speak to a node or source: in-process or over Flight."""

    def streams(self) -> list[StreamInfo]: ...

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: threading.Event,
        tentative_after: int | None = None,
    ) -> Iterator[Delivery]: ...

    def acknowledge(
        self, stream: str, reader: str, received: int, needed: int, epoch: int
    ) -> None: ...

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None: ...

    def call(self, request: Request[R]) -> R: ...

    def close(self) -> None: ...
