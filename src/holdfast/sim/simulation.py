"""One simulated run: the processes of a network, the faults of a scenario, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from holdfast.checkers import Verdict, check
from holdfast.config import Options
from holdfast.core import monitor
from holdfast.errors import HoldfastError, InputError
from holdfast.history import (
    Began,
    Broke,
    Finished,
    Healed,
    History,
    Ideal,
    Promised,
    Reported,
    Stopped,
)
from holdfast.model import operators as ops
from holdfast.model.fragments import fragments
from holdfast.model.network import Network
from holdfast.scenario import KINDS, Fault, Scenario, ends_of
from holdfast.sim.chance import options_of
from holdfast.sim.engine import ideal
from holdfast.sim.networks import NETWORKS
from holdfast.sim.processes import (
    FOREVER,
    ClientProcess,
    ControllerProcess,
    NodeProcess,
    SourceProcess,
)
from holdfast.sim.wire import Link, Server, Wire
from holdfast.sim.world import EPOCH_US, Process, World

S = 1_000_000
#: While nothing fails, a bucket is given so long after its end: steps, links and a spike or two.
DELAY_US = 1 * S
#: After the last healing: retries, silence, restarts, replay of everything.
RECOVERY_US = 12 * S
HELD_BUCKETS = 60


def held_buckets(network: Network, options: Options) -> int:
    """What anybody may hold while nothing fails. With `replay`, what an empty node needs to rebuild
    state that is not convergent is everything since the start: promised to be kept, not bounded."""
    convergent = all(op.convergent for op in network.operators)
    return HELD_BUCKETS if convergent or options.recovery == "checkpoint" else FOREVER


@dataclass(frozen=True, slots=True)
class Outcome:
    scenario: Scenario
    history: History
    verdicts: list[Verdict]
    world: World
    #: Simulated time multiplied by the number of nodes.
    node_seconds: float

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == "failed"]


class Simulation:
    def __init__(self, scenario: Scenario, options: Options | None = None) -> None:
        if scenario.network not in NETWORKS:
            known = ", ".join(sorted(NETWORKS))
            raise InputError(f"{scenario.name}: network {scenario.network!r} is not one of {known}")
        self.scenario = scenario = _spelled_out(scenario)
        self.options = options or options_of(scenario.seed)
        self.network = NETWORKS[scenario.network]()
        self.network.check()
        self.world = World(f"{scenario.network}/{scenario.seed}")
        self.wire = Wire(self.world)
        self.history = History()
        cut = fragments(self.network)
        producers = {op.name: op.name for op in self.network.sources}
        producers |= {stream: fragment.name for fragment in cut for stream in fragment.outputs}
        self.controller = ControllerProcess(self.world, self.wire, producers)
        self.wire.controller = self.controller
        self.sources = [
            SourceProcess(self.world, self.wire, self.network, op, self.history)
            for op in self.network.sources
        ]
        self.nodes = [
            NodeProcess(self.world, self.wire, self.network, fragment, self.options, self.history)
            for fragment in cut
        ]
        self.clients = [
            ClientProcess(self.world, self.wire, self.network, op.name, self.history)
            for op in self.network.outputs
        ]
        self._processes: dict[str, Server] = {
            process.name: process
            for process in (self.controller, *self.sources, *self.nodes, *self.clients)
        }
        self._zombies: list[Process] = []
        for fault in scenario.faults:
            self._check(fault)
        self.world.on_stop = self._stopped

    def run(self) -> Outcome:
        world, history = self.world, self.history
        history.add(
            Began(EPOCH_US, self.network.name, self.network.width_us, DELAY_US, RECOVERY_US,
                  held_buckets(self.network, self.options))
        )  # fmt: skip
        for client in self.clients:
            self._promise(client)
        for process in self._processes.values():
            world.at(EPOCH_US, process.start)
        self._monitor()
        last = int(EPOCH_US + self.scenario.seconds * S)
        for fault in self.scenario.faults:
            world.at(EPOCH_US + fault.at_us, self._applier(fault))
            last = max(last, EPOCH_US + fault.at_us + fault.for_us)
        world.run_until(last)
        self._heal_all()
        for source in self.sources:
            source.finish()
        settled = world.run_until(world.now + RECOVERY_US + 2 * S, self._settled)
        if self._zombies:
            world.run_until(world.now + 2 * S)
        for zombie in self._zombies:
            if zombie.alive and self._processes[zombie.name].gave_up is False:
                why = "it was replaced and runs on"
                history.add(Stopped(world.now, zombie.name, "ours", why))
        history.add(Finished(world.now, settled))
        self._ideal()
        nodes_us = (world.now - EPOCH_US) * len(self.nodes)
        return Outcome(self.scenario, history, check(history, monitored=True), world, nodes_us / S)

    def _monitor(self) -> None:
        """The production monitor watches, as the run's own thread does: beside the network."""
        promised = {op.name: monitor.Promised(op.contract.within_us) for op in self.network.outputs}
        watching = monitor.Monitor(self.network.width_us, promised)

        def handle(event: monitor.Event) -> None:
            for action in watching.handle(event):
                kept = isinstance(action, monitor.Kept)
                self.history.add(
                    Reported(action.at, action.output, action.bucket, action.promise, kept)
                )
                self.world.say("monitor", "kept" if kept else "BROKEN", action.output,
                               action.promise, action.bucket)  # fmt: skip

        def tick() -> None:
            handle(monitor.Tick(self.world.now))
            due = watching.next_due(self.world.now)
            at = self.world.now + self.network.width_us
            self.world.at(at if due is None else min(at, max(due, self.world.now + 1_000)), tick)

        def told(output: str, upto: int) -> None:
            now = self.world.now
            ended = upto == FOREVER
            handle(monitor.Ended(now, output) if ended else monitor.Known(now, output, upto))

        for client in self.clients:
            handle(monitor.Began(EPOCH_US, client.output))
            client.on_told = partial(told, client.output)
        self.world.at(EPOCH_US, tick)

    def _settled(self) -> bool:
        return all(client.ended for client in self.clients)

    def _promise(self, client: ClientProcess) -> None:
        op = self.network.named(client.output)
        assert isinstance(op, ops.Output)
        contract = op.contract
        self.history.add(
            Promised(EPOCH_US, client.name, client.output, _above(op), contract.within_us,
                     contract.loss, contract.error, contract.order)
        )  # fmt: skip

    def _stopped(self, process: Process, err: BaseException) -> None:
        if process in self._zombies and isinstance(err, HoldfastError):
            return  # as it should, however it found out
        # Whatever is drawn should be survived, so nobody has a reason to give up.
        why = f"{type(err).__name__}: {err}"
        self.history.add(Stopped(self.world.now, process.name, "ours", why))

    # -- the ideal ------------------------------------------------------------------------------

    def _ideal(self) -> None:
        logged = {source.name: source.logged for source in self.sources}
        ends_at = dict.fromkeys((client.output for client in self.clients), FOREVER)
        for output, buckets in ideal(self.network, logged, ends_at).items():
            for bucket, rows in sorted(buckets.items()):
                end_us = (bucket + 1) * self.network.width_us
                self.history.add(Ideal(end_us, output, bucket, tuple(sorted(rows))))

    # -- faults ---------------------------------------------------------------------------------

    def _check(self, fault: Fault) -> None:
        targets = [fault.on]
        if KINDS[fault.do].target == "link":
            targets = [name for pair in ends_of(fault.on) for name in pair]
        for name in targets:
            if name not in self._processes:
                known = ", ".join(self._processes)
                raise InputError(f"{self.scenario.name}: {fault}: there is only {known}")

    def _applier(self, fault: Fault) -> Callable[[], None]:
        def apply() -> None:
            self.world.say("FAULT", str(fault))
            self.history.add(Broke(self.world.now, fault.do, fault.on))
            heal = self._apply(fault)

            def healed() -> None:
                heal()
                self.world.say("HEALED", fault.do, fault.on)
                self.history.add(Healed(self.world.now, fault.do, fault.on))

            self.world.at(self.world.now + fault.for_us, healed)

        return apply

    def _apply(self, fault: Fault) -> Callable[[], None]:
        """Break it; what is given back heals it."""
        if KINDS[fault.do].target == "link":
            return self._apply_link(fault)
        process = self._processes[fault.on]
        match fault.do:
            case "kill":
                process.die("killed")
                return lambda: self._start(process)
            case "wipe":
                process.die("killed")
                process.disk.wipe()
                return lambda: self._start(process)
            case "torn":
                process.disk.crash_after = int(fault.value)

                def recover() -> None:
                    process.disk.crash_after = None
                    self._start(process)

                return recover
            case "pause":
                process.pause()
                return process.resume
            case "replace":
                return self._replace(process)
            case "slow":
                assert isinstance(process, NodeProcess)
                process.slowness = fault.value
                return lambda: setattr(process, "slowness", 1.0)
            case "full":
                process.disk.full = True
                return lambda: setattr(process.disk, "full", False)
            case "skew":
                process.offset_us += int(fault.value * 1_000)
                return lambda: setattr(
                    process, "offset_us", process.offset_us - int(fault.value * 1_000)
                )
            case "silent":
                assert isinstance(process, SourceProcess)
                process.silent = True
                return lambda: setattr(process, "silent", False)
            case _:
                raise InputError(f"{fault}: not known to the simulator")

    def _start(self, process: Process) -> None:
        """As a supervisor would: nobody starts an instance again that was replaced."""
        if process not in self._zombies:
            process.start()

    def _replace(self, process: Server) -> Callable[[], None]:
        """A successor on another machine, while the old instance stands still."""
        assert isinstance(process, NodeProcess)
        if not process.is_up:  # nobody has heard of it yet, so there is nobody to replace
            process.die("killed")
            return lambda: self._start(process)
        process.pause()
        self._zombies.append(process)
        successor = NodeProcess(
            self.world, self.wire, self.network, process.fragment, self.options, self.history
        )
        self.nodes[self.nodes.index(process)] = successor
        self._processes[process.name] = successor
        successor.start()
        return process.resume

    def _apply_link(self, fault: Fault) -> Callable[[], None]:
        links = [self.wire.link(a, b) for a, b in ends_of(fault.on)]

        def each(change: Callable[[Link], None]) -> None:
            for link in links:
                change(link)

        def add(name: str, amount: int) -> Callable[[], None]:
            each(lambda link: setattr(link, name, getattr(link, name) + amount))
            return lambda: each(lambda link: setattr(link, name, getattr(link, name) - amount))

        match fault.do:
            case "cut":
                return add("cut", 1)
            case "delay":
                return add("delay_us", int(fault.value * 1_000))
            case "throttle":
                return add("row_us", int(30_000 / fault.value))
            case "repeat" | "damage":
                each(lambda link: setattr(link, fault.do, True))
                return lambda: each(lambda link: setattr(link, fault.do, False))
            case "reset":
                pairs = ends_of(fault.on)
                for process in self._processes.values():
                    for connection in process.connections:
                        ends = (process.name, connection.follower.reader.name)
                        if ends in pairs or ends[::-1] in pairs:
                            connection.reset()
                return lambda: None
            case _:
                raise InputError(f"{fault}: not known to the simulator")

    def _heal_all(self) -> None:
        """Whatever a torn write killed is started again; everything else has healed by now."""
        for process in self._processes.values():
            process.disk.crash_after = None
            process.start()


