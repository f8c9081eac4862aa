"""The controller: who is who, in which epoch, and where. It holds no stream data.

Epochs must outlive the storage of those who carry them: a node that lost everything still has to be
newer than its former self, or its readers and writers could not tell it from a zombie. So they are
handed out here and kept in the controller's own log, from which it restarts. Nodes keep running and
reading without it; only starting one (and so making a lost one anew) waits until it is back.

Where hosts run several nodes it also says which: those of a host that is gone are given, for good,
to one that stands by.

An epoch counts once its instance has registered with it. A request for an epoch may be carried out
long after whoever asked has given up or died, and must not make a live instance look replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.errors import SetupError
from holdfast.log import Counter, Log
from holdfast.model.layout import Layout

#: Before anything.
_NEVER = -(2**62)


class Standing(NamedTuple):
    """What is known of the instances of a name."""

    #: Of the newest that registered.
    epoch: int
    #: Those up to this one are dead.
    dead: int

    @property
    def gone(self) -> bool:
        """The newest is dead, and has no successor yet."""
        return self.dead >= self.epoch > 0


def dead_of(standings: Mapping[str, Standing]) -> dict[str, int]:
    """Who is gone, and up to which epoch."""
    return {name: known.dead for name, known in standings.items() if known.gone}


class Controller:
    def __init__(
        self,
        log: Log,
        partners: Mapping[str, str] | None = None,
        at: int = 0,
        layout: Layout | None = None,
    ) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        #: The other one of each that is one of a pair (Flux section 2.2).
        self._partners = dict(partners or {})
        #: When each was heard of last; of whom nothing was heard, since when that would have been.
        self._heard: dict[str, int] = {}
        self._since = at
        self._judged: int | None = None
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
            self._heard[name] = at
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
        """Declare dead who has not been heard of for so long, and give their names. Only one of a
        pair, and only while the other one speaks: if nobody does, it is the controller that was
        cut off. The decision is durable before anybody acts on it."""
        found = []
        with self._lock:
            self._stood_still(at, silence_us)
            for name, partner in self._partners.items():
                epoch = self._log.counter(f"registered.{name}")
                silent = at - self._heard.get(name, self._since) > silence_us
                spoken = at - self._heard.get(partner, at - silence_us) < silence_us
                alive = self._log.counter(f"registered.{partner}") > self._log.counter(
                    f"dead.{partner}"
                )
                if epoch > self._log.counter(f"dead.{name}") and silent and spoken and alive:
                    self._log.append(Counter(f"dead.{name}", epoch))
                    found.append(name)
        return found

    def _stood_still(self, at: int, silence_us: int) -> None:
        """Time in which nobody judged does not count: nobody could be heard, either."""
        if self._judged is not None and at - self._judged > silence_us // 2:
            self._since = at
            self._heard = {n: heard if heard == _NEVER else at for n, heard in self._heard.items()}
        self._judged = at

    # -- hosts ------------------------------------------------------------------------------------

    def here(self, host: str, epoch: int, at: int) -> bool:
        """A host speaks; False for a process that was replaced."""
        return self.register(process_of(host), "", epoch, at)

    def ended(self, host: str) -> None:
        """Its process is known to have ended: there is no need to wait for its silence."""
        with self._lock:
            for name in (process_of(host), *self._assigned(host)):
                self._heard[name] = _NEVER

    def assigned(self, host: str) -> list[str]:
        """What a host is to run."""
        with self._lock:
            return self._assigned(host)

    def stand_in(self, at: int, silence_us: int) -> dict[str, str]:
        """Of hosts that are gone, the nodes whose partners can make them anew go to one that stands
        by, all of a host to the same; which is durable before it is told. Given back are the nodes
        and their new hosts."""
        moved: dict[str, str] = {}
        with self._lock:
            for host in self._hosts:
                mine = self._assigned(host)
                gone = [name for name in mine if name in self._partners and self._gone(name)]
                if not gone or self.speaks(host, at, silence_us):
                    continue
                free = [
                    other
                    for other in self._hosts
                    if not self._assigned(other) and self.speaks(other, at, silence_us)
                ]
                if free:
                    number = self._hosts.index(free[0]) + 1
                    self._log.append(*(Counter(f"host.{name}", number) for name in gone))
                    moved |= dict.fromkeys(gone, free[0])
        return moved

    def _assigned(self, host: str) -> list[str]:
        return [name for name in self._first if self._host(name) == host]

    def _host(self, name: str) -> str:
        number = self._log.counter(f"host.{name}")
        return self._hosts[number - 1] if number else self._first[name]

    def speaks(self, host: str, at: int, silence_us: int) -> bool:
        """It was heard of within that time."""
        return at - self._heard.get(process_of(host), _NEVER) < silence_us

    def _gone(self, name: str) -> bool:
        return Standing(*(self._log.counter(f"{of}.{name}") for of in ("registered", "dead"))).gone

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

    def standings(self) -> dict[str, Standing]:
        """Of all that are one of a pair: the same for everybody who asks, and never going back."""
        with self._lock:
            counter = self._log.counter
            return {
                name: Standing(counter(f"registered.{name}"), counter(f"dead.{name}"))
                for name in self._partners
            }


def process_of(host: str) -> str:
    return f"process.{host}"
