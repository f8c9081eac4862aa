"""Membership: which instances are alive, and which host runs which node (Flux sections 2.2, 3.2 and
5.4). Pure.

The controller receives every heartbeat and passes it to `handle`, which returns the decisions as
records. The controller makes the records durable, passes them to `apply`, and only then publishes
the decisions. A restarted controller applies the records of its log: an instance that was declared
dead stays dead, and a node that was moved stays on its new host. Only the times of the last
heartbeats start again.

All times are monotonic: stepping the wall clock neither declares a live instance dead nor keeps a
dead one alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import assert_never

from holdfast.core.failure_detector import FailureDetector
from holdfast.core.lag import Lag, Positions
from holdfast.frozen import dataclass


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """Status of the instances of one name, by epoch."""

    #: Epoch of the newest registered instance; 0: none has registered.
    epoch: int
    #: Instances up to this epoch are dead.
    dead: int
    #: Instances up to this epoch are released: producers retain nothing for their disks
    #: (`core.retention`).
    released: int = 0

    @property
    def gone(self) -> bool:
        """The newest instance is dead, and no successor has registered yet."""
        return self.dead >= self.epoch > 0

    @property
    def lives(self) -> bool:
        return self.epoch > self.dead


def dead_of(statuses: Mapping[str, InstanceStatus]) -> dict[str, int]:
    """The names whose newest instance is dead, each with the epoch up to which it is dead."""
    return {name: status.dead for name, status in statuses.items() if status.gone}


_PROCESS = "process."


def process_of(host: str) -> str:
    """The name under which the process of a host registers. The prefix separates the process from a
    node with the same name as the host."""
    return f"{_PROCESS}{host}"


def host_of(name: str) -> str | None:
    """The host whose process registers under this name; None for the name of a node."""
    return name.removeprefix(_PROCESS) if name.startswith(_PROCESS) else None


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An instance is alive. A replica of a pair also reports the positions of its paths."""

    at: int
    name: str
    epoch: int
    positions: Positions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostEnded:
    """The process of a host is known to have terminated, so there is no need to wait for `silence`
    to pass without a heartbeat."""

    host: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Periodic, with an interval much shorter than `silence_us`."""

    at: int


Event = Heartbeat | HostEnded | Tick

# -- records: durable before they are published ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Dead:
    """Instances of the name up to this epoch are dead."""

    name: str
    epoch: int
    #: For operators.
    why: str = "no heartbeat"


@dataclass(frozen=True, slots=True)
class Released:
    """Producers need not retain anything for the disks of instances up to this epoch."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A node was moved to another host, permanently."""

    node: str
    host: str


Record = Registered | Dead | Released | Placed


