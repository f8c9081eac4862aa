"""The controller: who is who, in which epoch, and where. It holds no stream data.

Epochs must outlive the storage of those who carry them: a node that lost everything still has to be
newer than its former self, or its readers and writers could not tell it from a zombie. So they are
handed out here and kept in the controller's own log, from which it restarts. Nodes keep running and
reading without it; only starting one (and so making a lost one anew) waits until it is back.

Where hosts run several nodes it also says which: those of a host that is gone are given, for good,
to one that stands by. Who is gone, and who stands in, `core.membership` decides.

An epoch counts once its instance has registered with it. A request for an epoch may be carried out
long after whoever asked has given up or died, and must not make a live instance look replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from holdfast.core.membership import Hearing, Standing, dead_of, lost, stand_ins
from holdfast.errors import IdentityMismatch, InputError, SetupError
from holdfast.model.identity import Identity, differences, listed
from holdfast.model.layout import Layout
from holdfast.storage import Counter, Log


class Controller:
    def __init__(
        self,
        log: Log,
        partners: Mapping[str, str] | None = None,
        at: int = 0,
        layout: Layout | None = None,
        identity: Identity | None = None,
    ) -> None:
        self._log = log
        #: Of the run; a host that differs is not let in. None: there are no hosts.
        self._identity = identity
        #: Why a host was refused, until a process of it is let in.
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        #: The other one of each that is one of a pair (Flux section 2.2).
        self._partners = dict(partners or {})
        self._hearing = Hearing(at)
        self._hosts = tuple(layout or ())
        #: The first host of each node; where it was given to another one, that is in the log.
        self._first = {name: host for host, names in (layout or {}).items() for name in names}
        shared = [host for host, names in (layout or {}).items() if names and names != (host,)]
        if layout:
            self._check_hosts(len(shared))

    def next_epoch(self, name: str, at_least: int = 0) -> int:
        """An epoch for a new instance of `name`, greater than any before. Durable when returned."""
        with self._lock:
            epoch = max(self._log.counter(f"epoch.{name}") + 1, at_least)
            self._log.append(Counter(f"epoch.{name}", epoch))
            return epoch

    def register(self, name: str, address: str, epoch: int, at: int = 0) -> bool:
        """Take note of where an instance listens; False for one that was replaced, or declared
        dead."""
        with self._lock:
            newest = self._log.counter(f"registered.{name}")
            if epoch < newest or epoch <= self._log.counter(f"dead.{name}"):
                return False
            self._hearing.heard(name, at)
            if epoch > newest:
                self._log.append(Counter(f"registered.{name}", epoch))
            self._addresses[name] = address
            return True

    def address(self, name: str) -> str | None:
        with self._lock:
            return self._addresses.get(name)

    def epoch(self, name: str) -> int:
        """Of the newest instance that registered; 0 before any has."""
        with self._lock:
            return self._log.counter(f"registered.{name}")

    def judge(self, at: int, silence_us: int) -> list[str]:
        """Declare dead who is, and give their names. Durable before anybody acts on it."""
        with self._lock:
            self._hearing.listened(at, silence_us)
            known = self._standings()
            found = lost(self._partners, known, self._hearing, at, silence_us)
            if found:
                self._log.append(*(Counter(f"dead.{name}", known[name].epoch) for name in found))
            return found

    def standings(self) -> dict[str, Standing]:
        """Of all that are one of a pair: the same for everybody who asks, and never going back."""
        with self._lock:
            return self._standings()

    def _standings(self) -> dict[str, Standing]:
        counter = self._log.counter
        return {
            name: Standing(counter(f"registered.{name}"), counter(f"dead.{name}"))
            for name in self._partners
        }

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
                    "another --storage, other libraries a start with --accept-versions"
                )
                raise IdentityMismatch(self._refused[host])

    def refused(self, host: str) -> str | None:
        with self._lock:
            return self._refused.get(host)

    def here(self, host: str, epoch: int, at: int) -> bool:
        """A host speaks; False for a process that was replaced."""
        return self.register(process_of(host), "", epoch, at)

    def speaks(self, host: str, at: int, silence_us: int) -> bool:
        """It was heard of within that time."""
        with self._lock:
            return self._hearing.speaks(process_of(host), at, silence_us)

    def ended(self, host: str) -> None:
        """Its process is known to have ended: there is no need to wait for its silence."""
        with self._lock:
            for name in (process_of(host), *self._runs()[host]):
                self._hearing.ended(name)

    def check_known(self, host: str, nodes: Sequence[str] = ()) -> None:
        """Nothing is noted of hosts and nodes that are not of this run."""
        for kind, name, known in (
            ("host", host, self._hosts),
            *(("node", node, tuple(self._first)) for node in nodes),
        ):
            if name not in known:
                listed = ", ".join(known) or "none"
                raise InputError(f"expected a {kind} of this run ({listed}), found {name!r}")

    def assigned(self, host: str) -> list[str]:
        """What a host is to run."""
        with self._lock:
            return self._runs()[host]

    def stand_in(self, at: int, silence_us: int) -> dict[str, str]:
        """Give the nodes of hosts that are gone to those that stand by, durably; who goes where."""
        with self._lock:
            moved = stand_ins(
                self._runs(),
                dead_of(self._standings()),
                lambda host: self._hearing.speaks(process_of(host), at, silence_us),
            )
            if moved:
                numbers = {host: number for number, host in enumerate(self._hosts, 1)}
                records = [Counter(f"host.{name}", numbers[to]) for name, to in moved.items()]
                self._log.append(*records)
            return moved

    def _runs(self) -> dict[str, list[str]]:
        """The nodes of each host now."""
        found: dict[str, list[str]] = {host: [] for host in self._hosts}
        for name, first in self._first.items():
            number = self._log.counter(f"host.{name}")
            found[self._hosts[number - 1] if number else first].append(name)
        return found

    def _check_hosts(self, shared: int) -> None:
        """What a node knows lies on the disk of its host, so hosts stay what they were."""
        counter = self._log.counter
        if all(counter(f"registered.{name}") == 0 for name in self._first):
            if shared:
                self._log.append(Counter("hosts", shared))
        elif counter("hosts") != shared:
            raise SetupError(
                "this storage was made with another number of hosts; run with as many as before, "
                "or use another --storage"
            )
        for name in self._first:
            if counter(f"host.{name}") > len(self._hosts):
                raise SetupError(
                    f"node {name!r} was given to one of {counter(f'host.{name}')} hosts, and there "
                    f"are {len(self._hosts)} now; stand by with as many as before, or use another "
                    "--storage"
                )


_PROCESS = "process."


def process_of(host: str) -> str:
    return f"{_PROCESS}{host}"


def host_of(name: str) -> str | None:
    """The host whose process that is; None for the name of a node."""
    return name.removeprefix(_PROCESS) if name.startswith(_PROCESS) else None
