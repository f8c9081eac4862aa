"""Everybody in a simulated run: made from a network, found by name, started and replaced as a
supervisor would."""

from __future__ import annotations

from holdfast.config import Options
from holdfast.model.fragments import (
    fragments,
    pairs_of,
    producers_of,
    replicas_of,
)
from holdfast.model.network import Network
from holdfast.verify.history import History
from holdfast.verify.sim.clients import ClientProcess
from holdfast.verify.sim.links import Server, Wire
from holdfast.verify.sim.members import ControllerProcess
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.sources import SourceProcess
from holdfast.verify.sim.world import Process, World


class Cast:
    def __init__(self, network: Network, options: Options, world: World, history: History) -> None:
        self.network, self.options, self.world, self.history = network, options, world, history
        self.wire = Wire(world)
        parts = fragments(network)
        self.wire.controller = ControllerProcess(
            world, self.wire, producers_of(network), pairs_of(network), options
        )
        self.sources = [
            SourceProcess(world, self.wire, network, op, options, history) for op in network.sources
        ]
        self.nodes = [
            NodeProcess(world, self.wire, network, part, name, options, history)
            for part in parts
            for name in replicas_of(network, part.name)
        ]
        self.clients = [
            ClientProcess(world, self.wire, network, op.name, history) for op in network.outputs
        ]
        self.by_name: dict[str, Server] = {
            process.name: process
            for process in (self.wire.controller, *self.sources, *self.nodes, *self.clients)
        }
        #: Instances that were replaced, and may wake up.
        self.zombies: list[Process] = []

    def start(self, process: Process) -> None:
        """Nobody starts an instance again that was replaced."""
        if process not in self.zombies:
            process.start()

    def replace(self, node: NodeProcess) -> None:
        """A successor on another machine, while the old instance stands still."""
        node.pause()
        node.replaced = True
        self.zombies.append(node)
        successor = NodeProcess(
            self.world, self.wire, self.network, node.fragment, node.name, self.options,
            self.history,
        )  # fmt: skip
        self.nodes[self.nodes.index(node)] = successor
        self.by_name[node.name] = successor
        successor.start()

    def mend(self) -> None:
        """Whatever a torn write killed is started again; everything else has healed by then."""
        for process in self.by_name.values():
            process.disk.crash_after = None
            process.start()