class Membership:
    """State machine of the controller. `peers` maps each replica of a pair to the other one;
    `layout` maps each host to its initial nodes, none for a standby."""

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
        """A replica that has been dead for `rejoin_us` is released. A replica that has made no
        progress for `stall_us` is evicted; None: no replica is evicted."""
        #: The peer of each replica of a pair (Flux section 2.2).
        self._peers = dict(peers)
        self._hosts = tuple(layout)
        self._host_of = {name: host for host, names in layout.items() for name in names}
        self.detector = FailureDetector(silence_us, at)
        self._rejoin_us = rejoin_us
        self._lag = None if stall_us is None else Lag(stall_us, silence_us)
        self._registered: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._released: dict[str, int] = {}
        #: Cache of `statuses()`; every applied record clears it.
        self._statuses: dict[str, InstanceStatus] = {}
        #: Reason of the last death of each name. The log does not record reasons: after a restart
        #: of the controller the reason only says that the death is older than the restart.
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
        self._statuses = {}
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
        statuses = self.statuses()
        lost_now = lost(self._peers, statuses, self.detector, at)
        dead = [Dead(name, statuses[name].epoch) for name in lost_now]
        dead += self._evict(statuses, lost_now, at)
        gone = {*dead_of(statuses), *(record.name for record in dead)}
        self.detector.found_dead(gone, at)
        moved = take_overs(self.runs(), self._peers, self.detector, at)
        return [
            *dead,
            *self._release(statuses, at),
            *(Placed(node, host) for node, host in moved.items()),
        ]

    def _evict(
        self, statuses: Mapping[str, InstanceStatus], lost_now: list[str], at: int
    ) -> list[Dead]:
        """Declare replicas dead that are alive but make no progress; never both of a pair."""
        if self._lag is None:
            return []
        gone = set(lost_now)
        evicted: list[Dead] = []
        for name, peer in self._peers.items():
            if gone & {name, peer} or not all(
                statuses[replica].lives and self.detector.speaks(replica, at)
                for replica in (name, peer)
            ):
                continue
            if (why := self._lag.stalled(name, peer)) is not None:
                gone.add(name)
                evicted.append(Dead(name, statuses[name].epoch, why))
        return evicted

    def _release(self, statuses: Mapping[str, InstanceStatus], at: int) -> list[Released]:
        """Release replicas that have been dead for `rejoin_us`, if the peer is alive and sends
        heartbeats: retention costs producers storage only while the peer makes progress."""
        return [
            Released(name, statuses[name].dead)
            for name, us in self.detector.dead_us(at).items()
            if us >= self._rejoin_us
            and statuses[name].released < statuses[name].dead
            and statuses[self._peers[name]].lives
            and self.detector.speaks(self._peers[name], at)
        ]

    # -- questions --------------------------------------------------------------------------------

    def refuses(self, name: str, epoch: int) -> bool:
        """Whether the instance was replaced or declared dead."""
        return epoch < self.epoch(name) or epoch <= self._dead.get(name, 0)

    def epoch(self, name: str) -> int:
        """Epoch of the newest registered instance; 0 before the first registration."""
        return self._registered.get(name, 0)

    def statuses(self) -> dict[str, InstanceStatus]:
        """Status of all replicas of pairs. All callers see the same values, and no epoch ever
        decreases."""
        self._statuses = self._statuses or {
            name: InstanceStatus(
                self.epoch(name), self._dead.get(name, 0), self._released.get(name, 0)
            )
            for name in self._peers
        }
        return dict(self._statuses)

    def runs(self) -> dict[str, list[str]]:
        """The current nodes of each host, in the order of the layout."""
        nodes_of: dict[str, list[str]] = {host: [] for host in self._hosts}
        for name, host in self._host_of.items():
            nodes_of[host].append(name)
        return nodes_of

    def assigned(self, host: str) -> list[str]:
        """The nodes that the host must run."""
        return [name for name, current in self._host_of.items() if current == host]


def lost(
    peers: Mapping[str, str],
    statuses: Mapping[str, InstanceStatus],
    detector: FailureDetector,
    at: int,
) -> list[str]:
    """Replicas that are now dead: no heartbeat for `silence`, while the peer is alive and sends
    heartbeats. Never both of a pair: when neither replica sends heartbeats, the controller itself
    may be cut off."""
    lost_names: list[str] = []
    for name, peer in peers.items():
        alive = statuses[peer].lives and peer not in lost_names
        if (
            statuses[name].lives
            and alive
            and detector.silent(name, at)
            and detector.speaks(peer, at)
        ):
            lost_names.append(name)
    return lost_names


def take_overs(
    runs: Mapping[str, Sequence[str]], peers: Mapping[str, str], detector: FailureDetector, at: int
) -> dict[str, str]:
    """The new host of each node that is dead together with its host. All such nodes of a host move
    to the same standby, which sends heartbeats and runs no nodes. So the two replicas of a pair
    never end up on one host. A host is lost when it has sent no heartbeat for `silence`. A
    controller that has just started counts `silence` from its own start, and moves no node earlier.

    The standby has no state: a node moves only if its peer has sent a heartbeat since the node was
    found dead. If the peer died at the same time, the disk of the lost host may be the only one
    with the state, and the node stays there. The heartbeats of all peers are awaited for at most
    `silence`, so that all nodes move together."""
    moved: dict[str, str] = {}
    free = [h for h, names in runs.items() if not names and detector.speaks(process_of(h), at)]
    dead_us = detector.dead_us(at)
    for host, names in runs.items():
        lost_here = [name for name in names if name in dead_us]
        ready = [name for name in lost_here if detector.outlived(name, peers[name])]
        if not ready or not free or not detector.silent(process_of(host), at):
            continue
        if ready == lost_here or min(dead_us[name] for name in lost_here) > detector.silence_us:
            moved |= dict.fromkeys(ready, free.pop(0))
    return moved
