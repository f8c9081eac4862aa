"""Answers, events and actions of `core.catch_up`, in which a replica of a pair is rebuilt from its
peer. `Lending` tracks what the peer retains during the transfer."""

from __future__ import annotations

from dataclasses import field

from holdfast.frozen import dataclass

#: Holds and pins for a replica are released when the replica has not renewed them for this long.
LEASE_US = 10_000_000
#: A replica renews its holds and pins this often.
RENEW_US = 3_000_000


# -- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """A producer retains everything that it has of a stream, from now on."""

    starts_at: int
    trimmed_upto: int

    @property
    def whole(self) -> bool:
        """Nothing of the stream was ever deleted: a replica can start empty."""
        return self.trimmed_upto < self.starts_at


@dataclass(frozen=True, slots=True)
class NotOpen:
    """The producer has not opened the stream yet, so the producer cannot grant the hold."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """The producer knows a newer instance of this replica."""

    why: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    why: str


HoldAnswer = Held | NotOpen | Replaced | Unreachable


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that the peer offers; `name` identifies it in requests."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class HasState:
    """The peer offers the state after `bucket`, and has pinned these files."""

    bucket: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """The peer is catching up itself. `own`: whether its own disk suffices; None: not known yet."""

    own: bool | None


@dataclass(frozen=True, slots=True)
class BeganEmpty:
    """The peer started without any state, and has not computed anything yet."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """The peer has state, or will have it, but cannot offer it now."""

    why: str


PeerAnswer = HasState | Waits | BeganEmpty | NotReady | Unreachable


@dataclass(frozen=True, slots=True)
class OwnPath:
    """What the replica's own disk has of a path."""

    inputs: tuple[str, ...]
    #: Bucket of the newest durable version, and the first input bucket that this version needs.
    version: tuple[int, int] | None = None


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    at: int


@dataclass(frozen=True, slots=True)
class HoldAnswered:
    at: int
    round: int
    stream: str
    producer: str
    answer: HoldAnswer


@dataclass(frozen=True, slots=True)
class PeerAnswered:
    at: int
    round: int
    answer: PeerAnswer


@dataclass(frozen=True, slots=True)
class Fetched:
    """A piece is on the disk of the replica, and verified."""

    at: int
    round: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a piece could not be fetched, or the state could not be installed."""

    why: str
    #: The peer no longer offers the piece: the list is out of date.
    gone: bool = False
    #: The replica's own disk is full.
    full: bool = False


@dataclass(frozen=True, slots=True)
class FetchFailed:
    at: int
    round: int
    piece: Piece
    failure: Failure


@dataclass(frozen=True, slots=True)
class Installed:
    at: int
    round: int


@dataclass(frozen=True, slots=True)
class InstallFailed:
    at: int
    round: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Tick:
    at: int


Event = (
    Begin | HoldAnswered | PeerAnswered | Fetched | FetchFailed | Installed | InstallFailed | Tick
)

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """Ask the producer to retain all it has of the stream; `HoldAnswered` follows."""

    round: int
    stream: str
    producer: str


@dataclass(frozen=True, slots=True)
class AskState:
    """Ask the peer for its state; `PeerAnswered` follows."""

    round: int
    peer: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """`Fetched` or `FetchFailed` follows."""

    round: int
    peer: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Renew:
    """Renew the lease on the files of the peer. No event follows."""

    peer: str


@dataclass(frozen=True, slots=True)
class Release:
    """End the lease on the files of the peer. No event follows."""

    peer: str


@dataclass(frozen=True, slots=True)
class Install:
    """Replace the log on the disk by the fetched files, atomically; `Installed` or `InstallFailed`
    follows."""

    round: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete all fetched files."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a `Tick` at this time."""

    at: int


@dataclass(frozen=True, slots=True)
class ComeUp:
    """The replica starts like any restarted node, from what is on its disk now."""

    #: Origin of the state: `peer`, `own`, or `empty`.
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Catch-up is impossible. `replaced`: a newer instance runs; otherwise the state of the pair is
    lost."""

    why: str
    replaced: bool = False


Action = Hold | AskState | Fetch | Renew | Release | Install | Discard | Wake | ComeUp | GiveUp


# -- the peer -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lending:
    """Leases of the replicas that are rebuilt from this one. The listed files stay until the
    replica releases them, or has not renewed its lease for `LEASE_US`."""

    #: End of the lease of each replica.
    _until: dict[str, int] = field(default_factory=dict)

    def lend(self, at: int, to: str) -> int:
        """Start a lease on the files listed now. Returns the time of the next call to `expired`."""
        self._until[to] = at + LEASE_US
        return self._until[to]

    def renew(self, at: int, to: str) -> bool:
        """False: the lease has already ended; the replica has to start a new round."""
        if to in self._until:
            self._until[to] = at + LEASE_US
        return to in self._until

    def end(self, to: str) -> None:
        self._until.pop(to, None)

    def expired(self, at: int) -> tuple[list[str], int | None]:
        """End the leases that are over. Returns their replicas, and when to call this again."""
        replicas = [to for to, until in self._until.items() if at >= until]
        for to in replicas:
            del self._until[to]
        return replicas, min(self._until.values(), default=None)
