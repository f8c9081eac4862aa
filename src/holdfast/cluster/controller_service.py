"""The controller among the others: what hosts ask it, and the loop in which it judges who is gone.
It lives in the process of the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import suppress

from holdfast.clock import now_us
from holdfast.cluster.controller import Controller, host_of, process_of
from holdfast.core.membership import dead_of
from holdfast.errors import StorageFull, TransportError
from holdfast.streams.calls import (
    Assignment,
    Epoch,
    GetAssignment,
    Instance,
    NextEpoch,
    Register,
    Registration,
)
from holdfast.streams.serving import Service

_log = logging.getLogger("holdfast.controller")


class Presiding:
    def __init__(self, controller: Controller, service: Service, outputs: Collection[str]) -> None:
        self._controller, self._service, self._outputs = controller, service, outputs
        service.handle(NextEpoch, self._next_epoch)
        service.handle(GetAssignment, self._assignment)
        service.handle(Register, self._register)

    def is_up(self, host: str) -> bool:
        """It has spoken, and so have all its nodes."""
        names = (process_of(host), *self._controller.assigned(host))
        return all(self._controller.address(name) is not None for name in names)

    def judge(self, stop: threading.Event, every_s: float, silence_us: int) -> None:
        """Who has not been heard of for long is dead, and not waited for."""
        controller = self._controller
        while not stop.wait(every_s):
            with suppress(StorageFull, TransportError):
                if dead := controller.judge(now_us(), silence_us):
                    _log.warning("dead, since nothing is heard of them: %s", ", ".join(dead))
                self._service.lost(dead_of(controller.standings()))
                moved = controller.stand_in(now_us(), silence_us)
                for host in dict.fromkeys(moved.values()):
                    taken = ", ".join(name for name, to in moved.items() if to == host)
                    _log.warning("host %s stands in for %s", host, taken)

    def _next_epoch(self, ask: NextEpoch) -> Epoch:
        """The process of a host gets none before it was let in; its nodes are of the process."""
        if (host := host_of(ask.name)) is not None:
            self._controller.admit(host, ask.identity)
        return Epoch(self._controller.next_epoch(ask.name, ask.at_least))

    def _assignment(self, ask: GetAssignment) -> Assignment:
        self._controller.check_known(ask.host)
        return Assignment(tuple(self._controller.assigned(ask.host)))

    def _register(self, ask: Register) -> Registration:
        """A host is told what it is to run, and who reads outputs here: nothing is given up before
        they all spoke."""
        controller, readers, at = self._controller, self._service.readers, now_us()
        controller.check_known(ask.host, [told.node for told in ask.nodes])
        if not controller.here(ask.host, ask.epoch, at):
            return Registration(current=False)
        return Registration(
            current=True,
            refused=tuple(told.node for told in ask.nodes if not self._knows(told, at)),
            assigned=tuple(controller.assigned(ask.host)),
            readers={s: tuple(sorted(r)) for s, r in readers.items() if s in self._outputs},
            standings=controller.standings(),
        )

    def _knows(self, told: Instance, at: int) -> bool:
        try:
            return self._controller.register(told.node, told.address, told.epoch, at)
        except StorageFull:
            return True  # it is told again
