"""Who is alive, and which host runs which node (Flux sections 2.2, 3.2 and 5.4). Pure.

The controller is told of every heartbeat. What is decided here comes back as records: they are made
durable first, then given to `apply`, then anybody is told. A controller that restarts applies the
records of its log, so that nobody who was declared dead lives again and nobody moves back; only
who was heard of when begins anew.

All times are monotonic: a clock that is stepped neither kills anybody nor keeps the dead alive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import assert_never

from holdfast.core.failure_detector import FailureDetector
from holdfast.core.lag import Lag, Positions
from holdfast.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of the instances of a name."""

    #: Of the newest that registered.
    epoch: int
    #: Those up to this one are dead.
    dead: int
    #: Of those up to this one not even the disk is reckoned with any more (`core.retention`).
    released: int = 0

    @property
    def gone(self) -> bool:
        """The newest is dead, and has no successor yet."""
        return self.dead >= self.epoch > 0

    @property
    def lives(self) -> bool:
        return self.epoch > self.dead


def dead_of(standings: Mapping[str, Standing]) -> dict[str, int]:
    """Who is gone, and up to which epoch."""
    return {name: known.dead for name, known in standings.items() if known.gone}


_PROCESS = "process."


def process_of(host: str) -> str:
    """The name under which the process of a host has its epochs: a node may have the host's."""
    return f"{_PROCESS}{host}"


def host_of(name: str) -> str | None:
    """The host whose process that is; None for the name of a node."""
    return name.removeprefix(_PROCESS) if name.startswith(_PROCESS) else None


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An instance says that it lives, and one of a pair how far it is."""

    at: int
    name: str
    epoch: int
    positions: Positions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostEnded:
    """The process of a host is known to have ended: there is no need to wait for its silence."""

    host: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Given again and again, much more often than the silence that means death."""

    at: int


Event = Heartbeat | HostEnded | Tick

# -- records: durable before anybody is told ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Dead:
    """Instances of the name up to this epoch are dead."""

    name: str
    epoch: int
    #: For people.
    why: str = "no heartbeat"


@dataclass(frozen=True, slots=True)
class Released:
    """The disk of instances up to this epoch is not reckoned with any more."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A node was given to another host, for good."""

    node: str
    host: str


Record = Registered | Dead | Released | Placed


