"""Every remote call in one table: its name on the wire, what is asked and what is replied.

A request is a frozen dataclass that names the dataclass of its reply, so a caller gets a typed
reply and a handler a typed request (`Service.handle`). Requests are validated where they arrive and
so are replies: a peer of another version, or one that lies, is refused at the door and never meets
a handler. Whether a stream, path or host of that name exists is for the handler to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from holdfast.core.correction_leases import Answer
from holdfast.core.divergence import Finding, Window
from holdfast.core.membership import Standing
from holdfast.core.quarantine import PartStatus
from holdfast.errors import InputError, TransportError
from holdfast.frozen import dataclass
from holdfast.model.identity import Identity
from holdfast.streams import codec
from holdfast.streams.codec import Count, FileName
from holdfast.types import OutputState, Segment, StreamInfo

R = TypeVar("R")
#: What a reader says of itself: its name, received, no longer needed, its epoch.
Position = tuple[str, int, int, Count]


class Request(Generic[R]):
    """A question to a peer; `R` is its reply."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out; there is nothing to tell."""


# -- streams: every service -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ping(Request[Done]):
    """Is anybody there?"""


@dataclass(frozen=True, slots=True)
class StreamList:
    streams: tuple[StreamInfo, ...]


@dataclass(frozen=True, slots=True)
class ListStreams(Request[StreamList]):
    """The streams that are open here."""


@dataclass(frozen=True, slots=True)
class Acknowledge(Request[Done]):
    stream: str
    reader: str
    received: int
    needed: int
    epoch: Count


@dataclass(frozen=True, slots=True)
class StreamStatus:
    #: All None while the stream is not opened yet.
    state: OutputState | None
    upto: int | None
    tentative_upto: int | None


@dataclass(frozen=True, slots=True)
class GetStreamStatus(Request[StreamStatus]):
    """The status of a replica; the reader may say on the occasion how far it is."""

    stream: str
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    #: False: the stream is not opened yet, so nothing is held.
    open: bool
    starts_at: int = 0
    trimmed_upto: int = 0


@dataclass(frozen=True, slots=True)
class Hold(Request[Holding]):
    """Delete nothing that a new instance of `reader` may need, for as long as it asks."""

    stream: str
    reader: str
    epoch: Count


# -- nodes: replicas among themselves -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Postponement:
    answer: Answer
    #: Of one that goes on answering: the last bucket it has given, stable or tentative.
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Postpone(Request[Postponement]):
    """`peer` corrects a path, or wants to, and asks this replica to go on answering meanwhile."""

    path: str
    peer: str
    #: Number of the correction, how far the peer's stable results are, and whether the correction
    #: is under way, or over.
    correction: int
    position: int
    started: bool
    done: bool


