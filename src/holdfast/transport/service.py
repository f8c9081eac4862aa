"""What a node or source offers to others, whatever carries it: its logs, pushes and questions.

The Flight server and the in-process twin both stand on this, so that they cannot differ in more
than the carrying. A reader *follows* a stream from a bucket and gets one `Delivery` after another;
asking again from an earlier bucket is how everything is repeated after a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from holdfast.errors import InputError, StorageFull, TransportError, Trimmed
from holdfast.log import Log
from holdfast.log.segment import read_segment
from holdfast.types import Segment, StreamInfo

T = TypeVar("T")
#: A silent stream still says so this often, so that a reader can tell silence from death.
HEARTBEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Delivery:
    """All segments of the buckets `since` to `upto`, which are whole."""

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

    def table(self, number: int) -> pa.Table:
        """Rows of a segment, verified, whichever way they came."""
        if self.tables:
            return self.tables[number]
        segment = self.segments[number]
        return read_segment(self.paths[number], rows=segment.rows, checksum=segment.checksum)


def verified(table: Any, segment: Segment, digest: Callable[[Any], str]) -> Any:
    """The rows that arrived, if they are those that were sent."""
    if table.num_rows != segment.rows or digest(table) != segment.checksum:
        raise TransportError(f"segment {segment.id} arrived damaged; it will be asked for again")
    return table


def answered(act: Callable[[], T]) -> T:
    """Carry out what somebody asks. That our disk is full is not their fault: to them we are a peer
    that cannot answer now, and is asked again."""
    try:
        return act()
    except StorageFull as err:
        raise TransportError(f"the peer cannot answer now: {err}") from err


class Peer(Protocol):
    """How others speak to a node or source: in-process or over Flight."""

    def streams(self) -> list[StreamInfo]: ...

    def follow(
        self, stream: str, from_bucket: int | None, stop: threading.Event
    ) -> Iterator[Delivery]: ...

    def acknowledge(
        self, stream: str, reader: str, received: int, needed: int, epoch: int
    ) -> None: ...

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None: ...

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Service:
    """The serving side. Logs may be added while it runs (a source opens its stream late)."""

    logs: dict[str, Log] = field(default_factory=dict)
    pushes: dict[str, Callable[[pa.Table, str | None, bool], None]] = field(default_factory=dict)
    calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    #: Who must have acknowledged before anything of a stream is trimmed.
    readers: dict[str, set[str]] = field(default_factory=dict)
    #: Told after acknowledgements: the stream, and up to where none of its readers needs it.
    on_ack: list[Callable[[str, int], None]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    heartbeat_s: float = HEARTBEAT_S
    #: Trimming is a durable record of its own, so it is not done for every single bucket.
    trim_buckets: int = 8

    def streams(self) -> list[StreamInfo]:
        return [log.info(name) for name, log in list(self.logs.items()) if name in log.streams()]

    def follow(
        self, stream: str, from_bucket: int | None, stop: Callable[[], bool]
    ) -> Iterator[Delivery]:
        """Deliveries from `from_bucket` on (None: the oldest there is), heartbeats in between."""
        log = self._log(stream)
        while (first := self.begin(stream, from_bucket)) is None:  # declared, not opened yet
            if stop() or self.stopping.wait(0.05):
                return
        yield first
        if first.ended:
            return
        at = first.upto + 1
        while not (stop() or self.stopping.is_set()):
            log.wait(stream, at - 1, self.heartbeat_s)
            delivery = self.next(stream, at)
            yield delivery
            at = delivery.upto + 1
            if delivery.ended:
                return

    def begin(self, stream: str, from_bucket: int | None) -> Delivery | None:
        """The first delivery of a connection: how far the stream is, even when there is nothing
        new. None while the stream is not opened yet."""
        log = self._log(stream)
        if stream not in log.streams():
            return None
        info = log.info(stream)
        oldest = info.trimmed_upto + 1
        if from_bucket is not None and from_bucket < oldest and info.trimmed_upto >= info.starts_at:
            raise Trimmed(
                f"stream {stream!r} starts at bucket {oldest}: earlier buckets were acknowledged "
                f"by all readers and deleted, so it cannot be followed from bucket {from_bucket}"
            )
        return replace(self.next(stream, oldest if from_bucket is None else from_bucket), info=info)

    def next(self, stream: str, at: int) -> Delivery:
        """What is there from bucket `at` on; without anything new, just a sign of life."""
        log = self._log(stream)
        info = log.info(stream)
        segments: tuple[Segment, ...] = ()
        if info.complete_upto >= at:
            segments = tuple(log.segments(stream, at, info.complete_upto))
        return Delivery(
            stream, at, max(info.complete_upto, at - 1), info.epoch, segments,
            tuple(log.absolute(segment) for segment in segments), ended=info.ended,
        )  # fmt: skip

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        log = self._log(stream)
        if stream not in log.streams():
            return
        answered(lambda: log.acknowledge(stream, reader, received, needed, epoch))
        # A reader that has not spoken yet needs everything.
        if self.readers.get(stream, set()) <= set(log.readers(stream)):
            upto, info = log.trimmable(stream), log.info(stream)
            for told in self.on_ack:
                told(stream, upto)
            if upto - info.trimmed_upto >= self.trim_buckets or info.ended:
                with suppress(StorageFull):  # put off: what is kept too long does no harm
                    log.trim(stream, upto)

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        if source not in self.pushes:
            known = ", ".join(sorted(self.pushes)) or "none"
            raise InputError(f"there is no source {source!r} here to push to (sources: {known})")
        self.pushes[source](table, token, flush)

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name not in self.calls:
            raise InputError(f"there is no action {name!r} here")
        return answered(lambda: self.calls[name](body))

    def _log(self, stream: str) -> Log:
        if stream not in self.logs:
            known = ", ".join(sorted(self.logs)) or "none"
            raise InputError(f"there is no stream {stream!r} here (streams: {known})")
        return self.logs[stream]


class InProcess:
    """The twin of Flight for one process: the same answers, nothing copied."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._closed = False

    def streams(self) -> list[StreamInfo]:
        return self._open().streams()

    def follow(
        self, stream: str, from_bucket: int | None, stop: threading.Event
    ) -> Iterator[Delivery]:
        yield from self._open().follow(stream, from_bucket, lambda: stop.is_set() or self._closed)

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        self._open().acknowledge(stream, reader, received, needed, epoch)

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        self._open().push(source, table, token, flush)

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._open().call(name, body)

    def close(self) -> None:
        self._closed = True

    def _open(self) -> Service:
        if self._closed or self._service.stopping.is_set():
            raise TransportError("the peer is closed")
        return self._service