def _above(op: ops.Operator) -> tuple[str, ...]:
    if isinstance(op, ops.Source):
        return (op.name,)
    found = dict.fromkeys(name for up in op.inputs if up is not None for name in _above(up))
    return tuple(found)


def _spelled_out(scenario: Scenario) -> Scenario:
    """`client` stands for all clients, as in scenarios for real processes."""
    names = [f"client-{op.name}" for op in NETWORKS[scenario.network]().outputs]
    faults: list[Fault] = []
    for fault in scenario.faults:
        if fault.on == "client":
            faults += [replace(fault, on=name) for name in names]
        else:
            on = re.sub(r"\bclient\b(?!-)", ",".join(names), fault.on)
            faults.append(replace(fault, on=on))
    return replace(scenario, faults=tuple(faults))


def simulate(scenario: Scenario, options: Options | None = None) -> Outcome:
    return Simulation(scenario, options).run()


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The same failure with as few faults, and as short, as trying finds."""
    number = 0
    while number < len(scenario.faults):
        smaller = scenario.without(number)
        if fails(smaller):
            scenario = smaller
        else:
            number += 1
    for number, fault in enumerate(scenario.faults):
        for shorter_us in (fault.for_us // 4, fault.for_us // 2):
            shorter = replace(fault, for_us=shorter_us - shorter_us % 1_000)
            faults = [*scenario.faults]
            faults[number] = shorter
            smaller = replace(scenario, faults=tuple(faults))
            if shorter.for_us and fails(smaller):
                scenario = smaller
                break
    last_s = max((f.at_us + f.for_us for f in scenario.faults), default=0) / S
    for seconds in (last_s + 1, last_s + 3):
        smaller = replace(scenario, seconds=round(seconds, 1))
        if seconds < scenario.seconds and fails(smaller):
            return smaller
    return scenario
