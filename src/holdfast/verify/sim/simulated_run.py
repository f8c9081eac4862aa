"""All processes of a simulated run: created from a network and a layout, found by name, started and
replaced as a supervisor would do."""

from __future__ import annotations

from holdfast.config import Options
from holdfast.model.fragments import (
    fragment_of,
    fragments,
    is_pair,
    pairs_of,
    recovery_of,
)
from holdfast.model.layout import Layout, layout_of
from holdfast.model.network import Network
from holdfast.verify.history import History
from holdfast.verify.sim.clients import ClientProcess
from holdfast.verify.sim.host_process import HostProcess, Supervisor
from holdfast.verify.sim.links import Server, Wire
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_process import ControllerProcess, Wiring
from holdfast.verify.sim.sources import SourceProcess
from holdfast.verify.sim.world import Process, World


class Cast:
    """The processes of a run. Without a layout, every node has its own host of the same name."""

    def __init__(
        self,
        network: Network,
        options: Options,
        world: World,
        history: History,
        layout: Layout | None = None,
    ) -> None:
        self.network, self.options, self.world, self.history = network, options, world, history
        self.wire, self._wiring = Wire(world), Wiring(network)
        self._parts = {part.name: part for part in fragments(network)}
        layout = layout or layout_of(network, None)
        self.wire.controller = ControllerProcess(
            world, self.wire, self._wiring.producers, pairs_of(network), options, layout
        )
        self.sources = [
            SourceProcess(world, self.wire, self._wiring, op, options, history)
            for op in network.sources
        ]
        self._supervisor = Supervisor(world, self.wire, self._took)
        self.hosts = {name: self._host(name) for name in layout}
        placed = {name: host for host, names in layout.items() for name in names}
        self.nodes: list[NodeProcess] = [
            self.hosts[placed[name]].node(name) for name in sorted(placed, key=self._order)
        ]
        self.clients = [
            ClientProcess(world, self.wire, self._wiring, op, history) for op in network.outputs
        ]
        self.by_name: dict[str, Server] = {
            process.name: process
            for process in (self.wire.controller, *self.sources, *self.nodes, *self.clients)
        }
        for name, host in self.hosts.items():
            self.by_name.setdefault(name, host)
        #: Replaced instances, which may resume.
        self.zombies: list[Process] = []

    def start(self, process: Process) -> None:
        """Starts a process, unless the instance was replaced."""
        if process not in self.zombies:
            process.start()

    def replace(self, node: NodeProcess) -> None:
        """Starts a successor of the node's host on another machine, while the old instance is
        paused."""
        assert isinstance(node, NodeProcess)
        former = node.host
        former.pause()
        former.replaced = True
        self.zombies += [former, *former.nodes.values()]
        for zombie in former.nodes.values():
            zombie.replaced = True
        self.hosts[former.name] = successor = self._host(former.name)
        if former.name not in former.nodes:
            self.by_name[former.name] = successor
        for name, zombie in former.nodes.items():
            if self.by_name[name] is zombie:
                self._took(successor.node(name))
        successor.start()

    def mend(self) -> None:
        """Restarts the processes that a torn write killed; all other faults have healed by then."""
        for process in self.by_name.values():
            process.disk.crash_after = None
            process.start()

    def _host(self, name: str) -> HostProcess:
        return HostProcess(
            self.world, self.wire, name, self._node, self._rebuildable, self._supervisor
        )

    def _node(self, host: HostProcess, name: str) -> NodeProcess:
        part = self._parts[fragment_of(name)]
        return NodeProcess(host, self._wiring, part, name, self.options, self.history)

    def _rebuildable(self, name: str) -> bool:
        part = fragment_of(name)
        replays = recovery_of(self.network, part, self.options) == "replay"
        return is_pair(self.network, part) or replays

    def _took(self, node: NodeProcess) -> None:
        """Makes this node the current instance of its name."""
        current = self.by_name[node.name]
        if current is not node:
            assert isinstance(current, NodeProcess)
            self.nodes[self.nodes.index(current)] = node
            self.by_name[node.name] = node

    def _order(self, name: str) -> tuple[int, int]:
        """Sort key: the order of fragments in the network, then the replica."""
        return list(self._parts).index(fragment_of(name)), int(name.partition("@")[2] or 1)
