"""What a node or source offers to others, whatever carries it: its logs, pushes and questions.

The Flight server and the in-process twin both stand on this, so that they cannot differ in more
than the carrying. A reader *follows* a stream from a bucket and gets one `Delivery` after another;
asking again from an earlier bucket is how everything is repeated after a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from holdfast.errors import InputError, TransportError, Trimmed
from holdfast.log import Log
from holdfast.log.segment import read_segment
from holdfast.types import Segment, StreamInfo

#: A silent stream still says so this often, so that a reader can tell silence from death.
HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Delivery:
    """All segments of the buckets after the previous delivery up to `upto`, which are whole."""

    stream: str
    upto: int
    epoch: int
    segments: tuple[Segment, ...] = ()
    #: Absolute path of each segment, where the reader shares the storage; else the rows.
    paths: tuple[str, ...] = ()
    tables: tuple[pa.Table, ...] = ()
    ended: bool = False

    def table(self, number: int) -> pa.Table:
        """Rows of a segment, verified, whichever way they came."""
        if self.tables:
            return self.tables[number]
        segment = self.segments[number]
        return read_segment(self.paths[number], rows=segment.rows, checksum=segment.checksum)


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
    #: Told after every acknowledgement that was taken.
    on_ack: list[Callable[[str, str], None]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def streams(self) -> list[StreamInfo]:
        return [log.info(name) for name, log in list(self.logs.items()) if name in log.streams()]

    def follow(
        self, stream: str, from_bucket: int | None, stop: Callable[[], bool]
    ) -> Iterator[Delivery]:
        """Deliveries from `from_bucket` on (None: the oldest there is), heartbeats in between."""
        log = self._log(stream)
        while stream not in log.streams():  # declared, not opened yet
            if stop() or self.stopping.wait(0.05):
                return
        info = log.info(stream)
        oldest = info.trimmed_upto + 1
        if from_bucket is not None and from_bucket < oldest and info.trimmed_upto >= info.starts_at:
            raise Trimmed(
                f"stream {stream!r} starts at bucket {oldest}: earlier buckets were acknowledged "
                f"by all readers and deleted, so it cannot be followed from bucket {from_bucket}"
            )
        at = oldest if from_bucket is None else from_bucket
        patience_s = 0.0  # told at once: how far the stream is, even when there is nothing new
        while not (stop() or self.stopping.is_set()):
            info = log.wait(stream, at - 1, patience_s)
            patience_s = HEARTBEAT_S
            if info.complete_upto >= at:
                segments = tuple(log.segments(stream, at, info.complete_upto))
                at = info.complete_upto + 1
            else:
                segments = ()
            yield Delivery(
                stream, at - 1, info.epoch, segments,
                tuple(log.absolute(segment) for segment in segments), ended=info.ended,
            )  # fmt: skip
            if info.ended and info.complete_upto < at:
                return

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        log = self._log(stream)
        if stream not in log.streams():
            return
        log.acknowledge(stream, reader, received, needed, epoch)
        # A reader that has not spoken yet needs everything.
        if self.readers.get(stream, set()) <= set(log.readers(stream)):
            log.trim(stream, log.trimmable(stream))
        for told in self.on_ack:
            told(stream, reader)

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        if source not in self.pushes:
            known = ", ".join(sorted(self.pushes)) or "none"
            raise InputError(f"there is no source {source!r} here to push to (sources: {known})")
        self.pushes[source](table, token, flush)

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name not in self.calls:
            raise InputError(f"there is no action {name!r} here")
        return self.calls[name](body)

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
