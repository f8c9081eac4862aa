"""The controller: who is who, in which epoch, and where. It holds no stream data.

Epochs must outlive the storage of those who carry them: a node that lost everything still has to be
newer than its former self, or its readers and writers could not tell it from a zombie. So they are
handed out here and kept in the controller's own log, from which it restarts. Nodes keep running and
reading without it; only starting one (and so taking over) waits until it is back.

An epoch counts once its instance has registered with it. A request for an epoch may be carried out
long after whoever asked has given up or died, and must not make a live instance look replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.log import Counter, Log


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
    def __init__(self, log: Log, partners: Mapping[str, str] | None = None, at: int = 0) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        #: The other one of each that is one of a pair (Flux section 2.2).
        self._partners = dict(partners or {})
        #: When each was heard of last; of whom nothing was heard, since when that would have been.
        self._heard: dict[str, int] = {}
        self._since = at

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

    def judge(self, at: int, silence_us: int) -> list[str]:
        """Declare dead who has not been heard of for so long, and give their names. Only one of a
        pair, and only while the other one speaks: if nobody does, it is the controller that was
        cut off. The decision is durable before anybody acts on it."""
        found = []
        with self._lock:
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

    def standings(self) -> dict[str, Standing]:
        """Of all that are one of a pair: the same for everybody who asks, and never going back."""
        with self._lock:
            counter = self._log.counter
            return {
                name: Standing(counter(f"registered.{name}"), counter(f"dead.{name}"))
                for name in self._partners
            }
