"""The controller among the others: what hosts ask it, and the loop in which it judges who is gone.
It lives in the process of the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping

from holdfast.clock import monotonic_us
from holdfast.cluster.controller import Controller
from holdfast.core.membership import host_of, process_of
from holdfast.core.quarantine import PartStatus
from holdfast.errors import LogError, TransportError
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


class ControllerService:
    """Threads call it in production, the simulator in virtual time."""

    def __init__(
        self,
        controller: Controller,
        service: Service,
        outputs: Collection[str],
        clock: Callable[[], int] = monotonic_us,
    ) -> None:
        self._controller, self._service, self._outputs = controller, service, outputs
        self._clock = clock
        #: What each host says of its nodes that are not healthy.
        self._unhealthy: dict[str, Mapping[str, PartStatus]] = {}
        #: What each node says that other replicas made otherwise.
        self._differs: dict[str, tuple[str, ...]] = {}
        #: Told how far the slowest node of a host is.
        self.on_progress: Callable[[str, int], None] = lambda host, position: None
        #: Told of every heartbeat of a host.
        self.on_heartbeat: Callable[[str], None] = lambda host: None
        service.handle(NextEpoch, self._next_epoch)
        service.handle(GetAssignment, self._assignment)
        service.handle(Register, self.register)

    def unhealthy(self, host: str) -> Mapping[str, PartStatus]:
        """Of the nodes of a host, as of its last heartbeat."""
        return self._unhealthy.get(host, {})

    def differs(self) -> dict[str, tuple[str, ...]]:
        """Nodes that other replicas differ from, and in what."""
        return {node: told for node, told in list(self._differs.items()) if told}

    def ended(self, host: str) -> None:
        """The process of a host has ended."""
        self._unhealthy.pop(host, None)
        self._controller.ended(host)

    def is_up(self, host: str) -> bool:
        """It has spoken, and so have all its nodes."""
        names = (process_of(host), *self._controller.assigned(host))
        return all(self._controller.address(name) is not None for name in names)

    def judge(self, stop: threading.Event, every_s: float) -> None:
        """Who has not been heard of for long is dead, and not waited for."""
        said: str | None = None
        while not stop.wait(every_s):
            try:
                self._judge()
                said = None
            except (LogError, TransportError) as err:  # tried again with the next round
                if str(err) != said:
                    said = str(err)
                    _log.warning("nobody can be declared dead at the moment: %s", err)

    def _judge(self) -> None:
        controller = self._controller
        dead, moved = controller.judge(self._clock())
        for name in dead:
            _log.warning("declared dead: node=%s, %s", name, controller.why_dead(name))
        for host in dict.fromkeys(moved.values()):
            taken = ", ".join(name for name, to in moved.items() if to == host)
            _log.warning("host %s, a standby, takes over %s", host, taken)
        self._service.lost(controller.standings(), monotonic_us())

    def _next_epoch(self, ask: NextEpoch) -> Epoch:
        """The process of a host gets none before it was let in; its nodes are of the process."""
        if (host := host_of(ask.name)) is not None:
            self._controller.admit(host, ask.identity)
        return Epoch(self._controller.next_epoch(ask.name, ask.at_least))

    def _assignment(self, ask: GetAssignment) -> Assignment:
        self._controller.check_known(ask.host)
        return Assignment(tuple(self._controller.assigned(ask.host)))

    def register(self, ask: Register) -> Registration:
        """A host is told what it is to run, and who reads outputs here: nothing is given up before
        they all spoke."""
        controller, readers, at = self._controller, self._service.readers, self._clock()
        controller.check_known(ask.host, [told.node for told in ask.nodes])
        try:
            if not controller.here(ask.host, ask.epoch, at):
                return Registration(current=False)
        except LogError:  # of the controller, whose disk is full: the host is well
            self.on_heartbeat(ask.host)
            raise
        self.on_heartbeat(ask.host)
        self._unhealthy[ask.host] = ask.unhealthy
        positions = [told.position for told in ask.nodes if told.position is not None]
        if positions:
            self.on_progress(ask.host, min(positions))
        return Registration(
            current=True,
            refused=tuple(told.node for told in ask.nodes if not self._knows(told, at)),
            assigned=tuple(controller.assigned(ask.host)),
            readers={s: tuple(sorted(r)) for s, r in readers.items() if s in self._outputs},
            standings=controller.standings(),
        )

    def _knows(self, told: Instance, at: int) -> bool:
        self._differs[told.node] = told.differs
        try:
            if not told.up:
                return self._controller.announce(told.node, told.address, told.epoch)
            return self._controller.register(
                told.node, told.address, told.epoch, at, told.positions
            )
        except LogError:
            return True  # it is told again
