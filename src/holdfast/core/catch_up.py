"""Catch-up of one copy of a pair (Flux sections 3.3 and 5.3): from the state of its peer, from its
own disk, or not at all, with the reason. Pure: events in, actions out.

A copy that comes back goes through rounds of

    HOLDING     every producer is asked to keep what the copy may need (5.3.2: `reset`)
    ASKING      the peer is asked for its state (3.3.1: `getState`)
    FETCHING    the files that the peer listed come one by one, each verified
    INSTALLING  they become a log beside the one on the disk, and then replace it
    WAITING     nothing was to be had, or something failed: another round follows

until it is OVER: `ComeUp`, or `GiveUp`. The log on its own disk is touched by nothing before the
other one is complete: should the peer be lost in the middle, the copy still has that.
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

#: Between two rounds, and before a piece is tried again.
RETRY_US = 500_000
#: After a transfer that failed the pause doubles, up to this: longer than a lease, so that a copy
#: which fails again and again, say on a full disk, does not make producers keep more and more.
PAUSE_US_MAX = 32_000_000
#: So often the peer is asked in vain before the copy takes what is on its own disk.
REFUSALS = 4
#: So often a piece is tried before the peer is asked anew.
PIECE_TRIES = 3
#: If no state was to be had anywhere for so long, there is none.
LOST_US = 120_000_000


class Phase(StrEnum):
    HOLDING = "holding"
    ASKING = "asking"
    FETCHING = "fetching"
    INSTALLING = "installing"
    WAITING = "waiting"
    OVER = "over"


#: Which phase may follow which.
_MOVES: Mapping[Phase, tuple[Phase, ...]] = {
    Phase.HOLDING: (Phase.ASKING, Phase.WAITING, Phase.OVER),
    Phase.ASKING: (Phase.FETCHING, Phase.INSTALLING, Phase.WAITING, Phase.OVER),
    Phase.FETCHING: (Phase.INSTALLING, Phase.WAITING, Phase.OVER),
    Phase.INSTALLING: (Phase.WAITING, Phase.OVER),
    Phase.WAITING: (Phase.HOLDING,),
    Phase.OVER: (),
}


class CatchUp:
    """Of one copy; every answer carries the number of the round in which it was asked for, and one
    that comes too late is not heard."""

    def __init__(
        self,
        name: str,
        peers: Sequence[str],
        producers: Mapping[str, Sequence[str]],
        own: Mapping[str, OwnPath],
    ) -> None:
        self.name, self._peers = name, tuple(peers)
        #: Who makes each input.
        self._producers = {stream: tuple(names) for stream, names in producers.items()}
        self._own = dict(own)
        self.phase = Phase.WAITING
        self.round = 0
        #: What the copy waits for, for people.
        self.trouble: str | None = None
        self._holds: dict[tuple[str, str], HoldAnswer] = {}
        #: Of each peer, what it answered last.
        self._said: dict[str, PeerAnswer] = {}
        #: Rounds in which no state was to be had, and since when.
        self._refusals = 0
        self._stuck_since: int | None = None
        self._pieces: list[Piece] = []
        self._tries = 0
        #: Transfers that failed.
        self._failures = 0
        #: What is due when: the next round, a piece again, speaking up.
        self._round_at: int | None = None
        self._retry_at: int | None = None
        self._renew_at: int | None = None
        self._alarm = Alarm()
        self._story: list[str] = []

    @property
    def own_suffices(self) -> bool | None:
        """Whether the copy's own disk, with what the producers keep, can rebuild every path. None
        while a producer that could make the difference has not answered."""
        return _all(self._path_suffices(path) for path in self._own.values())

    def as_peer(self) -> Waits:
        """What another copy is told that asks this one for its state."""
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
                heard = self._current(event.round, Phase.ASKING)
                return self._peer_answered(event.at, event.answer) if heard else []
            case Fetched():
                heard = self._fetching(event.round, event.piece)
                return self._fetched(event.at) if heard else []
            case FetchFailed():
                heard = self._fetching(event.round, event.piece)
                return self._fetch_failed(event.at, event.failure) if heard else []
            case Installed():
                if not self._current(event.round, Phase.INSTALLING):
                    return []
                return self._come_up("peer", f"it has the state of {self._peer}")
            case InstallFailed():
                heard = self._current(event.round, Phase.INSTALLING)
                return self._start_over(event.at, event.failure) if heard else []
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
            return []  # it was asked to go on holding, no more
        self._holds[event.stream, event.producer] = event.answer
        if len(self._holds) < sum(map(len, self._producers.values())):
            return []
        unheld = [stream for stream in self._producers if not self._held(stream)]
        if unheld:
            names = ", ".join(dict.fromkeys(m for s in unheld for m in self._producers[s]))
            return self._wait(event.at, f"no producer of {unheld[0]} holds it yet ({names})")
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
                why = f"{self._peer} waits for state itself"
                if own:
                    return self._start_unpaired(why)
                if own is False and all(self._said.get(p) == Waits(own=False) for p in self._peers):
                    return self._give_up(self._lost(why, at))
            case BeganEmpty():
                why = f"{self._peer} began without state"
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
        """Nothing of a transfer that failed is kept, here or there."""
        release: list[Action] = [Release(self._peer)] if self.phase is Phase.FETCHING else []
        pause_us = min(RETRY_US << self._failures, PAUSE_US_MAX)
        self._failures += 1
        return [*release, Discard(), *self._wait(at, failure.why, pause_us)]

    # -- how it ends ------------------------------------------------------------------------------

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
        since = f" for {waited_s:.0f} s" if waited_s >= 1 else ""
        return (
            f"node {self.name!r}: the state of the pair is lost: {why}{since}, and "
            f"{self._why_not_own()}. Bring back the storage of {' or '.join(self._peers)}, or "
            "start the network afresh with another --storage"
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
                    first = min(held.trimmed_upto for held in self._held(stream)) + 1
                    return (
                        f"the checkpoint on its own disk (bucket {bucket} of {name!r}) needs "
                        f"{stream!r} from bucket {needs_from} on, which is kept from {first} on"
                    )
        return "its own disk was not tried"

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _peer(self) -> str:
        return self._peers[(self.round - 1) % len(self._peers)]

    def _held(self, stream: str) -> list[Held]:
        found = (self._holds.get((stream, producer)) for producer in self._producers[stream])
        return [answer for answer in found if isinstance(answer, Held)]

    def _path_suffices(self, path: OwnPath) -> bool | None:
        whole = _all(self._keeps(stream, None) for stream in path.inputs)
        if whole or path.version is None:
            return whole
        needs_from = path.version[1]
        kept = _all(self._keeps(stream, needs_from) for stream in path.inputs)
        return kept if kept is not False else whole

    def _keeps(self, stream: str, first: int | None) -> bool | None:
        """Whether a producer has the stream from that bucket on; None: since the start."""
        held = self._held(stream)
        if any(it.whole or (first is not None and it.trimmed_upto < first) for it in held):
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
                f"catch-up of {self.name}: {self.phase} to {to}; before:\n  {story}"
            )
        self.phase = to
        if to is not Phase.WAITING:
            self.trouble = None


def _all(known: Iterable[bool | None]) -> bool | None:
    found = list(known)
    return False if False in found else None if None in found else True
