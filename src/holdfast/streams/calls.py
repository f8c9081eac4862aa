"""The table of all remote calls: name on the wire, request, reply.

A request is a frozen dataclass that names the dataclass of its reply, so a caller gets a typed
reply and a handler a typed request (`Service.handle`). Requests and replies are validated on
arrival: a malformed message, for example from a peer of another version, never reaches a handler.
Handlers check that the stream, path or host named in a request exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from holdfast.core.correction_leases import Answer
from holdfast.core.divergence import Finding, Window
from holdfast.core.membership import InstanceStatus
from holdfast.core.quarantine import PartStatus
from holdfast.errors import InputError, TransportError
from holdfast.frozen import dataclass
from holdfast.model.identity import Identity
from holdfast.streams import codec
from holdfast.streams.codec import Count, FileName
from holdfast.types import OutputState, Segment, StreamInfo

R = TypeVar("R")
#: Position of a consumer: its name, received up to, released up to, epoch of the instance.
Position = tuple[str, int, int, Count]


class Request(Generic[R]):
    """A request to a peer; `R` is the type of its reply."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The empty reply: the request was carried out."""


# -- streams: every service -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ping(Request[Done]):
    """Check that the peer is reachable."""


@dataclass(frozen=True, slots=True)
class FolderMark:
    #: A file beside the log, and its content, which is new in every process; empty without a log.
    file: str
    content: str


@dataclass(frozen=True, slots=True)
class GetFolderMark(Request[FolderMark]):
    """Find out whether this process sees the files of a stream: only if it can read `file`, and
    finds `content` there, it can read the segments by their paths."""

    stream: str


@dataclass(frozen=True, slots=True)
class StreamList:
    streams: tuple[StreamInfo, ...]


@dataclass(frozen=True, slots=True)
class ListStreams(Request[StreamList]):
    """List the open streams of a service."""


@dataclass(frozen=True, slots=True)
class Acknowledge(Request[Done]):
    stream: str
    consumer: str
    received: int
    needed: int
    epoch: Count


@dataclass(frozen=True, slots=True)
class StreamStatus:
    #: State and positions are None until the stream is opened.
    state: OutputState | None = None
    upto: int | None = None
    tentative_upto: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class GetStreamStatus(Request[StreamStatus]):
    """Get the status of a replica. A consumer may acknowledge its position in the same call."""

    stream: str
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    #: False: the stream is not opened yet, so nothing is retained.
    open: bool
    starts_at: int = 0
    trimmed_upto: int = 0


@dataclass(frozen=True, slots=True)
class Hold(Request[Holding]):
    """Retain everything that a new instance of `consumer` may need, while it repeats this call."""

    stream: str
    consumer: str
    epoch: Count


# -- nodes: replicas among themselves -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Postponement:
    answer: Answer
    #: With `answering`: the last bucket that this replica has published, stable or tentative.
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Postpone(Request[Postponement]):
    """`peer` corrects a path, or wants to, and asks this replica to keep answering meanwhile."""

    path: str
    peer: str
    #: Number of the correction, last stable bucket of the peer, and whether the correction has
    #: started or is done.
    correction: int
    position: int
    started: bool
    done: bool


