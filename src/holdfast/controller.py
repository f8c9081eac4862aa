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

from holdfast.log import Counter, Log


class Controller:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}

    def next_epoch(self, name: str, at_least: int = 0) -> int:
        """An epoch for a new instance of `name`, greater than any before. Durable when returned."""
        with self._lock:
            epoch = max(self._log.counter(f"epoch.{name}") + 1, at_least)
            self._log.append(Counter(f"epoch.{name}", epoch))
            return epoch

    def register(self, name: str, address: str, epoch: int) -> bool:
        """Take note of where an instance listens; False for one that was replaced."""
        with self._lock:
            newest = self._log.counter(f"registered.{name}")
            if epoch < newest:
                return False
            if epoch > newest:
                self._log.append(Counter(f"registered.{name}", epoch))
            self._addresses[name] = address
            return True

    def address(self, name: str) -> str | None:
        with self._lock:
            return self._addresses.get(name)
