"""What a node or source offers to others, whatever carries it: its logs, pushes and questions.

The Flight server and the in-process twin both stand on this, so that they cannot differ in more
than the carrying. A reader *follows* a stream from a bucket and gets one `Delivery` after another;
asking again from an earlier bucket is how everything is repeated after a failure.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from holdfast.core.sunion import FOREVER
from holdfast.errors import InputError, LogCorrupted, StorageFull, TransportError, Trimmed
from holdfast.log import Log
from holdfast.log.segment import read_segment
from holdfast.types import OutputState, Segment, StreamInfo

T = TypeVar("T")
#: A silent stream still says so this often, so that a reader can tell silence from death.
HEARTBEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Delivery:
    """All segments of the buckets `since` to `upto`, which are whole; then the tentative ones.

    Whoever takes it takes back first (`undone`), then takes what is stable, then what is not."""

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
    #: UNDO: whatever was tentative is taken back.
    undone: bool = False
    #: REC_DONE: the failure is corrected.
    rec_done: bool = False
    #: Up to here buckets were computed without the inputs `missing`; None: nothing of that is new.
    tentative_upto: int | None = None
    missing: tuple[str, ...] = ()

    @property
    def is_sign_of_life(self) -> bool:
        """Nothing happened; only how the replica stands is told."""
        happened = self.undone or self.rec_done or self.ended or self.tentative_upto is not None
        return self.since > self.upto and self.info is None and not happened

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
    undos: int = 0
    rec_dones: int = 0

    def news(self, info: StreamInfo) -> bool:
        tentative = self.tentative_at is not None and (
            info.tentative_upto is not None and info.tentative_upto >= self.tentative_at
        )
        return (
            info.complete_upto >= self.at
            or info.ended
            or info.undos > self.undos
            or info.rec_dones > self.rec_dones
            or tentative
        )


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
    #: Told after acknowledgements: the stream, up to where none of its readers needs it, and up to
    #: where all of them have had it.
    on_ack: list[Callable[[str, int, int], None]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    heartbeat_s: float = HEARTBEAT_S
    #: How this replica stands with each of its outputs; a stream that is not here is stable.
    states: dict[str, OutputState] = field(default_factory=dict)
    #: Files that may be fetched now, by the name they are asked for.
    offered: dict[str, str] = field(default_factory=dict)
    #: Trimming is a durable record of its own, so it is not done for every single bucket.
    trim_buckets: int = 8

    def __post_init__(self) -> None:
        self.calls["stands"] = self._stands
        self.calls["hold"] = lambda body: {
            "whole": self.hold(body["stream"], body["reader"], body["epoch"])
        }

    def _stands(self, body: dict[str, Any]) -> dict[str, Any]:
        """Whoever asks may say on the occasion how far it is."""
        if (position := body.get("position")) is not None:
            self.acknowledge(body["stream"], *position)
        state, upto, tentative_upto = self.stands(body["stream"]) or (None, None, None)
        return {"state": state, "upto": upto, "tentative_upto": tentative_upto}

    def streams(self) -> list[StreamInfo]:
        return [log.info(name) for name, log in list(self.logs.items()) if name in log.streams()]

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: Callable[[], bool],
        tentative_after: int | None = None,
    ) -> Iterator[Delivery]:
        """Deliveries from `from_bucket` on (None: the oldest there is), heartbeats in between; what
        is tentative only after a bucket of its own."""
        log = self._log(stream)
        while (begun := self.begin(stream, from_bucket, tentative_after)) is None:
            if stop() or self.stopping.wait(0.05):  # declared, not opened yet
                return
        first, cursor = begun
        yield first
        if first.ended:
            return
        while not (stop() or self.stopping.is_set()):
            log.wait(stream, cursor.news, self.heartbeat_s)
            delivery = self.next(stream, cursor)
            yield delivery
            if delivery.ended:
                return

    def begin(
        self, stream: str, from_bucket: int | None, tentative_after: int | None = None
    ) -> tuple[Delivery, Cursor] | None:
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
        cursor = Cursor(
            oldest if from_bucket is None else from_bucket,
            None if tentative_after is None else tentative_after + 1,
            info.undos, info.rec_dones,
        )  # fmt: skip
        return replace(self.next(stream, cursor), info=info), cursor

    def next(self, stream: str, cursor: Cursor) -> Delivery:
        """What is new since; without anything new, just a sign of life."""
        log = self._log(stream)
        info = log.info(stream)
        at, undone = cursor.at, info.undos > cursor.undos
        rec_done = info.rec_dones > cursor.rec_dones
        segments: list[Segment] = []
        if info.complete_upto >= at:
            segments = log.segments(stream, at, info.complete_upto)
        cursor.at = max(info.complete_upto + 1, at)
        cursor.undos, cursor.rec_dones = info.undos, info.rec_dones
        tentative_upto: int | None = None
        missing: tuple[str, ...] = ()
        if cursor.tentative_at is not None and (undone or info.tentative_upto is not None):
            if undone:  # what is tentative now is younger than all that was taken back
                cursor.tentative_at = cursor.at
            found, tentative_upto, missing = _tentative(log, stream, cursor)
            segments = [*segments, *found]
        return Delivery(
            stream, at, max(info.complete_upto, at - 1), info.epoch, tuple(segments),
            tuple(log.absolute(segment) for segment in segments), ended=info.ended,
            state=self.states.get(stream, OutputState.STABLE), undone=undone, rec_done=rec_done,
            tentative_upto=tentative_upto, missing=missing,
        )  # fmt: skip

    def stands(self, stream: str) -> tuple[OutputState, int, int | None] | None:
        """How this replica stands with the stream: its state, up to where it is stable, and up to
        where it is tentative. None while it is not opened yet."""
        log = self._log(stream)
        if stream not in log.streams():
            return None
        info = log.info(stream)
        state = self.states.get(stream, OutputState.STABLE)
        return state, info.complete_upto, info.tentative_upto

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        log = self._log(stream)
        if stream not in log.streams():
            return
        answered(lambda: log.acknowledge(stream, reader, received, needed, epoch))
        if self.all_spoke(stream):
            upto, info = log.trimmable(stream), log.info(stream)
            for told in self.on_ack:
                told(stream, upto, log.received(stream))
            if upto - info.trimmed_upto >= self.trim_buckets or info.ended:
                with suppress(StorageFull):  # put off: what is kept too long does no harm
                    log.trim(stream, upto)

    def hold(self, stream: str, reader: str, epoch: int) -> bool:
        """Fold-in (Flux section 5.3.2): a new instance of a reader is being made from its partner's
        state; from now on nothing is deleted that it may need. True: nothing ever was, so even an
        empty start would do. Of a stream that is not open yet nobody can tell."""
        log = self._log(stream)
        if stream not in log.streams():
            return False
        info = log.info(stream)
        upto = info.trimmed_upto
        answered(lambda: log.acknowledge(stream, reader, upto, upto, epoch))
        return upto < info.starts_at

    def lost(self, dead: Mapping[str, int]) -> None:
        """Take-over (Flux section 3.2.2): readers whose instances up to an epoch are dead are not
        waited for. Their successors say `hold`."""
        for stream, readers in self.readers.items():
            log = self.logs.get(stream)
            if log is None or stream not in log.streams():
                continue
            for reader in sorted(readers & dead.keys()):
                if log.reader_epoch(stream, reader) <= (epoch := dead[reader]):
                    self.acknowledge(stream, reader, FOREVER, FOREVER, epoch)

    def received(self, stream: str) -> int:
        """The last bucket of a stream that all its readers have had."""
        log = self._log(stream)
        return log.received(stream) if self.all_spoke(stream) else log.info(stream).starts_at - 1

    def all_spoke(self, stream: str) -> bool:
        """A reader that has not spoken yet needs everything."""
        return self.readers.get(stream, set()) <= set(self._log(stream).readers(stream))

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


def _tentative(
    log: Log, stream: str, cursor: Cursor
) -> tuple[list[Segment], int | None, tuple[str, ...]]:
    """Tentative segments that are new to a connection, up to where, and made without what."""
    segments, spans = log.tentative(stream)
    since = cursor.tentative_at
    assert since is not None
    fresh = [span for span in spans if span.upto >= since]
    if not fresh:
        return [], None, ()
    cursor.tentative_at = fresh[-1].upto + 1
    missing = dict.fromkeys(name for span in fresh for name in span.missing)
    return [s for s in segments if s.id.bucket >= since], fresh[-1].upto, tuple(missing)


class InProcess:
    """The twin of Flight for one process: the same answers, nothing copied."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._closed = False

    def streams(self) -> list[StreamInfo]:
        return self._open().streams()

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: threading.Event,
        tentative_after: int | None = None,
    ) -> Iterator[Delivery]:
        yield from self._open().follow(
            stream, from_bucket, lambda: stop.is_set() or self._closed, tentative_after
        )

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
