"""The controller assigns epochs, knows the addresses of instances, and places nodes on hosts. It
holds no stream data.

Epochs must survive the loss of a node's storage: an empty node still needs a newer epoch than its
previous instance, or producers and consumers could not tell it from a zombie. The controller
therefore assigns epochs and stores them in its own log, from which it restarts. Running nodes
continue to read and compute without the controller. Only the start of a node, and so the rebuild of
a lost node, waits until the controller is available.

`core.membership` decides which instances are dead and which host runs which node. The controller
makes these records durable before it reports them. A heartbeat that changes nothing causes no
write.

An epoch becomes valid when its instance registers with it. A request for an epoch may be carried
out long after the requester has given up or died, and must not make a live instance look replaced.
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
    InstanceStatus,
    Membership,
    Placed,
    Record,
    Registered,
    Released,
    Tick,
    process_of,
)
from holdfast.errors import IdentityMismatch, InputError, SetupError
from holdfast.model.identity import Identity, differences, listed
from holdfast.model.layout import Layout
from holdfast.storage import Counter, Log

#: Default for `silence_us`: a replica of a pair without a heartbeat for this long is dead.
SILENCE_US = 2_000_000


class Controller:
    """Durable membership of a run. All times are monotonic, in microseconds."""

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
        #: Identity of the run; a host with another identity is refused. None: no hosts exist.
        self._identity = identity
        #: Why a host was refused, until a process of this host is admitted.
        self._refused: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        #: Instances that are catching up and are not registered yet: epoch and address.
        self._catching_up: dict[str, tuple[int, str]] = {}
        #: Held from a durable decision until its record is on disk.
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
        """An epoch for a new instance of `name`, greater than all previous epochs. The epoch is
        durable when this method returns."""
        with self._writing:
            epoch = max(self._log.counter(f"epoch.{name}") + 1, at_least)
            self._log.append(Counter(f"epoch.{name}", epoch))
            return epoch

    def register(
        self, name: str, address: str, epoch: int, at: int = 0, positions: Positions | None = None
    ) -> bool:
        """Record a heartbeat with the address and positions of an instance. False for an instance
        that was replaced or declared dead."""
        self._handle(Heartbeat(at, name, epoch, positions or {}))
        with self._lock:
            if self._members.refuses(name, epoch):
                return False
            self._addresses[name] = address
            return True

    def announce(self, name: str, address: str, epoch: int) -> bool:
        """Record the address of an instance that is catching up. The instance does not count as
        alive, but its peer may ask for its state. False for an instance that was replaced or
        declared dead."""
        with self._lock:
            if self._members.refuses(name, epoch):
                return False
            self._catching_up[name] = (epoch, address)
            return True

    def address(self, name: str, *, catching_up: bool = False) -> str | None:
        """Address of the newest registered instance. With `catching_up`, a newer instance that is
        catching up takes precedence."""
        with self._lock:
            epoch, newer = self._catching_up.get(name, (0, ""))
            if catching_up and epoch > self._members.epoch(name):
                return newer
            return self._addresses.get(name)

    def why_dead(self, name: str) -> str | None:
        with self._lock:
            return self._members.why_dead.get(name)

    def epoch(self, name: str) -> int:
        """Epoch of the newest registered instance; 0 before the first registration."""
        with self._lock:
            return self._members.epoch(name)

    def judge(self, at: int) -> tuple[list[str], dict[str, str]]:
        """Newly dead nodes, and the new hosts of the nodes of lost hosts. The decisions are durable
        when this method returns."""
        records = self._handle(Tick(at))
        dead = [record.name for record in records if isinstance(record, Dead)]
        moved = {r.node: r.host for r in records if isinstance(r, Placed)}
        return dead, moved

    def statuses(self) -> dict[str, InstanceStatus]:
        """Status of all replicas of pairs."""
        with self._lock:
            return self._members.statuses()

    # -- hosts ------------------------------------------------------------------------------------

    def admit(self, host: str, found: Identity | None) -> None:
        """Refuse a process with another query, code or libraries. The check precedes the epoch, so
        no consumer can read a row of a refused process. The other hosts continue."""
        if self._identity is None:
            return
        if found is None:
            raise InputError(f"expected the identity of host {host!r}, found none")
        changed = differences(self._identity, found)
        with self._lock:
            self._refused.pop(host, None)
            if changed:
                self._refused[host] = (
                    f"host {host!r} differs from what this run was started with"
                    f"{listed(changed, '; ')}. Undo the change. To keep the change, stop the run "
                    "and start it again: a changed query with another storage (storage=, "
                    "--storage), changed libraries with accept_versions=True (--accept-versions)"
                )
                raise IdentityMismatch(self._refused[host])

    def refused(self, host: str) -> str | None:
        with self._lock:
            return self._refused.get(host)

    def here(self, host: str, epoch: int, at: int) -> bool:
        """Record the heartbeat of a host; False for a process that was replaced."""
        return self.register(process_of(host), "", epoch, at)

    def speaks(self, host: str, at: int) -> bool:
        """Whether the last heartbeat of the host is recent."""
        with self._lock:
            return self._members.detector.speaks(process_of(host), at)

    def ended(self, host: str) -> None:
        """Record that the process of a host has exited."""
        self._handle(HostEnded(host))

    def check_known(self, host: str, nodes: Sequence[str] = ()) -> None:
        """Raise `InputError` for a host or node that does not belong to this run."""
        for kind, name, known in (
            ("host", host, self._hosts),
            *(("node", node, tuple(sorted(self._nodes))) for node in nodes),
        ):
            if name not in known:
                names = ", ".join(known) or "none"
                raise InputError(f"expected a {kind} of this run ({names}), found {name!r}")

    def assigned(self, host: str) -> list[str]:
        """The nodes that a host must run."""
        with self._lock:
            return self._members.assigned(host)

    # -- inside -----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Record]:
        with self._lock:
            records = self._members.handle(event)
        if not records:
            return []
        with self._writing:
            with self._lock:  # another thread may have written meanwhile
                records = self._members.handle(event)
            self._log.append(*(self._counter(record) for record in records))
            with self._lock:
                for record in records:
                    self._members.apply(record)
        return records

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
        """Refuse another number of hosts: the state of a node is on the disk of its host."""
        counter = self._log.counter
        names = sorted(self._nodes)
        shared = len([host for host, runs in layout.items() if runs and runs != (host,)])
        if all(counter(f"registered.{name}") == 0 for name in names):
            if shared:
                self._log.append(Counter("hosts", shared))
        elif counter("hosts") != shared:
            raise SetupError(
                f"hosts: expected {_shared(counter('hosts'))} as at the first start on this "
                f"storage, found {_shared(shared)}; run with the same hosts= (--hosts), or use "
                "another storage (storage=, --storage)"
            )
        for name in names:
            if counter(f"host.{name}") > len(self._hosts):
                raise SetupError(
                    f"node {name!r} was placed on host number {counter(f'host.{name}')}, but there "
                    f"are only {len(self._hosts)} hosts now; run with as many standby hosts as "
                    "before (standby=, --standby), or use another storage (storage=, --storage)"
                )


def _shared(hosts: int) -> str:
    """The number of hosts that share the nodes; 0: none do."""
    return f"{hosts} hosts" if hosts else "one host per node"
