"""Simulated hosts: drivers of `core.hosts` and `core.quarantine` in virtual time, like
`cluster.host_main` and `cluster.supervisor` with threads.

A host is a process that runs its assigned nodes. The host dies together with all of its nodes, and
their disks stay with the host. A host with a single node of its own has the name of that node: a
fault of one is a fault of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.core import quarantine as q
from holdfast.core.hosts import (
    HEARTBEAT_US,
    Action,
    Answered,
    End,
    Event,
    Host,
    NodeFailed,
    NodeProgressed,
    NodeStopped,
    Report,
    StartNode,
    StopNode,
)
from holdfast.core.membership import process_of
from holdfast.errors import HoldfastError
from holdfast.streams.calls import Register, Registration
from holdfast.streams.heartbeats import heartbeat_event
from holdfast.verify.sim.links import Server, Wire
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_disk import MemoryDisk
from holdfast.verify.sim.simulated_process import REGISTER_US
from holdfast.verify.sim.world import World

#: Maximum time until all activity of a stopped node has ended.
STOPPING_US = 200_000


class HostProcess(Server):
    def __init__(
        self,
        world: World,
        wire: Wire,
        name: str,
        make: Callable[[HostProcess, str], NodeProcess],
        rebuildable: Callable[[str], bool],
        supervisor: Supervisor,
    ) -> None:
        super().__init__(world, name, wire)
        self._make, self._rebuildable, self._supervisor = make, rebuildable, supervisor
        #: Nodes that the host runs or has run; their disks stay with the host.
        self.nodes: dict[str, NodeProcess] = {}
        #: A successor has replaced this host.
        self.replaced = False
        self._core = Host(0, rebuildable)
        self._epoch = 0
        #: Number of the scheduled heartbeat, so that a heartbeat that was moved forward is not sent
        #: twice. None: a heartbeat is in flight.
        self._next: int | None = 0

    def node(self, name: str) -> NodeProcess:
        if name not in self.nodes:
            self.nodes[name] = self._make(self, name)
        return self.nodes[name]

    def disks(self) -> list[MemoryDisk]:
        return [node.disk for node in self.nodes.values()]

    def boot(self) -> None:
        self._core = Host(self.world.now, self._rebuildable)
        self._ask_epoch()

    def die(self, why: str, *, power: bool = False) -> None:
        if not self.alive:
            return
        super().die(why, power=power)
        for node in self.nodes.values():
            node.end(why, power=power)
        self._supervisor.noticed(self)

    def pause(self) -> None:
        super().pause()
        for node in self.nodes.values():
            super(NodeProcess, node).pause()

    def resume(self) -> None:
        super().resume()
        for node in self.nodes.values():
            super(NodeProcess, node).resume()

    def wake(self) -> None:
        """Sends the next heartbeat now, to report news, unless a heartbeat is in flight."""
        if self._next is not None:
            self._schedule(0)

    def failed(self, node: NodeProcess, err: BaseException) -> None:
        failure = NodeFailed(self.world.now, node.name, q.kind_of(err), q.reason_of(err))
        life = node.life

        def report() -> None:
            if node.life == life:
                self._handle(failure)

        self.after(0, report)

    # -- internal ---------------------------------------------------------------------------------

    def _ask_epoch(self) -> None:
        self._next = None

        def granted(epoch: int) -> None:
            self._epoch = epoch
            self._beat()

        self.wire.ask_controller(
            self, lambda c: c.next_epoch(process_of(self.name), 0), granted,
            lambda err: self.after(REGISTER_US, self._ask_epoch),
        )  # fmt: skip

    def _schedule(self, after_us: int) -> None:
        self._next = number = (self._next or 0) + 1

        def due() -> None:
            if self._next == number:
                self._next = None
                self._beat()

        self.after(after_us, due)

    def _beat(self) -> None:
        instances = [instance for node in self.nodes.values() if (instance := node.instance())]
        request = Register(self.name, self._epoch, tuple(instances))
        for instance in instances:
            if instance.position is not None:
                self._handle(NodeProgressed(self.world.now, instance.node, instance.position))

        def replied(reply: Registration | HoldfastError) -> None:
            event = heartbeat_event(reply, self.world.now)
            self._handle(event)
            if isinstance(event, Answered) and isinstance(reply, Registration):
                for node in self.nodes.values():
                    if node.alive and node.is_up:
                        node.enter(partial(node.heard, dict(reply.statuses)))
            self._schedule(HEARTBEAT_US)

        self.wire.ask_controller(self, lambda c: c.heartbeat(request), replied, replied)

    def _handle(self, event: Event) -> None:
        self._perform(self._core.handle(event))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartNode():
                    node = self.node(action.node)
                    self._supervisor.took(node)
                    node.begin(rebuild=action.rebuild)
                case StopNode():
                    self.nodes[action.node].end("stopped")
                    took_us = int(STOPPING_US * self.wire.chance.random())
                    stopped = NodeStopped(self.world.now + took_us, action.node)
                    self.after(took_us, partial(self._handle, stopped))
                case Report():
                    condition = action.condition
                    state = "is healthy" if condition is None else (
                        f"is {'quarantined' if condition.quarantined else 'retried'}: "
                        f"{condition.reason}"
                    )  # fmt: skip
                    self.world.say(action.node, state)
                case End():
                    self.world.say(self.name, "terminated:", action.why)
                    self.die("terminated itself")
                    self._supervisor.ended(self, action)
                    return


class Supervisor:
    """Restarts hosts that terminated themselves. The supervisor runs in the process of the
    controller, so that no host is restarted while the controller is down."""

    def __init__(self, world: World, wire: Wire, took: Callable[[NodeProcess], None]) -> None:
        self._world, self._wire = world, wire
        #: Called with every node that is started: the current instance of that name.
        self.took = took
        self._parts: dict[HostProcess, q.Quarantine] = {}
        self._chance = world.rng("supervisor")

    def noticed(self, host: HostProcess) -> None:
        """The exit of a process is often detected directly; the loss of a machine only shows as
        missing heartbeats."""
        controller = self._wire.controller
        if not host.replaced and controller.alive and self._chance.random() < 0.5:
            controller.host_ended(host.name)

    def ended(self, host: HostProcess, end: End) -> None:
        quarantine = self._parts.setdefault(
            host, q.Quarantine(due=None, runs_since=self._world.now)
        )
        quarantine.handle(q.Failed(self._world.now, q.kind_of_exit(end.code), end.why))
        self._start(host, quarantine)

    def _start(self, host: HostProcess, quarantine: q.Quarantine) -> None:
        if quarantine.due is None or host.replaced:
            return
        if self._world.now >= quarantine.due and self._wire.controller.alive:
            quarantine.handle(q.Tick(self._world.now))
            host.start()
        else:
            at = max(quarantine.due, self._world.now + REGISTER_US)
            self._world.at(at, partial(self._start, host, quarantine))