@dataclass(frozen=True, slots=True)
class Results:
    """What is still kept of an output stream."""

    stream: str
    schema: str
    time: str
    starts_at: int
    trimmed_upto: int
    #: It may be ahead of the state: one that came back from its own disk computes again what it had
    #: logged before.
    complete_upto: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Moving:
    """A path as it is after `bucket`."""

    path: str
    bucket: int
    body: dict[str, Any]
    files: tuple[FileName, ...]
    results: tuple[Results, ...]


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of the state, below the state folder."""

    name: FileName
    size_bytes: Count
    digest: str


@dataclass(frozen=True, slots=True)
class OfferedState:
    """What a copy answers whose peer is caught up (`core.catch_up`)."""

    answer: Literal["state", "waits", "began-empty", "not-ready"]
    #: With `state`: all paths, and every file of their state once.
    paths: tuple[Moving, ...] = ()
    files: tuple[StateFile, ...] = ()
    #: With `waits`: whether its own disk would do; None: not known yet.
    own: bool | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class GetState(Request[OfferedState]):
    """The state of all paths, to rebuild `newcomer`. What is listed stays until `ReleaseState`, or
    until nobody has asked for the time of a lease."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class RenewState(Request[Done]):
    """The files of the state are still being fetched."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class ReleaseState(Request[Done]):
    """The files of the state were fetched, or will not be."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class Digests:
    #: By stream, what was made of its last buckets.
    windows: Mapping[str, Window]
    #: By stream, the bucket that differs and was computed again, and what was found.
    found: Mapping[str, tuple[int, Finding]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GetDigests(Request[Digests]):
    """What did this replica make? Others compare (`core.divergence`)."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GetNodeStatus(Request[NodeStatus]):
    """For people and the monitor."""


# -- the controller: hosts ask --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epoch:
    epoch: Count


@dataclass(frozen=True, slots=True)
class NextEpoch(Request[Epoch]):
    """An epoch for a new instance of a node or host process."""

    name: str
    at_least: Count = 0
    #: What a host process is about to run; None for a node.
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GetAssignment(Request[Assignment]):
    """The nodes that a host is to run."""

    host: str


@dataclass(frozen=True, slots=True)
class Instance:
    """A node that is up, or is being caught up, and where it listens."""

    node: str
    address: str
    epoch: Count
    #: The last bucket of its slowest path; None before it has begun.
    position: int | None = None
    #: The same for each path.
    positions: Mapping[str, int | None] = field(default_factory=dict)
    #: False: it is being caught up, and does not count as alive yet.
    up: bool = True
    #: What other replicas made otherwise, for people.
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Registration:
    #: False: the process was replaced; nothing else is told then.
    current: bool
    refused: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()
    #: Who reads each output here: nothing is deleted before they all spoke.
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    standings: Mapping[str, Standing] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Register(Request[Registration]):
    """The heartbeat of a host, with its nodes that are up, and those that are not healthy."""

    host: str
    epoch: Count
    nodes: tuple[Instance, ...]
    unhealthy: Mapping[str, PartStatus] = field(default_factory=dict)


# -- the run: nodes and commands ask --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Location:
    #: None: it has not reported yet.
    address: str | None


@dataclass(frozen=True, slots=True)
class Locate(Request[Location]):
    """Where a source or node is, for a reader."""

    producer: str
    reader: str | None = None
    #: Also an instance that is being caught up, which nobody can read yet.
    catching_up: bool = False


@dataclass(frozen=True, slots=True)
class Producers:
    names: tuple[str, ...]
    #: False: the run has no such stream.
    known: bool = True
    #: Of the run, for people.
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GetProducers(Request[Producers]):
    """The replicas that make a stream; none: it is with the run itself."""

    stream: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GetStatus(Request[RunStatus]):
    """For people."""


@dataclass(frozen=True, slots=True)
class Retired:
    from_bucket: int


@dataclass(frozen=True, slots=True)
class Retire(Request[Retired]):
    """Go on without a source for good."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Hosts:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GetHosts(Request[Hosts]):
    """All hosts; none where everything runs in one process."""


@dataclass(frozen=True, slots=True)
class Restart(Request[Done]):
    """End a host in good order; it is started again. Replied at once."""

    host: str


@dataclass(frozen=True, slots=True)
class Restarted:
    restarted: bool


@dataclass(frozen=True, slots=True)
class GetRestarted(Request[Restarted]):
    """Has a host that was asked to restart caught up?"""

    host: str


# -- the table ------------------------------------------------------------------------------------


class Call(NamedTuple):
    name: str
    request: type[Request[Any]]
    reply: type


def _call(name: str, request: type[Request[R]], reply: type[R]) -> Call:
    """mypy holds the reply of the table against the one that the request names."""
    return Call(name, request, reply)


TABLE = (
    _call("ping", Ping, Done),
    _call("streams", ListStreams, StreamList),
    _call("acknowledge", Acknowledge, Done),
    _call("stream-status", GetStreamStatus, StreamStatus),
    _call("hold", Hold, Holding),
    _call("postpone", Postpone, Postponement),
    _call("state", GetState, OfferedState),
    _call("renew-state", RenewState, Done),
    _call("release-state", ReleaseState, Done),
    _call("digests", GetDigests, Digests),
    _call("node-status", GetNodeStatus, NodeStatus),
    _call("next-epoch", NextEpoch, Epoch),
    _call("assignment", GetAssignment, Assignment),
    _call("register", Register, Registration),
    _call("locate", Locate, Location),
    _call("producers", GetProducers, Producers),
    _call("status", GetStatus, RunStatus),
    _call("retire", Retire, Retired),
    _call("hosts", GetHosts, Hosts),
    _call("restart", Restart, Done),
    _call("restarted", GetRestarted, Restarted),
)
_BY_NAME = {call.name: call for call in TABLE}
_BY_REQUEST = {call.request: call for call in TABLE}
assert len(_BY_NAME) == len(_BY_REQUEST) == len(TABLE)
#: Fields of the envelope (`transport/wire.py`), which lie beside those of the message.
assert not any(f.name in ("v", "kind") for c in TABLE for t in c[1:] for f in fields(t))


def call_of(request: type[Request[Any]]) -> Call:
    assert request in _BY_REQUEST, f"{request.__name__} is not in the table of calls"
    return _BY_REQUEST[request]


def request_of(name: str, body: Any) -> Request[Any]:
    """What is asked, if it is a request; else `InputError`, which the caller is told."""
    if name not in _BY_NAME:
        known = ", ".join(_BY_NAME)
        raise InputError(f"expected one of the calls {known}, found {codec.shown(name)}")
    request: Request[Any] = codec.decode(
        _BY_NAME[name].request, body, InputError, f"request {name!r}"
    )
    return request


def reply_of(request: Request[R], body: Any, peer: str) -> R:
    """What `peer` replied, if it is the reply to that request."""
    call = call_of(type(request))
    reply: R = codec.decode(call.reply, body, TransportError, f"reply of {peer} to {call.name!r}")
    return reply
