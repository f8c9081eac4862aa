"""The state of a log, as the fold of its records; recovery and normal operation share `fold`.

`fold` refuses illegal records, such as a stable bucket added twice or a boundary that falls. Such a
record is a bug of Holdfast, and stopping is safer than logging it. `rehearse` runs the same
function before anything is written.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from holdfast.errors import ProtocolViolation
from holdfast.storage.records import (
    Ack,
    Added,
    Boundary,
    Counter,
    DropState,
    Ended,
    Epoch,
    Note,
    Open,
    Query,
    Record,
    Retired,
    State,
    Tentative,
    Token,
    Trim,
    Undo,
)
from holdfast.types import Segment, SegmentId, Stability, StreamInfo


def _bucket(segment: Segment) -> int:
    return segment.id.bucket


def _place(segment: Segment) -> tuple[int, SegmentId]:
    return segment.id.bucket, segment.id


@dataclass(slots=True)
class StreamState:
    name: str
    schema: str
    time: str
    starts_at: int
    #: Never falls; `starts_at - 1` initially.
    complete_upto: int
    #: Never falls, never above `complete_upto`.
    trimmed_upto: int
    ended: bool = False
    #: Sorted by bucket, then identity. All are above `trimmed_upto`.
    segments: list[Segment] = field(default_factory=list)
    #: By consumer.
    acks: dict[str, Ack] = field(default_factory=dict)
    #: Ranges of tentative buckets, oldest first; all are above `complete_upto`.
    spans: list[Tentative] = field(default_factory=list)
    #: Tentative segments, sorted by bucket. After each append, all of them lie within `spans`.
    tentative: list[Segment] = field(default_factory=list)
    undos: int = 0
    #: The decision that ended the stream, if the stream did not end by itself.
    retired: Retired | None = None

    @property
    def tentative_upto(self) -> int | None:
        return self.spans[-1].upto if self.spans else None

    def info(self, epoch: int) -> StreamInfo:
        return StreamInfo(
            self.name, self.schema, self.time, self.starts_at, self.complete_upto,
            self.trimmed_upto, epoch, self.ended, self.tentative_upto, self.undos,
        )  # fmt: skip

    def between(self, from_bucket: int, upto: int) -> list[Segment]:
        """Segments of the buckets `from_bucket` to `upto`, both included."""
        segments = self.segments
        if not segments or segments[-1].id.bucket < from_bucket:
            return []  # the usual case: the consumer has caught up
        first = bisect_left(segments, from_bucket, key=_bucket)
        return segments[first : bisect_right(segments, upto, lo=first, key=_bucket)]

    def open_part(self) -> StreamState:
        """A copy without the complete buckets, and with only the last tentative range and segment:
        no legal record depends on the rest."""
        return StreamState(
            self.name, self.schema, self.time, self.starts_at, self.complete_upto,
            self.trimmed_upto, self.ended, self.between(self.complete_upto + 1, 2**62),
            dict(self.acks), self.spans[-1:], self.tentative[-1:], self.undos, self.retired,
        )  # fmt: skip

    def received(self, without: Collection[str] = ()) -> int:
        """Last bucket that every consumer except `without` has received."""
        positions = [ack.received for consumer, ack in self.acks.items() if consumer not in without]
        return min(positions, default=self.complete_upto if without else self.starts_at - 1)

    @property
    def trimmable(self) -> int:
        """Last complete bucket that every consumer has released."""
        needed = min((ack.needed for ack in self.acks.values()), default=self.starts_at - 1)
        return max(self.trimmed_upto, min(needed, self.complete_upto))


@dataclass(slots=True)
class LogState:
    #: 0 until the log is opened for the first time.
    epoch: int = 0
    owner: str = ""
    #: Digest of the query that the log belongs to; empty: not recorded.
    query: str = ""
    streams: dict[str, StreamState] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    #: By path, oldest first: the bucket of each state version, and its description by the engine.
    states: dict[str, list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)

    def stream(self, name: str) -> StreamState:
        if name not in self.streams:
            raise ProtocolViolation(
                f"stream {name!r} is not open; open streams: {list(self.streams)}"
            )
        return self.streams[name]


def _bucket_of(version: tuple[int, Any]) -> int:
    return version[0]


def fold(state: LogState, record: Record) -> None:
    match record:
        case Epoch():
            _require(record.epoch > state.epoch, record, f"the epoch is already {state.epoch}")
            state.epoch, state.owner = record.epoch, record.owner
        case Query():
            _require(
                state.query in ("", record.digest), record, f"the log is of query {state.query}"
            )
            state.query = record.digest
        case Open():
            _require(record.stream not in state.streams, record, "the stream is already open")
            before = record.starts_at - 1
            state.streams[record.stream] = StreamState(
                record.stream, record.schema, record.time, record.starts_at, before, before
            )
        case Added():
            _fold_added(state.stream(record.stream), record)
        case Boundary():
            stream = state.stream(record.stream)
            upto = stream.complete_upto
            if record.upto < upto:
                raise _refused(record, f"the boundary is already at {upto}")
            _require(record.upto == upto or not stream.ended, record, "the stream has ended")
            stream.complete_upto = record.upto
            _supersede(stream, record.upto)
        case Tentative():
            _fold_tentative(state.stream(record.stream), record)
        case Undo():
            stream = state.stream(record.stream)
            _require(record.upto == stream.complete_upto, record, "stable buckets are never undone")
            _require(record.number > stream.undos, record, f"the last undo was {stream.undos}")
            stream.spans, stream.tentative, stream.undos = [], [], record.number
        case Ended():
            stream = state.stream(record.stream)
            _require(not stream.spans, record, "tentative buckets are uncorrected")
            stream.ended = True
        case Retired():
            stream = state.stream(record.stream)
            complete = record.from_bucket == stream.complete_upto + 1
            _require(
                complete and not stream.ended,
                record,
                "earlier buckets are incomplete or the stream has ended",
            )
            stream.ended, stream.retired = True, record
        case Trim():
            stream = state.stream(record.stream)
            _require(record.upto <= stream.complete_upto, record, "the buckets are not complete")
            stream.trimmed_upto = max(stream.trimmed_upto, record.upto)
            del stream.segments[: bisect_right(stream.segments, record.upto, key=_bucket)]
        case Ack():
            _fold_ack(state.stream(record.stream), record)
        case Token():  # dead letters may be durable before the stream is open
            state.tokens[record.stream] = record.token
        case Counter():
            state.counters[record.name] = record.value
        case State():
            versions = state.states.setdefault(record.path, [])
            at = bisect_left(versions, record.bucket, key=_bucket_of)
            is_known = at < len(versions) and versions[at][0] == record.bucket
            versions[at : at + is_known] = [(record.bucket, record.body)]
        case DropState():
            versions = state.states.get(record.path, [])
            del versions[: bisect_left(versions, record.upto, key=_bucket_of)]
            if not versions:
                state.states.pop(record.path, None)
        case Note():
            pass
        case _:
            assert_never(record)


def rehearse(state: LogState, records: Iterable[Record]) -> None:
    """Raises what folding the records would raise, and changes nothing.

    The records are folded onto copies of the streams that they name. The copies omit the complete
    buckets, which no record may change, so the cost does not grow with the log.
    """
    draft = LogState(state.epoch, state.owner, state.query, dict(state.streams))
    for record in records:
        name = getattr(record, "stream", "")
        stream = draft.streams.get(name)
        if stream is not None and stream is state.streams.get(name):
            draft.streams[name] = stream.open_part()
        fold(draft, record)


def snapshot(state: LogState) -> list[Record]:
    """A minimal list of records that folds to this state."""
    records: list[Record] = [Epoch(state.epoch, state.owner)] if state.epoch else []
    records += [Query(state.query)] if state.query else []
    for stream in state.streams.values():
        records.append(Open(stream.name, stream.schema, stream.time, stream.starts_at))
        records += [Added(segment) for segment in stream.segments]
        records.append(Boundary(stream.name, stream.complete_upto))
        records.append(Trim(stream.name, stream.trimmed_upto))
        if stream.undos:
            records.append(Undo(stream.name, stream.complete_upto, stream.undos))
        records += [Added(segment) for segment in stream.tentative]
        records += stream.spans
        if stream.ended:
            records.append(stream.retired or Ended(stream.name))
        records += stream.acks.values()
    records += [Token(stream, token) for stream, token in state.tokens.items()]
    records += [Counter(name, value) for name, value in state.counters.items()]
    for path, versions in state.states.items():
        records += [State(path, bucket, body) for bucket, body in versions]
    return records


def live_records(state: LogState) -> int:
    """About `len(snapshot(state))`, without building the snapshot."""
    streams = sum(
        4 + len(s.segments) + len(s.acks) + len(s.tentative) + len(s.spans)
        for s in state.streams.values()
    )
    versions = sum(len(versions) for versions in state.states.values())
    return 1 + streams + len(state.tokens) + len(state.counters) + versions


def _fold_added(stream: StreamState, record: Added) -> None:
    segment = record.segment
    _require(not stream.ended, record, "the stream has ended")
    if segment.id.bucket <= stream.complete_upto:
        raise _refused(record, f"buckets up to {stream.complete_upto} are already complete")
    tentative = segment.stability is Stability.TENTATIVE
    segments = stream.tentative if tentative else stream.segments
    if not segments or _place(segment) > _place(segments[-1]):
        segments.append(segment)
        return
    if tentative:
        raise _refused(record, f"the last tentative segment of the stream is {segments[-1:]}")
    place = bisect_left(segments, _place(segment), key=_place)
    duplicate = place < len(segments) and segments[place].id == segment.id
    _require(not duplicate, record, "the segment was already added")
    segments.insert(place, segment)


def _fold_tentative(stream: StreamState, record: Tentative) -> None:
    upto = stream.complete_upto if stream.tentative_upto is None else stream.tentative_upto
    _require(not stream.ended, record, "the stream has ended")
    _require(upto < record.since <= record.upto, record, f"the stream is published up to {upto}")
    last = stream.spans[-1] if stream.spans else None
    if last is not None and replace(last, since=record.since, upto=record.upto) == record:
        stream.spans[-1] = replace(last, upto=record.upto)
    else:
        stream.spans.append(record)


def _supersede(stream: StreamState, upto: int) -> None:
    """Stable buckets up to `upto` replace tentative ones; later tentative buckets remain valid."""
    if not (stream.tentative or stream.spans):
        return
    del stream.tentative[: bisect_right(stream.tentative, upto, key=_bucket)]
    while stream.spans and stream.spans[0].upto <= upto:
        del stream.spans[0]
    if stream.spans and stream.spans[0].since <= upto:
        stream.spans[0] = replace(stream.spans[0], since=upto + 1)


def _fold_ack(stream: StreamState, ack: Ack) -> None:
    """A newer instance of the consumer may start further back; an older instance is ignored."""
    last = stream.acks.get(ack.reader)
    ahead = last is not None and ack.received >= last.received and ack.needed >= last.needed
    if last is None or ack.epoch > last.epoch or (ack.epoch == last.epoch and ahead):
        stream.acks[ack.reader] = ack
    elif ack.epoch == last.epoch:
        received, needed = max(ack.received, last.received), max(ack.needed, last.needed)
        stream.acks[ack.reader] = replace(last, received=received, needed=needed)


def _require(legal: bool, record: Record, why: str) -> None:
    if not legal:
        raise _refused(record, why)


def _refused(record: Record, why: str) -> ProtocolViolation:
    return ProtocolViolation(f"illegal log record, {why}: {record}")
