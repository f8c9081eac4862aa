"""The service of a node or source, independent of the transport: streams, pushes and calls.

The Flight server and the in-process transport share this implementation, so that they differ only
in how messages travel. A consumer *follows* a stream from a bucket and receives one `Delivery`
after another. After a failure the consumer follows the stream again from an earlier bucket.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from holdfast.clock import monotonic_us
from holdfast.core.catch_up_events import Held, NotOpen
from holdfast.core.connection import first_bucket
from holdfast.core.membership import InstanceStatus
from holdfast.core.replica_selector import Status
from holdfast.core.retention import Position, position_of_gone
from holdfast.errors import (
    InputError,
    LogCorrupted,
    LogError,
    SegmentLost,
    StaleEpoch,
    TransportError,
)
from holdfast.storage import Log
from holdfast.storage.files import is_intact, put_file
from holdfast.storage.folder import MARK
from holdfast.storage.segment import REMEDY
from holdfast.streams import codec
from holdfast.streams.calls import (
    Acknowledge,
    Done,
    FolderMark,
    GetFolderMark,
    GetStreamStatus,
    Hold,
    Holding,
    ListStreams,
    Ping,
    Request,
    StreamList,
    StreamStatus,
    call_of,
    request_of,
)
from holdfast.streams.delivery import Cursor, Delivery
from holdfast.types import OutputState, Segment, StreamInfo

T = TypeVar("T")
Q = TypeVar("Q", bound=Request[Any])
#: Heartbeat interval of an idle stream: a consumer must be able to tell idle from dead.
HEARTBEAT_S = 0.1
#: Pause before a server looks again whether a stream is open.
OPENING_S = 0.05


def answered(act: Callable[[], T]) -> T:
    """Perform a request. A storage error of this process reaches the caller as a `TransportError`,
    which is retried, because the request itself was valid."""
    try:
        return act()
    except LogError as err:
        raise TransportError(f"the server cannot answer because of a storage error: {err}") from err


@dataclass(slots=True)
class Service:
    """The server side of a node or source. Logs may be added while the service runs, because a
    source opens its stream late."""

    logs: dict[str, Log] = field(default_factory=dict)
    pushes: dict[str, Callable[[pa.Table, str | None, bool], None]] = field(default_factory=dict)
    #: By stream: consumers that must have acknowledged before the stream is trimmed.
    consumers: dict[str, set[str]] = field(default_factory=dict)
    #: Called after acknowledgements with the stream, the last bucket that all consumers have
    #: released, and the last bucket that all consumers have received.
    on_ack: list[Callable[[str, int, int], None]] = field(default_factory=list)
    #: Called with the stream and the error when a segment is found missing or damaged.
    on_damage: list[Callable[[str, LogCorrupted], None]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    heartbeat_s: float = HEARTBEAT_S
    #: State of this replica for each output; a stream that is not listed is STABLE.
    states: dict[str, OutputState] = field(default_factory=dict)
    #: By output: microseconds of the wait budget that the newest stable buckets have used.
    spent_us: dict[str, int] = field(default_factory=dict)
    #: Files that peers may fetch now: requested name to path.
    offered: dict[str, str] = field(default_factory=dict)
    #: By fetching replica: first bucket of each stream to retain until the fetch is over.
    pins: dict[str, Mapping[str, int]] = field(default_factory=dict)
    #: Trim at least this many buckets at once, because each trim is a durable record.
    trim_buckets: int = 8
    #: By stream and consumer: time of the last `Hold` of a new instance that has not acknowledged
    #: since.
    _holds: dict[tuple[str, str], int] = field(default_factory=dict, init=False)
    _handlers: dict[type, Callable[[Any], object]] = field(default_factory=dict, init=False)
    #: By folder of a log: the file that tells whether a consumer sees the folder.
    _marks: dict[str, FolderMark] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.handle(Ping, lambda _: Done())
        self.handle(GetFolderMark, self._mark_of)
        self.handle(ListStreams, lambda _: StreamList(tuple(self.streams())))
        self.handle(Acknowledge, self._acknowledge)
        self.handle(GetStreamStatus, self._status)
        self.handle(Hold, lambda ask: self.held(ask, monotonic_us()))

    def _mark_of(self, ask: GetFolderMark) -> FolderMark:
        log = self.logs.get(ask.stream)
        if log is None:
            return FolderMark("", "")
        root = str(log.root)
        new = FolderMark(os.path.join(root, MARK), uuid.uuid4().hex)
        mark = self._marks.setdefault(root, new)
        if mark is new or not os.path.exists(mark.file):
            with suppress(LogError):  # without the file, rows are sent
                put_file(mark.file, mark.content.encode(), fsync=False)
        return mark

    def _acknowledge(self, ask: Acknowledge) -> Done:
        self._check_consumer(ask.stream, ask.consumer)
        self.acknowledge(ask.stream, ask.consumer, ask.received, ask.needed, ask.epoch)
        return Done()

    def _check_consumer(self, stream: str, consumer: str) -> None:
        """Refuse acknowledgements of unknown consumers: they would hold back trimming for ever."""
        known = self.consumers.get(stream)
        unnamed = consumer.partition("+")[0]  # several clients of an output have names of their own
        if known and consumer not in known and unnamed not in known:
            raise InputError(
                f"stream {stream!r} has no consumer {consumer!r}; its consumers are "
                f"{', '.join(sorted(known))}"
            )

    def held(self, ask: Hold, at: int) -> Holding:
        self._check_consumer(ask.stream, ask.consumer)
        reply = self.hold(ask.stream, ask.consumer, ask.epoch, at)
        return (
            Holding(open=False)
            if isinstance(reply, NotOpen)
            else Holding(True, reply.starts_at, reply.trimmed_upto)
        )

    def _status(self, ask: GetStreamStatus) -> StreamStatus:
        if ask.position is not None:
            self._check_consumer(ask.stream, ask.position[0])
            self.acknowledge(ask.stream, *ask.position)
        return StreamStatus(*self.stream_status(ask.stream) or ())

    def streams(self) -> list[StreamInfo]:
        return [log.info(name) for name, log in list(self.logs.items()) if log.has(name)]

    def follow(
        self,
        stream: str,
        from_bucket: int | None,
        stop: Callable[[], bool],
        tentative_after: int | None = None,
    ) -> Iterator[Delivery]:
        """Deliveries from `from_bucket` on (None: the oldest bucket in the log), with heartbeats in
        between. Tentative buckets are included only after `tentative_after`; None: not at all."""
        log = self._log(stream)
        while (begun := self.begin(stream, from_bucket, tentative_after)) is None:
            if stop() or self.stopping.wait(OPENING_S):  # declared, not opened yet
                return
        first, cursor = begun
        # The consumer may have connected again because a file is damaged.
        yield self._whole(log, first, content=True)
        if first.ended:
            return
        while not (stop() or self.stopping.is_set()):
            log.wait(stream, cursor.news, self.heartbeat_s)
            delivery = self.next(stream, cursor)
            yield self._whole(log, delivery)
            if delivery.ended:
                return

    def begin(
        self, stream: str, from_bucket: int | None, tentative_after: int | None = None
    ) -> tuple[Delivery, Cursor] | None:
        """The first delivery of a connection, which carries the `StreamInfo` even when no bucket is
        new. None while the stream is not opened yet."""
        log = self._log(stream)
        if not log.has(stream):
            return None
        info = log.info(stream)
        cursor = Cursor(
            first_bucket(info, from_bucket, is_source=stream in self.pushes),
            None if tentative_after is None else tentative_after + 1,
        )
        return replace(self.next(stream, cursor), info=info), cursor

    def next(self, stream: str, cursor: Cursor) -> Delivery:
        """Everything new since the cursor; if nothing is new, a heartbeat."""
        log = self._log(stream)
        info = log.info(stream)
        state = self.states.get(stream, OutputState.STABLE)
        spent_us = self.spent_us.get(stream, 0)
        if cursor.life is not None:
            last_info, heartbeat = cursor.life
            if last_info is info and heartbeat.state is state and heartbeat.spent_us == spent_us:
                return heartbeat  # nothing has changed since the last heartbeat
        at = cursor.at
        segments: list[Segment] = []
        if info.complete_upto >= at:
            segments = log.segments(stream, at, info.complete_upto)
        cursor.at = max(info.complete_upto + 1, at)
        tentative_upto: int | None = None
        missing: tuple[str, ...] = ()
        partial = (1.0, 1.0)
        if cursor.tentative_at is not None and info.tentative_upto is not None:
            tentative, tentative_upto, missing, partial = _tentative(log, stream, cursor)
            segments = [*segments, *tentative]
        delivery = Delivery(
            stream, at, max(info.complete_upto, at - 1), info.epoch, tuple(segments),
            tuple(log.absolute(segment) for segment in segments), ended=info.ended,
            state=state, tentative_upto=tentative_upto, missing=missing, partial=partial,
            spent_us=spent_us,
        )  # fmt: skip
        cursor.life = (info, delivery) if delivery.is_sign_of_life else None
        return delivery

    def _whole(self, log: Log, delivery: Delivery, *, content: bool = False) -> Delivery:
        """Check the sizes of the files of a delivery; with `content`, also their content."""
        try:
            for segment in delivery.segments:
                log.check(segment)
                if content and not is_intact(log.absolute(segment), segment.crc):
                    log.read(segment)  # raises, unless only bytes without meaning have changed
                    raise LogCorrupted(f"{log.absolute(segment)}: the file was changed; {REMEDY}")
        except LogCorrupted as err:
            raise self.damaged(delivery.stream, err) from None
        return delivery

    def damaged(self, stream: str, err: LogCorrupted) -> SegmentLost:
        """Notify the owner of the log about a missing or damaged segment. The consumer receives
        `SegmentLost`, and may find the segment at another replica."""
        for notify in self.on_damage:
            notify(stream, err)
        return SegmentLost(str(err).removesuffix(f"; {REMEDY}"))

    def stream_status(self, stream: str) -> Status | None:
        """Status of this replica for the stream; None while the stream is not opened yet."""
        log = self._log(stream)
        if not log.has(stream):
            return None
        info = log.info(stream)
        state = self.states.get(stream, OutputState.STABLE)
        return Status(state, info.complete_upto, info.tentative_upto, info.ended)

    def acknowledge(
        self, stream: str, consumer: str, received: int, needed: int, epoch: int
    ) -> None:
        log = self._log(stream)
        if not log.has(stream):
            return
        answered(lambda: log.acknowledge(stream, consumer, received, needed, epoch))
        self._holds.pop((stream, consumer), None)
        if self.all_spoke(stream):
            upto, info = log.trimmable(stream), log.info(stream)
            for notify in self.on_ack:
                notify(stream, upto, self.received(stream))
            pinned = [first[stream] for first in list(self.pins.values()) if stream in first]
            upto = min([upto, *(first - 1 for first in pinned)])
            if upto - info.trimmed_upto >= self.trim_buckets or info.ended:
                with suppress(LogError):  # retried later: retaining for too long does no harm
                    log.trim(stream, upto)

    def hold(self, stream: str, consumer: str, epoch: int, at: int) -> Held | NotOpen:
        """Fold-in (Flux section 5.3.2): a new instance of a consumer is being caught up. From now
        on the log retains everything that the instance may need. The instance holds up no producer:
        `received` ignores its position until it acknowledges for the first time."""
        log = self._log(stream)
        if not log.has(stream):
            return NotOpen()
        info = log.info(stream)
        upto = info.trimmed_upto
        if epoch > log.position(stream, consumer)[2] or (stream, consumer) in self._holds:
            self._holds[stream, consumer] = at
        answered(lambda: log.acknowledge(stream, consumer, upto, upto, epoch))
        return Held(info.starts_at, upto)

    def lost(self, statuses: Mapping[str, InstanceStatus], at: int) -> None:
        """Take-over (Flux section 3.2.2): do not wait for dead consumers. `core.retention` decides
        what is still retained for them."""
        for stream, consumers in self.consumers.items():
            log = self.logs.get(stream)
            if log is None or not log.has(stream):
                continue
            for consumer in sorted(consumers & statuses.keys()):
                last = Position(*log.position(stream, consumer))
                held_at = self._holds.get((stream, consumer))
                if held_at is None and last.epoch > statuses[consumer].dead:
                    # An earlier instance of this process received the `Hold`; it may be repeated.
                    held_at = at
                    if statuses[consumer].gone:
                        self._holds[stream, consumer] = at
                trimmed_upto = log.info(stream).trimmed_upto
                position = position_of_gone(statuses[consumer], last, trimmed_upto, held_at, at)
                if position is not None:
                    with suppress(StaleEpoch):  # a newer instance has just acknowledged
                        self.acknowledge(stream, consumer, *position)

    def received(self, stream: str) -> int:
        """Last bucket that all consumers of the stream have received, except consumers that are
        being caught up."""
        log = self._log(stream)
        if not self.all_spoke(stream):
            return log.info(stream).starts_at - 1
        return log.received(stream, without={r for s, r in list(self._holds) if s == stream})

    def all_spoke(self, stream: str) -> bool:
        """Whether every consumer has acknowledged. One that has not yet may need everything."""
        return self.consumers.get(stream, set()).issubset(self._log(stream).consumers(stream))

    def push(self, source: str, table: pa.Table, token: str | None, flush: bool) -> None:
        if source not in self.pushes:
            sources = ", ".join(sorted(self.pushes)) or "none"
            raise InputError(f"this process has no source {source!r} (sources: {sources})")
        self.pushes[source](table, token, flush)

    def handle(self, request: type[Q], answer: Callable[[Q], object]) -> None:
        """Register the handler of a request type. It must return the reply type of the call."""
        call = call_of(request)
        assert request not in self._handlers, f"call {call.name!r} has two handlers"
        self._handlers[request] = answer

    def answer(self, name: str, body: Any) -> dict[str, Any]:
        """Decode a call, run its handler and encode the reply."""
        request = request_of(name, body)
        handler = self._handlers.get(type(request))
        if handler is None:
            calls = ", ".join(sorted(call_of(kind).name for kind in self._handlers))
            raise InputError(
                f"call {name!r} is not served by this process; expected one of {calls}"
            )
        reply = answered(lambda: handler(request))
        expected = call_of(type(request)).reply
        assert type(reply) is expected, f"{name!r}: {type(reply)} instead of {expected}"
        return codec.encode(reply)

    def _log(self, stream: str) -> Log:
        if stream not in self.logs:
            streams = ", ".join(sorted(self.logs)) or "none"
            raise InputError(f"this process has no stream {stream!r} (streams: {streams})")
        return self.logs[stream]


def _tentative(
    log: Log, stream: str, cursor: Cursor
) -> tuple[list[Segment], int | None, tuple[str, ...], tuple[float, float]]:
    """New tentative segments of a connection, their last bucket, the missing inputs, and the shares
    of inputs and rows present. All buckets of one delivery agree in the missing inputs and the
    shares; the first bucket that differs starts the next delivery."""
    assert cursor.tentative_at is not None
    since = max(cursor.tentative_at, cursor.at)
    segments, spans = log.tentative(stream, since)
    if not spans:
        return [], None, (), (1.0, 1.0)
    first = last = spans[0]
    for span in spans:
        if (span.missing, span.inputs, span.rows) != (first.missing, first.inputs, first.rows):
            break
        last = span
    cursor.tentative_at = last.upto + 1
    alike = [segment for segment in segments if segment.id.bucket <= last.upto]
    return alike, last.upto, first.missing, (first.inputs, first.rows)
