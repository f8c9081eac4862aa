"""Catch-up of one replica of a pair (Flux sections 3.3 and 5.3). The replica starts from the state
of its peer or from its own disk, or gives up with the reason. Pure: events in, actions out.

A replica that returns goes through rounds of

    HOLDING     every producer is asked to retain what the replica may need (5.3.2: `reset`)
    ASKING      the peer is asked for its state (3.3.1: `getState`)
    FETCHING    the files that the peer listed are fetched one by one, each verified
    INSTALLING  the files become a new log beside the one on the disk, which then replaces it
    WAITING     no state was available, or a step failed: another round follows

until the phase is OVER: `ComeUp`, or `GiveUp`. The log on the replica's own disk stays untouched
until the new log is complete. If the peer is lost during the transfer, the replica still has the
old log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import assert_never

from holdfast.core.catch_up_events import (
    RENEW_US,
    Action,
    AskState,
    BeganEmpty,
    Begin,
    ComeUp,
    Discard,
    Event,
    Failure,
    Fetch,
    Fetched,
    FetchFailed,
    GiveUp,
    HasState,
    Held,
    Hold,
    HoldAnswer,
    HoldAnswered,
    Install,
    Installed,
    InstallFailed,
    NotReady,
    OwnPath,
    PeerAnswer,
    PeerAnswered,
    Piece,
    Release,
    Renew,
    Replaced,
    Tick,
    Unreachable,
    Waits,
    Wake,
)
from holdfast.core.wake_ups import Alarm
from holdfast.errors import ProtocolViolation

#: Pause between two rounds, and before a piece is fetched again.
RETRY_US = 500_000
#: Upper bound of the pause after a failed transfer, which doubles each time. The bound is longer
#: than a lease: the holds of a replica that fails repeatedly, say on a full disk, expire, and the
#: storage of the producers does not grow without bound.
PAUSE_US_MAX = 32_000_000
#: After this many rounds without state in a row, a replica whose peer is not ready or unreachable
#: starts from its own disk.
REFUSALS = 4
#: Attempts to fetch a piece before a new round asks the peer again.
PIECE_TRIES = 3
#: The state counts as lost when none was available anywhere for this long.
LOST_US = 120_000_000


class Phase(StrEnum):
    HOLDING = "holding"
    ASKING = "asking"
    FETCHING = "fetching"
    INSTALLING = "installing"
    WAITING = "waiting"
    OVER = "over"


#: The legal transitions.
_MOVES: Mapping[Phase, tuple[Phase, ...]] = {
    Phase.HOLDING: (Phase.ASKING, Phase.WAITING, Phase.OVER),
    Phase.ASKING: (Phase.FETCHING, Phase.INSTALLING, Phase.WAITING, Phase.OVER),
    Phase.FETCHING: (Phase.INSTALLING, Phase.WAITING, Phase.OVER),
    Phase.INSTALLING: (Phase.WAITING, Phase.OVER),
    Phase.WAITING: (Phase.HOLDING,),
    Phase.OVER: (),
}


class CatchUp:
    """State machine of one replica. Every answer carries the number of the round in which it was
    requested; answers of an earlier round are ignored."""

    def __init__(
        self,
        name: str,
        peers: Sequence[str],
        producers: Mapping[str, Sequence[str]],
        own: Mapping[str, OwnPath],
    ) -> None:
        self.name, self._peers = name, tuple(peers)
        #: The producers of each input.
        self._producers = {stream: tuple(names) for stream, names in producers.items()}
        self._own = dict(own)
        self.phase = Phase.WAITING
        self.round = 0
        #: What the replica waits for, for operators.
        self.trouble: str | None = None
        self._holds: dict[tuple[str, str], HoldAnswer] = {}
        #: The last answer of each peer.
        self._said: dict[str, PeerAnswer] = {}
        #: Rounds in a row in which the peer gave no state, and the time of the first.
        self._refusals = 0
        self._stuck_since: int | None = None
        self._pieces: list[Piece] = []
        self._tries = 0
        #: Number of failed transfers.
        self._failures = 0
        #: Due times of the next round, of another attempt at a piece, and of the lease renewal.
        self._round_at: int | None = None
        self._retry_at: int | None = None
        self._renew_at: int | None = None
        self._alarm = Alarm()
        self._story: list[str] = []

    @property
    def own_suffices(self) -> bool | None:
        """Whether the replica's own disk, with what the producers retain, can rebuild every path.
        None: a producer whose answer could decide this has not answered."""
        return _all(self._path_suffices(path) for path in self._own.values())

    def as_peer(self) -> Waits:
        """The answer to a peer that asks this replica for its state during the catch-up."""
        return Waits(self.own_suffices)

    def handle(self, event: Event) -> list[Action]:
        self._story = [*self._story[-19:], f"{self.phase} {event}"]
        if self.phase is Phase.OVER:
            return []
        return [*self._handle(event), *self._wake(event.at)]

    def _handle(self, event: Event) -> list[Action]:
        match event:
            case Begin():
                self._round_at = event.at
                return self._tick(event.at)
            case Tick():
                self._alarm.rang()
                return self._tick(event.at)
            case HoldAnswered():
                return self._hold_answered(event)
            case PeerAnswered():
                current = self._current(event.round, Phase.ASKING)
                return self._peer_answered(event.at, event.answer) if current else []
            case Fetched():
                current = self._fetching(event.round, event.piece)
                return self._fetched(event.at) if current else []
            case FetchFailed():
                current = self._fetching(event.round, event.piece)
                return self._fetch_failed(event.at, event.failure) if current else []
            case Installed():
                if not self._current(event.round, Phase.INSTALLING):
                    return []
                return self._come_up("peer", f"installed the state of {self._peer}")
            case InstallFailed():
                current = self._current(event.round, Phase.INSTALLING)
                return self._start_over(event.at, event.failure) if current else []
            case _:
                assert_never(event)

    # -- rounds -----------------------------------------------------------------------------------

    def _tick(self, at: int) -> list[Action]:
        if self.phase is Phase.WAITING and self._round_at is not None and at >= self._round_at:
            self._move(Phase.HOLDING)
            self.round += 1
            self._holds = {}
            return self._hold_all()
        actions: list[Action] = []
        if self._retry_at is not None and at >= self._retry_at:
            self._retry_at = None
            actions.append(Fetch(self.round, self._peer, self._pieces[0]))
        if self._renew_at is not None and at >= self._renew_at:
            self._renew_at = at + RENEW_US
            pinned: list[Action] = [Renew(self._peer)] if self.phase is Phase.FETCHING else []
            actions += [*self._hold_all(), *pinned]
        return actions

    def _hold_all(self) -> list[Action]:
        return [
            Hold(self.round, stream, producer)
            for stream, names in self._producers.items()
            for producer in names
        ]

    def _hold_answered(self, event: HoldAnswered) -> list[Action]:
        if event.round != self.round:
            return []
        if isinstance(event.answer, Replaced):
            return self._give_up(event.answer.why, replaced=True)
        if self.phase is not Phase.HOLDING:
            return []  # the answer to a renewal: the hold was already granted in this round
        self._holds[event.stream, event.producer] = event.answer
        if len(self._holds) < sum(map(len, self._producers.values())):
            return []
        unheld = [stream for stream in self._producers if not self._held(stream)]
        if unheld:
            names = ", ".join(dict.fromkeys(m for s in unheld for m in self._producers[s]))
            return self._wait(
                event.at, f"no producer retains {unheld[0]} for the replica yet ({names})"
            )
        self._move(Phase.ASKING)
        return [AskState(self.round, self._peer)]

    def _peer_answered(self, at: int, answer: PeerAnswer) -> list[Action]:
        self._said[self._peer] = answer
        own = self.own_suffices
        match answer:
            case HasState():
                self._refusals, self._stuck_since = 0, None
                self._pieces, self._tries = list(answer.pieces), 0
                self._renew_at = at + RENEW_US
                if not self._pieces:
                    return self._install()
                self._move(Phase.FETCHING)
                return [Fetch(self.round, self._peer, self._pieces[0])]
            case Waits():
                why = f"{self._peer} is catching up itself"
                if own:
                    return self._start_unpaired(why)
                if own is False and all(self._said.get(p) == Waits(own=False) for p in self._peers):
                    return self._give_up(self._lost(why, at))
            case BeganEmpty():
                why = f"{self._peer} started without state"
                if own:
                    return self._start_unpaired(why)
            case NotReady() | Unreachable():
                why = answer.why
                if own and self._refusals + 1 >= REFUSALS:
                    return self._start_unpaired(why)
            case _:
                assert_never(answer)
        self._refusals += 1
        self._stuck_since = at if self._stuck_since is None else self._stuck_since
        if at - self._stuck_since > LOST_US:
            return self._give_up(self._lost(why, at))
        return self._wait(at, why)

    # -- fetching and installing ------------------------------------------------------------------

    def _fetched(self, at: int) -> list[Action]:
        self._pieces.pop(0)
        self._tries = 0
        if self._pieces:
            return [Fetch(self.round, self._peer, self._pieces[0])]
        return self._install()

    def _install(self) -> list[Action]:
        self._move(Phase.INSTALLING)
        return [Release(self._peer), Install(self.round)]

    def _fetch_failed(self, at: int, failure: Failure) -> list[Action]:
        self._tries += 1
        if failure.gone or failure.full or self._tries >= PIECE_TRIES:
            return self._start_over(at, failure)
        self.trouble, self._retry_at = failure.why, at + RETRY_US
        return []

    def _start_over(self, at: int, failure: Failure) -> list[Action]:
        """A failed transfer leaves nothing behind, neither files here nor pins at the peer."""
        release: list[Action] = [Release(self._peer)] if self.phase is Phase.FETCHING else []
        pause_us = min(RETRY_US << self._failures, PAUSE_US_MAX)
        self._failures += 1
        return [*release, Discard(), *self._wait(at, failure.why, pause_us)]

    # -- results ----------------------------------------------------------------------------------

    def _come_up(self, source: str, why: str) -> list[Action]:
        self._move(Phase.OVER)
        return [ComeUp(source, why)]

    def _start_unpaired(self, why: str) -> list[Action]:
        source = "own" if any(path.version for path in self._own.values()) else "empty"
        return self._come_up(source, why)

    def _give_up(self, why: str, *, replaced: bool = False) -> list[Action]:
        release: list[Action] = [Release(self._peer)] if self.phase is Phase.FETCHING else []
        self._move(Phase.OVER)
        return [*release, Discard(), GiveUp(why, replaced)]

    def _lost(self, why: str, at: int) -> str:
        waited_s = 0 if self._stuck_since is None else (at - self._stuck_since) / 1e6
        since = f" (waited {waited_s:.0f} s)" if waited_s >= 1 else ""
        return (
            f"node {self.name!r}: the state of the pair is lost: {why}{since}, and "
            f"{self._why_not_own()}. Restore the storage of {' or '.join(self._peers)}, or start "
            "the network from scratch with another --storage"
        )

    def _why_not_own(self) -> str:
        for name, path in self._own.items():
            if self._path_suffices(path):
                continue
            if path.version is None:
                return f"its own disk has no checkpoint of {name!r}"
            bucket, needs_from = path.version
            for stream in path.inputs:
                if self._keeps(stream, needs_from) is not True:
                    first = min(answer.trimmed_upto for answer in self._held(stream)) + 1
                    return (
                        f"the checkpoint on its own disk (bucket {bucket} of {name!r}) needs "
                        f"{stream!r} from bucket {needs_from} on, which is retained only from "
                        f"{first} on"
                    )
        return "its own disk was not tried"

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _peer(self) -> str:
        return self._peers[(self.round - 1) % len(self._peers)]

    def _held(self, stream: str) -> list[Held]:
        answers = (self._holds.get((stream, producer)) for producer in self._producers[stream])
        return [answer for answer in answers if isinstance(answer, Held)]

    def _path_suffices(self, path: OwnPath) -> bool | None:
        complete = _all(self._keeps(stream, None) for stream in path.inputs)
        if complete or path.version is None:
            return complete
        needs_from = path.version[1]
        retained = _all(self._keeps(stream, needs_from) for stream in path.inputs)
        return retained if retained is not False else complete

    def _keeps(self, stream: str, first: int | None) -> bool | None:
        """Whether a producer retains the stream from bucket `first` on (None: from its start).
        Returns None while this is not known."""
        held = self._held(stream)
        if any(
            answer.whole or (first is not None and answer.trimmed_upto < first) for answer in held
        ):
            return True
        return False if len(held) == len(self._producers[stream]) else None

    def _current(self, number: int, phase: Phase) -> bool:
        return number == self.round and self.phase is phase

    def _fetching(self, number: int, piece: Piece) -> bool:
        return self._current(number, Phase.FETCHING) and self._pieces[0] == piece

    def _wait(self, at: int, why: str, pause_us: int = RETRY_US) -> list[Action]:
        self._move(Phase.WAITING)
        self.trouble, self._round_at = why, at + pause_us
        self._retry_at = self._renew_at = None
        return []

    def _wake(self, at: int) -> list[Action]:
        next_round = self._round_at if self.phase is Phase.WAITING else None
        times = (next_round, self._retry_at, self._renew_at)
        due = min((time for time in times if time is not None and time > at), default=None)
        over = self.phase is Phase.OVER
        return [Wake(due)] if due is not None and not over and self._alarm.needs(at, due) else []

    def _move(self, to: Phase) -> None:
        if to not in _MOVES[self.phase]:
            story = "\n  ".join(self._story)
            raise ProtocolViolation(
                f"catch-up of {self.name}: illegal transition from {self.phase} to {to}; recent "
                f"events, oldest first:\n  {story}"
            )
        self.phase = to
        if to is not Phase.WAITING:
            self.trouble = None


def _all(answers: Iterable[bool | None]) -> bool | None:
    values = list(answers)
    return False if False in values else None if None in values else True
