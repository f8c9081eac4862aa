"""Remote calls of the controller, and the loop that detects dead nodes. Both run in the process of
the run."""

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
    """Called by threads in production, and by the simulator in virtual time."""

    def __init__(
        self,
        controller: Controller,
        service: Service,
        outputs: Collection[str],
        clock: Callable[[], int] = monotonic_us,
    ) -> None:
        self._controller, self._service, self._outputs = controller, service, outputs
        self._clock = clock
        #: Unhealthy nodes of each host, as last reported by the host.
        self._unhealthy: dict[str, Mapping[str, PartStatus]] = {}
        #: Differences between a node and its other replicas, as last reported by the node.
        self._differs: dict[str, tuple[str, ...]] = {}
        #: Predicted times of recoveries by path, as last reported by each node.
        self._recovery_ms: dict[str, Mapping[str, int]] = {}
        #: Called with the position of the slowest node of a host.
        self.on_progress: Callable[[str, int], None] = lambda host, position: None
        #: Called on every heartbeat of a host.
        self.on_heartbeat: Callable[[str], None] = lambda host: None
        service.handle(NextEpoch, self._next_epoch)
        service.handle(GetAssignment, self._assignment)
        service.handle(Register, self.register)

    def unhealthy(self, host: str) -> Mapping[str, PartStatus]:
        """The unhealthy nodes of a host, as of its last heartbeat."""
        return self._unhealthy.get(host, {})

    def differs(self) -> dict[str, tuple[str, ...]]:
        """Nodes whose results differ from other replicas, with the differences."""
        return {
            node: differences for node, differences in list(self._differs.items()) if differences
        }

    def recovery_ms(self) -> dict[str, Mapping[str, int]]:
        """By node and path with eventual checkpoints: the predicted time of a recovery."""
        return dict(self._recovery_ms)

    def ended(self, host: str) -> None:
        """Record that the process of a host has exited."""
        self._unhealthy.pop(host, None)
        self._controller.ended(host)

    def is_up(self, host: str) -> bool:
        """Whether the host and all its nodes have registered."""
        names = (process_of(host), *self._controller.assigned(host))
        return all(self._controller.address(name) is not None for name in names)

    def judge(self, stop: threading.Event, every_s: float) -> None:
        """Every `every_s`, declare nodes dead that send no heartbeats, so that producers stop
        waiting for them."""
        last_error: str | None = None
        while not stop.wait(every_s):
            try:
                self._judge()
                last_error = None
            except (LogError, TransportError) as err:  # retried in the next round
                if str(err) != last_error:
                    last_error = str(err)
                    _log.warning(
                        "the controller cannot declare nodes dead, so producers wait for them and "
                        "no standby takes over; retrying: %s", err,
                    )  # fmt: skip

    def _judge(self) -> None:
        controller = self._controller
        dead, moved = controller.judge(self._clock())
        for name in dead:
            _log.warning("node %s was declared dead: %s", name, controller.why_dead(name))
        for host in dict.fromkeys(moved.values()):
            node_names = ", ".join(name for name, to in moved.items() if to == host)
            _log.warning("standby host %s takes over nodes %s", host, node_names)
        self._service.lost(controller.statuses(), monotonic_us())

    def _next_epoch(self, ask: NextEpoch) -> Epoch:
        """Assign an epoch. The process of a host must be admitted first; its nodes need no check of
        their own, because they run in this process."""
        if (host := host_of(ask.name)) is not None:
            self._controller.admit(host, ask.identity)
        return Epoch(self._controller.next_epoch(ask.name, ask.at_least))

    def _assignment(self, ask: GetAssignment) -> Assignment:
        self._controller.check_known(ask.host)
        return Assignment(tuple(self._controller.assigned(ask.host)))

    def register(self, ask: Register) -> Registration:
        """Handle the heartbeat of a host. The reply carries the nodes that the host must run, and
        the clients of this process: nodes release no bucket before all of them have
        acknowledged it."""
        controller, consumers, at = self._controller, self._service.consumers, self._clock()
        controller.check_known(ask.host, [instance.node for instance in ask.nodes])
        try:
            if not controller.here(ask.host, ask.epoch, at):
                return Registration(current=False)
        except LogError:  # the disk of the controller failed; the host is healthy
            self.on_heartbeat(ask.host)
            raise
        self.on_heartbeat(ask.host)
        self._unhealthy[ask.host] = ask.unhealthy
        positions = [instance.position for instance in ask.nodes if instance.position is not None]
        if positions:
            self.on_progress(ask.host, min(positions))
        return Registration(
            current=True,
            refused=tuple(instance.node for instance in ask.nodes if not self._knows(instance, at)),
            assigned=tuple(controller.assigned(ask.host)),
            consumers={s: tuple(sorted(r)) for s, r in consumers.items() if s in self._outputs},
            statuses=controller.statuses(),
        )

    def _knows(self, instance: Instance, at: int) -> bool:
        self._differs[instance.node] = instance.differs
        self._recovery_ms[instance.node] = instance.recovery_ms
        try:
            if not instance.up:
                return self._controller.announce(instance.node, instance.address, instance.epoch)
            return self._controller.register(
                instance.node, instance.address, instance.epoch, at, instance.positions
            )
        except LogError:
            return True  # the next heartbeat repeats the registration
