"""Catching up a copy of a pair from the other one (`core.catch_up`): what others answer, the events
and the actions; and what the other one keeps meanwhile, `Lending`."""

from __future__ import annotations

from dataclasses import field

from holdfast.frozen import dataclass

#: What is held or pinned for a copy is let go when it was not heard of for so long ...
LEASE_US = 10_000_000
#: ... so it speaks up this often.
RENEW_US = 3_000_000


# -- what others answer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """A producer keeps everything it has of a stream from now on."""

    starts_at: int
    trimmed_upto: int

    @property
    def whole(self) -> bool:
        """Nothing of it was ever deleted: even an empty start would do."""
        return self.trimmed_upto < self.starts_at


@dataclass(frozen=True, slots=True)
class NotOpen:
    """The producer has not opened the stream yet, so it can promise nothing."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """The producer knows a newer instance of this copy."""

    why: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    why: str


HoldAnswer = Held | NotOpen | Replaced | Unreachable


@dataclass(frozen=True, slots=True)
class Piece:
    """A file the peer offers, by the name it is asked for."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class HasState:
    """The peer gives the state after `bucket`, and has pinned these files."""

    bucket: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """The peer is being caught up itself. `own`: whether its own disk would do; None: not known."""

    own: bool | None


@dataclass(frozen=True, slots=True)
class BeganEmpty:
    """The peer began without any state, and has not computed anything yet."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """The peer has state, or will have, but cannot give it now."""

    why: str


PeerAnswer = HasState | Waits | BeganEmpty | NotReady | Unreachable


@dataclass(frozen=True, slots=True)
class OwnPath:
    """What the copy's own disk has of a path."""

    inputs: tuple[str, ...]
    #: Bucket of its newest durable version, and the first bucket of the inputs which that needs.
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
    """A piece is on the disk of the copy, verified."""

    at: int
    round: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a piece did not come, or could not be installed."""

    why: str
    #: The peer does not offer it any more: the list is out of date.
    gone: bool = False
    #: The copy's own disk has no space.
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
    """Ask the producer to keep all it has of the stream; `HoldAnswered` follows."""

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
    """Tell the peer that its files are still being fetched. Nothing follows."""

    peer: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the peer that it need not keep the files any longer. Nothing follows."""

    peer: str


@dataclass(frozen=True, slots=True)
class Install:
    """Put what was fetched in the place of the log on the disk, all of it or nothing; `Installed`
    or `InstallFailed` follows."""

    round: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete what was fetched so far."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a Tick then."""

    at: int


@dataclass(frozen=True, slots=True)
class ComeUp:
    """The copy starts like any node that was restarted, with what is on its disk now."""

    #: `peer`, `own`, or `empty`.
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing helps. `replaced`: a newer instance runs; else the state of the pair is lost."""

    why: str
    replaced: bool = False


Action = Hold | AskState | Fetch | Renew | Release | Install | Discard | Wake | ComeUp | GiveUp


# -- the other side -------------------------------------------------------------------------------


@dataclass(slots=True)
class Lending:
    """What a copy keeps for others that are caught up from it: what it listed stays until it was
    fetched, or until nobody has asked for it for the time of a lease."""

    #: Until when, by who fetches.
    _until: dict[str, int] = field(default_factory=dict)

    def lend(self, at: int, to: str) -> int:
        """Pin what is listed now. Returns when to ask `expired` again."""
        self._until[to] = at + LEASE_US
        return self._until[to]

    def renew(self, at: int, to: str) -> bool:
        """False: it was let go already; whoever asks has to begin again."""
        if to in self._until:
            self._until[to] = at + LEASE_US
        return to in self._until

    def end(self, to: str) -> None:
        self._until.pop(to, None)

    def expired(self, at: int) -> tuple[list[str], int | None]:
        """Whose files are let go, and when to ask again."""
        gone = [to for to, until in self._until.items() if at >= until]
        for to in gone:
            del self._until[to]
        return gone, min(self._until.values(), default=None)