class Membership:
    """Of everybody who registers; `partners` are the pairs, `layout` the hosts with the nodes that
    each begins with."""

    def __init__(
        self,
        peers: Mapping[str, str],
        layout: Mapping[str, Sequence[str]],
        at: int,
        silence_us: int,
        *,
        rejoin_us: int = 0,
        stall_us: int | None = None,
    ) -> None:
        """A copy that was dead for `rejoin_us` is not reckoned with any more; one that has made no
        progress for `stall_us` is evicted, None: never."""
        #: The other one of each that is one of a pair (Flux section 2.2).
        self._peers = dict(peers)
        self._hosts = tuple(layout)
        self._host_of = {name: host for host, names in layout.items() for name in names}
        self.detector = FailureDetector(silence_us, at)
        self._rejoin_us = rejoin_us
        self._lag = None if stall_us is None else Lag(stall_us, silence_us)
        self._registered: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._released: dict[str, int] = {}
        #: Made when asked for; a record is new ground.
        self._standings: dict[str, Standing] = {}
        #: Of those that were declared dead while this controller ran.
        self.why_dead: dict[str, str] = {}

    # -- the machine ------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Record]:
        match event:
            case Heartbeat():
                return self._heartbeat(event)
            case HostEnded():
                for name in (process_of(event.host), *self.assigned(event.host)):
                    self.detector.ended(name)
                return []
            case Tick():
                return self._tick(event.at)
            case _:
                assert_never(event)

    def apply(self, record: Record) -> None:
        self._standings = {}
        match record:
            case Registered():
                self._registered[record.name] = record.epoch
            case Dead():
                self._dead[record.name] = record.epoch
                self.why_dead[record.name] = record.why
                if self._lag is not None:
                    self._lag.forget(record.name)
            case Released():
                self._released[record.name] = record.epoch
            case Placed():
                self._host_of[record.node] = record.host
            case _:
                assert_never(record)

    def _heartbeat(self, beat: Heartbeat) -> list[Record]:
        if self.refuses(beat.name, beat.epoch):
            return []
        self.detector.heard(beat.name, beat.at)
        if self._lag is not None and beat.name in self._peers:
            peer = self._peers[beat.name]
            self._lag.heard(beat.name, peer, beat.epoch, beat.positions, beat.at)
        newer = beat.epoch > self.epoch(beat.name)
        return [Registered(beat.name, beat.epoch)] if newer else []

    def _tick(self, at: int) -> list[Record]:
        self.detector.tick(at)
        known = self.standings()
        lost_now = lost(self._peers, known, self.detector, at)
        dead = [Dead(name, known[name].epoch) for name in lost_now]
        dead += self._evict(known, lost_now, at)
        gone = {*dead_of(known), *(record.name for record in dead)}
        moved = stand_ins(self.runs(), gone, self.detector, at)
        return [
            *dead,
            *self._release(known, at),
            *(Placed(node, host) for node, host in moved.items()),
        ]

    def _evict(self, known: Mapping[str, Standing], lost_now: list[str], at: int) -> list[Dead]:
        """Copies that are alive but make no progress; never both of a pair."""
        if self._lag is None:
            return []
        gone = set(lost_now)
        found: list[Dead] = []
        for name, peer in self._peers.items():
            if gone & {name, peer} or not all(
                known[one].lives and self.detector.speaks(one, at) for one in (name, peer)
            ):
                continue
            if (why := self._lag.stalled(name, peer)) is not None:
                gone.add(name)
                found.append(Dead(name, known[name].epoch, why))
        return found

    def _release(self, known: Mapping[str, Standing], at: int) -> list[Released]:
        """Dead for so long, while the partner lives and speaks: only then does keeping cost."""
        dead_us = self.detector.dead_us(dead_of(known), at)
        return [
            Released(name, known[name].dead)
            for name, us in dead_us.items()
            if us >= self._rejoin_us
            and known[name].released < known[name].dead
            and known[self._peers[name]].lives
            and self.detector.speaks(self._peers[name], at)
        ]

    # -- questions --------------------------------------------------------------------------------

    def refuses(self, name: str, epoch: int) -> bool:
        """An instance that was replaced, or declared dead."""
        return epoch < self.epoch(name) or epoch <= self._dead.get(name, 0)

    def epoch(self, name: str) -> int:
        """Of the newest instance that registered; 0 before any has."""
        return self._registered.get(name, 0)

    def standings(self) -> dict[str, Standing]:
        """Of all that are one of a pair: the same for everybody who asks, and never going back."""
        self._standings = self._standings or {
            name: Standing(self.epoch(name), self._dead.get(name, 0), self._released.get(name, 0))
            for name in self._peers
        }
        return dict(self._standings)

    def runs(self) -> dict[str, list[str]]:
        """The nodes of each host now, in the order of the layout."""
        found: dict[str, list[str]] = {host: [] for host in self._hosts}
        for name, host in self._host_of.items():
            found[host].append(name)
        return found

    def assigned(self, host: str) -> list[str]:
        """What a host is to run."""
        return [name for name, where in self._host_of.items() if where == host]


def lost(
    peers: Mapping[str, str],
    standings: Mapping[str, Standing],
    detector: FailureDetector,
    at: int,
) -> list[str]:
    """Who is dead now: has not been heard of for so long, while its partner lives and speaks. If
    nobody does, it is the listener that was cut off; so never both of a pair."""
    found: list[str] = []
    for name, peer in peers.items():
        alive = standings[peer].lives and peer not in found
        if (
            standings[name].lives
            and alive
            and detector.silent(name, at)
            and detector.speaks(peer, at)
        ):
            found.append(name)
    return found


def stand_ins(
    runs: Mapping[str, Sequence[str]], gone: Collection[str], detector: FailureDetector, at: int
) -> dict[str, str]:
    """Where nodes go that are `gone` with their host: all of a host to the same one, which speaks
    and runs nothing, so that copies cannot meet there. A host is gone when it has been silent for
    so long: a controller that has just started has heard of nobody, and takes nothing away."""
    moved: dict[str, str] = {}
    free = [h for h, names in runs.items() if not names and detector.speaks(process_of(h), at)]
    for host, names in runs.items():
        lost_here = [name for name in names if name in gone]
        if lost_here and free and detector.silent(process_of(host), at):
            moved |= dict.fromkeys(lost_here, free.pop(0))
    return moved
