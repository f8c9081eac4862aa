"""The controller: who is who, in which epoch, and where. It holds no stream data.

Epochs must outlive the storage of those who carry them: a node that lost everything still has to be
newer than its former self, or its readers and writers could not tell it from a zombie. So they are
handed out here and kept in the controller's own log, from which it restarts. Nodes keep running and
reading without it; only starting one (and so making a lost one anew) waits until it is back.

Who is dead, and which host runs what, `core.membership` decides; here its records are made durable
before anybody is told. A heartbeat that changes nothing waits for no disk.

An epoch counts once its instance has registered with it. A request for an epoch may be carried out
long after whoever asked has given up or died, and must not make a live instance look replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from holdfast.core.lag import Positions
from holdfast.core.membership import (
    Dead,
    Event,
    Heartbeat,
    HostEnded,
    Membership,
    Placed,
    Record,
    Registered,
    Released,
    Standing,
    Tick,
    process_of,
)
from holdfast.errors import IdentityMismatch, InputError, SetupError
from holdfast.model.identity import Identity, differences, listed
from holdfast.model.layout import Layout
from holdfast.storage import Counter, Log

#: One of a pair of which nothing was heard for so long is dead, unless the run says otherwise.
SILENCE_US = 2_000_000


class Controller:
    """Times are monotonic."""

    def __init__(
        self,
        log: Log,
        peers: Mapping[str, str] | None = None,
        at: int = 0,
        layout: Layout | None = None,
        identity: Identity | None = None,
        *,
        silence_us: int = SILENCE_US,
        rejoin_us: int = 0,
        stall_us: int | None = None,
    ) -> None:
        self._log = log
        #: Of the run; a host that differs is not let in. None: there are no hosts.
        self._identity = identity
        #: Why a host was refused, until a process of it is let in.
        self._refused: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        #: Instances that are being caught up, and so do not count yet: epoch and address.
        self._catching_up: dict[str, tuple[int, str]] = {}
        #: Held by whoever decides something durable, from the decision until it is on the disk.
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._hosts = tuple(layout or ())
        self._nodes = {name for names in (layout or {}).values() for name in names}
        self._members = Membership(
            peers or {}, layout or {}, at, silence_us, rejoin_us=rejoin_us, stall_us=stall_us
        )
        if layout:
            self._check_hosts(layout)
        for name, value in log.counters().items():
            if (record := self._record(name, value)) is not None:
                self._members.apply(record)

    def next_epoch(self, name: str, at_least: int = 0) -> int:
        """An epoch for a new instance of `name`, greater than any before. Durable when returned."""
        with self._writing:
            epoch = max(self._log.counter(f"epoch.{name}") + 1, at_least)
            self._log.append(Counter(f"epoch.{name}", epoch))
            return epoch

    def register(
        self, name: str, address: str, epoch: int, at: int = 0, positions: Positions | None = None
    ) -> bool:
        """A heartbeat: an instance lives, listens there, and is so far. False for one that was
        replaced, or declared dead."""
        self._handle(Heartbeat(at, name, epoch, positions or {}))
        with self._lock:
            if self._members.refuses(name, epoch):
                return False
            self._addresses[name] = address
            return True

    def announce(self, name: str, address: str, epoch: int) -> bool:
        """An instance that is being caught up listens there. It does not count as alive, but its
        peer may ask it what it has. False for one that was replaced."""
        with self._lock:
            if self._members.refuses(name, epoch):
                return False
            self._catching_up[name] = (epoch, address)
            return True

    def address(self, name: str, *, catching_up: bool = False) -> str | None:
        """Of the newest instance that registered; or of one that is being caught up."""
        with self._lock:
            epoch, newer = self._catching_up.get(name, (0, ""))
            if catching_up and epoch > self._members.epoch(name):
                return newer
            return self._addresses.get(name)

    def why_dead(self, name: str) -> str | None:
        with self._lock:
            return self._members.why_dead.get(name)

    def epoch(self, name: str) -> int:
        """Of the newest instance that registered; 0 before any has."""
        with self._lock:
            return self._members.epoch(name)

    def judge(self, at: int) -> tuple[list[str], dict[str, str]]:
        """Who is dead now, and which nodes of lost hosts go where; durable before anybody acts."""
        decided = self._handle(Tick(at))
        dead = [record.name for record in decided if isinstance(record, Dead)]
        moved = {r.node: r.host for r in decided if isinstance(r, Placed)}
        return dead, moved

    def standings(self) -> dict[str, Standing]:
        """Of all that are one of a pair."""
        with self._lock:
            return self._members.standings()

    # -- hosts ------------------------------------------------------------------------------------

    def admit(self, host: str, found: Identity | None) -> None:
        """Refuse a process that would compute something else: before it has an epoch, and so before
        anybody can read a row of it. The rest of the run goes on."""
        if self._identity is None:
            return
        if found is None:
            raise InputError(f"expected the identity of host {host!r}, found none")
        changed = differences(self._identity, found)
        with self._lock:
            self._refused.pop(host, None)
            if changed:
                self._refused[host] = (
                    f"host {host!r} is not what this run was started with{listed(changed, '; ')}. "
                    "Put back what changed. To change it, stop the run: another query needs "
                    "another storage (storage=, --storage), other libraries a start with "
                    "accept_versions=True (--accept-versions)"
                )
                raise IdentityMismatch(self._refused[host])

    def refused(self, host: str) -> str | None:
        with self._lock:
            return self._refused.get(host)

    def here(self, host: str, epoch: int, at: int) -> bool:
        """The heartbeat of a host; False for a process that was replaced."""
        return self.register(process_of(host), "", epoch, at)

    def speaks(self, host: str, at: int) -> bool:
        """The host was heard of lately."""
        with self._lock:
            return self._members.detector.speaks(process_of(host), at)

    def ended(self, host: str) -> None:
        """The process of a host is known to have ended."""
        self._handle(HostEnded(host))

    def check_known(self, host: str, nodes: Sequence[str] = ()) -> None:
        """Nothing is noted of hosts and nodes that are not of this run."""
        for kind, name, known in (
            ("host", host, self._hosts),
            *(("node", node, tuple(sorted(self._nodes))) for node in nodes),
        ):
            if name not in known:
                listed = ", ".join(known) or "none"
                raise InputError(f"expected a {kind} of this run ({listed}), found {name!r}")

    def assigned(self, host: str) -> list[str]:
        """What a host is to run."""
        with self._lock:
            return self._members.assigned(host)

    # -- inside -----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Record]:
        with self._lock:
            decided = self._members.handle(event)
        if not decided:
            return []
        with self._writing:
            with self._lock:  # somebody else may have written meanwhile
                decided = self._members.handle(event)
            self._log.append(*(self._counter(record) for record in decided))
            with self._lock:
                for record in decided:
                    self._members.apply(record)
        return decided

    def _counter(self, record: Record) -> Counter:
        match record:
            case Registered():
                return Counter(f"registered.{record.name}", record.epoch)
            case Dead():
                return Counter(f"dead.{record.name}", record.epoch)
            case Released():
                return Counter(f"released.{record.name}", record.epoch)
            case Placed():
                return Counter(f"host.{record.node}", self._hosts.index(record.host) + 1)

    def _record(self, counter: str, value: int) -> Record | None:
        kind, _, name = counter.partition(".")
        match kind:
            case "registered":
                return Registered(name, value)
            case "dead":
                return Dead(name, value, "before the controller was restarted")
            case "released":
                return Released(name, value)
            case "host" if name in self._nodes:
                return Placed(name, self._hosts[value - 1])
        return None

    def _check_hosts(self, layout: Layout) -> None:
        """What a node knows lies on the disk of its host, so hosts stay what they were."""
        counter = self._log.counter
        names = sorted(self._nodes)
        shared = len([host for host, runs in layout.items() if runs and runs != (host,)])
        if all(counter(f"registered.{name}") == 0 for name in names):
            if shared:
                self._log.append(Counter("hosts", shared))
        elif counter("hosts") != shared:
            raise SetupError(
                "this storage was made with another number of hosts; run with as many as before, "
                "or use another storage (storage=, --storage)"
            )
        for name in names:
            if counter(f"host.{name}") > len(self._hosts):
                raise SetupError(
                    f"node {name!r} was given to one of {counter(f'host.{name}')} hosts, and there "
                    f"are {len(self._hosts)} now; stand by with as many as before, or use another "
                    "storage (storage=, --storage)"
                )