@dataclass(frozen=True, slots=True)
class Results:
    """The retained part of an output stream."""

    stream: str
    schema: str
    time: str
    starts_at: int
    trimmed_upto: int
    #: May be above `Moving.bucket`: a replica that was restarted from its own disk recomputes
    #: buckets that it had already logged.
    complete_upto: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Moving:
    """State and results of a path after `bucket`, for a state transfer."""

    path: str
    bucket: int
    body: dict[str, Any]
    files: tuple[FileName, ...]
    results: tuple[Results, ...]


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of the state; `name` is relative to the state folder."""

    name: FileName
    size_bytes: Count
    digest: str


@dataclass(frozen=True, slots=True)
class OfferedState:
    """The reply of a replica to a peer that is being caught up (`core.catch_up`)."""

    answer: Literal["state", "waits", "began-empty", "not-ready"]
    #: With `state`: all paths, and each file of their state exactly once.
    paths: tuple[Moving, ...] = ()
    files: tuple[StateFile, ...] = ()
    #: With `waits` (this replica is being caught up as well): whether its own disk is enough to
    #: rebuild every path; None: not known yet.
    own: bool | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class GetState(Request[OfferedState]):
    """Get the state of all paths, to rebuild `newcomer`. The listed files are retained until
    `ReleaseState`, or until the lease expires without a renewal."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class RenewState(Request[Done]):
    """Renew the lease: the files of the state are still being fetched."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class ReleaseState(Request[Done]):
    """End the lease: the files of the state were fetched, or are no longer wanted."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class Digests:
    #: By stream: digests of its last buckets.
    windows: Mapping[str, Window]
    #: By stream: a bucket that differed and was recomputed, and the finding.
    found: Mapping[str, tuple[int, Finding]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GetDigests(Request[Digests]):
    """Get the digests of a replica's results, for comparison with its peers (`core.divergence`)."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GetNodeStatus(Request[NodeStatus]):
    """Get the status of a node, for users and the contract monitor."""


# -- the controller: hosts ask --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epoch:
    epoch: Count


@dataclass(frozen=True, slots=True)
class NextEpoch(Request[Epoch]):
    """Get an epoch for a new instance of a node or host process."""

    name: str
    at_least: Count = 0
    #: Identity of the query, code and libraries of a host process; None for a node.
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GetAssignment(Request[Assignment]):
    """Get the nodes that a host has to run."""

    host: str


@dataclass(frozen=True, slots=True)
class Instance:
    """A node that is up or being caught up, and its address."""

    node: str
    address: str
    epoch: Count
    #: Last bucket of the slowest path; None until every path has started.
    position: int | None = None
    #: By path: its last bucket; None until the path has started.
    positions: Mapping[str, int | None] = field(default_factory=dict)
    #: False: the node is being caught up and does not count as alive yet.
    up: bool = True
    #: Differences from the results of other replicas, as text for users.
    differs: tuple[str, ...] = ()
    #: By path with eventual checkpoints: the predicted time of a recovery.
    recovery_ms: Mapping[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Registration:
    #: False: the process was replaced; the other fields are empty then.
    current: bool
    refused: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()
    #: By output of this host: its consumers. Trimming starts after all of them have acknowledged.
    consumers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    statuses: Mapping[str, InstanceStatus] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Register(Request[Registration]):
    """The heartbeat of a host, with its nodes and the components that are not healthy."""

    host: str
    epoch: Count
    nodes: tuple[Instance, ...]
    unhealthy: Mapping[str, PartStatus] = field(default_factory=dict)


# -- the run: nodes and commands ask --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Location:
    #: None: the producer has not registered yet.
    address: str | None


@dataclass(frozen=True, slots=True)
class Locate(Request[Location]):
    """Get the address at which `consumer` reaches a source or node."""

    producer: str
    consumer: str | None = None
    #: True: also return an instance that is being caught up and cannot be read yet.
    catching_up: bool = False


@dataclass(frozen=True, slots=True)
class Producers:
    names: tuple[str, ...]
    #: False: the run has no such stream.
    known: bool = True
    #: All outputs of the run, for error messages.
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GetProducers(Request[Producers]):
    """Get the replicas that produce a stream; none: the run process itself serves the stream."""

    stream: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GetStatus(Request[RunStatus]):
    """Get the status of the run, for users."""


@dataclass(frozen=True, slots=True)
class Retired:
    from_bucket: int


@dataclass(frozen=True, slots=True)
class Retire(Request[Retired]):
    """Continue without a source permanently."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Hosts:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GetHosts(Request[Hosts]):
    """Get the names of all hosts; none if the run is a single process."""


@dataclass(frozen=True, slots=True)
class Restart(Request[Done]):
    """Restart a host gracefully. The reply does not wait until the host is back."""

    host: str


@dataclass(frozen=True, slots=True)
class Restarted:
    restarted: bool


@dataclass(frozen=True, slots=True)
class GetRestarted(Request[Restarted]):
    """Ask whether a host has caught up after a `Restart`."""

    host: str


# -- the table ------------------------------------------------------------------------------------


class Call(NamedTuple):
    name: str
    request: type[Request[Any]]
    reply: type


def _call(name: str, request: type[Request[R]], reply: type[R]) -> Call:
    """Lets mypy check the reply in the table against the reply type that the request names."""
    return Call(name, request, reply)


TABLE = (
    _call("ping", Ping, Done),
    _call("folder-mark", GetFolderMark, FolderMark),
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
#: `v` and `kind` are the envelope's (`transport/wire.py`), in the same JSON object as the message.
assert not any(f.name in ("v", "kind") for c in TABLE for t in c[1:] for f in fields(t))


def call_of(request: type[Request[Any]]) -> Call:
    assert request in _BY_REQUEST, f"{request.__name__} is not in the table of calls"
    return _BY_REQUEST[request]


def request_of(name: str, body: Any) -> Request[Any]:
    """Decode a request. An unknown name or a malformed body raises `InputError`, which the server
    returns to the caller."""
    if name not in _BY_NAME:
        names = ", ".join(_BY_NAME)
        raise InputError(f"expected one of the calls {names}, found {codec.shown(name)}")
    request: Request[Any] = codec.decode(
        _BY_NAME[name].request, body, InputError, f"request {name!r}"
    )
    return request


def reply_of(request: Request[R], body: Any, peer: str) -> R:
    """Decode the reply of `peer`. A malformed reply raises `TransportError`."""
    call = call_of(type(request))
    reply: R = codec.decode(call.reply, body, TransportError, f"reply of {peer} to {call.name!r}")
    return reply
