"""One simulated run: the processes of a network, the faults of a scenario, and the verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from holdfast.config import Options
from holdfast.core import contract_monitor
from holdfast.errors import HoldfastError, InputError, StateLost
from holdfast.frozen import dataclass
from holdfast.model import operators as ops
from holdfast.model.fragments import fragments, pairs_of
from holdfast.model.layout import layout_of
from holdfast.model.network import Network
from holdfast.verify.checkers import Verdict, check
from holdfast.verify.history import (
    Began,
    Broke,
    Event,
    Finished,
    Healed,
    History,
    Ideal,
    Promised,
    Reported,
    Stopped,
)
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim import fault_effects as faults
from holdfast.verify.sim.condition import detect_us
from holdfast.verify.sim.fault_effects import spelled_out
from holdfast.verify.sim.links import SILENCE_US
from holdfast.verify.sim.networks import HOSTS, NETWORKS
from holdfast.verify.sim.observer import Observer
from holdfast.verify.sim.oracle import Oracle
from holdfast.verify.sim.pair_observer import Vigil
from holdfast.verify.sim.placement_observer import Placement
from holdfast.verify.sim.random_scenarios import options_of, protect
from holdfast.verify.sim.simulated_engine import ideal
from holdfast.verify.sim.simulated_process import FOREVER, TRIM_BUCKETS_MAX
from holdfast.verify.sim.simulated_run import Cast
from holdfast.verify.sim.world import EPOCH_US, Process, World

S = 1_000_000
#: Bound on the delivery of a bucket after its end while no fault is active: steps, links, and one
#: or two latency spikes.
DELAY_US = 1 * S
#: Recovery time after the last fault has healed: retries, missing heartbeats, restarts, replay ...
RECOVERY_US = 7 * S
#: ... plus, for a failure longer than `LONG_US`, one `LONG_SHARE`-th of the excess.
LONG_US, LONG_SHARE = 60 * S, 50
#: ... plus what a node takes for its backlog beyond this time if its steps are split.
SPLIT_US = 2 * S
#: Faults that are detected only by missing heartbeats or lag. The death of a process, in contrast,
#: breaks its connections.
SILENT = {
    "pause", "replace", "hang", "cut", "full", "slow", "throttle", "damage", "eio-read",
    "eio-fsync",
}  # fmt: skip
LOOK_US = 250_000
#: Interval of the checks whether a healed fault still has effects.
FELT_US = 100_000
#: Least rows in a bucket of the input of a fragment with eventual checkpoints, and buckets until a
#: checkpoint that is due is durable.
ROWS_MIN, DUE_BUCKETS = 2, 8
#: Slack beyond window extent, checkpoints and trimming, for the duration of steps and links.
SLACK_BUCKETS, SLACK_US = 6, 3_000_000


def held_buckets(network: Network, options: Options) -> int:
    """How many buckets of a stream a component may hold while no fault is active: those that a node
    and the nodes downstream need, until the last of them has a newer checkpoint."""
    parts = fragments(network)
    interval = options.checkpoint_buckets
    between = []
    for part in parts:
        rows = network.protection(part.name).recovery_rows
        limits = [interval] if interval else []
        limits += [] if rows is None else [rows // ROWS_MIN]
        between.append(min(limits, default=0))
    reach = max(path.extent_us() for part in parts for path in part.paths)
    return (
        -(-reach // network.width_us)
        + sum(between)
        + (DUE_BUCKETS if any(between) else 0)
        + TRIM_BUCKETS_MAX
        + max(SLACK_BUCKETS, SLACK_US // network.width_us)
        # A replica of a pair receives the positions of its consumers once per `silence`.
        + (SILENCE_US // network.width_us if pairs_of(network) else 0)
    )


def recovery_us(scenario: Scenario) -> int:
    """Maximum recovery time after the last fault has healed."""
    longest_us = max((fault.for_us for fault in scenario.faults), default=0)
    return RECOVERY_US + max(0, longest_us - LONG_US) // LONG_SHARE


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
            networks = ", ".join(sorted(NETWORKS))
            raise InputError(
                f"{scenario.name}: network {scenario.network!r} is not one of {networks}"
            )
        self.options = options or options_of(scenario.seed, scenario.network)
        self.network = NETWORKS[scenario.network]()
        protect(self.network, scenario.seed)
        self.network.check()
        self.world = World(f"{scenario.network}/{scenario.seed}")
        self.history = History()
        shared = HOSTS.get(scenario.network)
        layout = None if shared is None else layout_of(self.network, *shared)
        self.cast = Cast(self.network, self.options, self.world, self.history, layout)
        self.scenario = spelled_out(scenario, self.cast)
        self.world.on_stop = self._stopped
        held = held_buckets(self.network, self.options)
        self._recovery_us = recovery_us(scenario) + self._split_us()
        self._oracle = Oracle(self.cast, self._recovery_us)
        self._vigil = Vigil(self.cast, held)
        self._observer = Observer(self.cast, self._oracle.condition, held)
        self._placement = Placement(self.cast)
        self._finishing = False

    def run(self) -> Outcome:
        world, history = self.world, self.history
        history.add(
            Began(EPOCH_US, self.network.name, self.network.width_us, DELAY_US, self._recovery_us,
                  held_buckets(self.network, self.options), detect_us(self.network),
                  announces=True, wall=True)
        )  # fmt: skip
        for output in self.network.outputs:
            self._promise(output)
        for process in self.cast.by_name.values():
            world.at(EPOCH_US, process.start)
        self._monitor()
        self._expect()
        last = int(EPOCH_US + self.scenario.seconds * S)
        for fault in self.scenario.faults:
            world.at(EPOCH_US + fault.at_us, partial(self.inject, fault))
            last = max(last, EPOCH_US + fault.at_us + fault.for_us)
        world.run_until(last)
        self.cast.mend()
        self._finishing = True
        for event in self._oracle.over(world.now):
            history.add(event)
        for source in self.cast.sources:
            source.finish()
        settled = world.run_until(world.now + self._recovery_us + 2 * S, self._settled)
        if self.cast.zombies:
            world.run_until(world.now + 2 * S)
        for zombie in self.cast.zombies:
            if zombie.alive and self.cast.by_name[zombie.name].gave_up is False:
                why = "it was replaced but keeps running"
                history.add(Stopped(world.now, zombie.name, "ours", why))
        world.run_until(world.now + RECOVERY_US, self._placement.all_run)
        history.events += [*self._vigil.end(world.now), *self._placement.end(world.now)]
        history.add(Finished(world.now, settled))
        self._ideal()
        nodes_us = (world.now - EPOCH_US) * len(self.cast.nodes)
        verdicts = check(history, monitored=True)
        return Outcome(self.scenario, history, verdicts, world, nodes_us / S)

    def _split_us(self) -> int:
        """How much longer the recovery takes because the steps of a node are split."""
        faults = self.scenario.faults
        since_us = min((fault.at_us for fault in faults), default=0)
        until_us = max((fault.at_us + fault.for_us for fault in faults), default=0)
        backlog = (until_us - since_us) // self.network.width_us
        longest_us = max((node.split_us(backlog) for node in self.cast.nodes), default=0)
        return max(0, longest_us - SPLIT_US)

    def _monitor(self) -> None:
        """Runs the production contract monitor beside the network, in place of its thread."""
        promised = {
            op.name: contract_monitor.Promised(op.contract.within_us) for op in self.network.outputs
        }
        watching = contract_monitor.Monitor(self.network.width_us, promised)

        def handle(event: contract_monitor.Event) -> None:
            for action in watching.handle(event):
                is_kept = isinstance(action, contract_monitor.Kept)
                self.history.add(
                    Reported(action.at, action.output, action.bucket, action.promise, is_kept)
                )
                self.world.say("monitor", "promise kept" if is_kept else "promise BROKEN",
                               action.output, action.promise, action.bucket)  # fmt: skip

        def tick() -> None:
            handle(contract_monitor.Tick(self.world.now))
            due = watching.next_due(self.world.now)
            at = self.world.now + self.network.width_us
            self.world.at(at if due is None else min(at, max(due, self.world.now + 1_000)), tick)

        def advanced(output: str, upto: int) -> None:
            now = self.world.now
            ended = upto == FOREVER
            handle(
                contract_monitor.Ended(now, output, whole=True)
                if ended
                else contract_monitor.Known(now, output, upto)
            )

        for client in self.cast.clients:
            handle(contract_monitor.Began(EPOCH_US, client.output))
            client.on_position = partial(advanced, client.output)
        self.world.at(EPOCH_US, tick)

    def _settled(self) -> bool:
        return all(client.ended for client in self.cast.clients)

    def _promise(self, output: ops.Output) -> None:
        sources = tuple(source.name for source in ops.sources_of(output))
        contract, client = output.contract, f"client-{output.name}"
        self.history.add(
            Promised(EPOCH_US, client, output.name, sources, contract.within_us, contract.loss,
                     contract.error, contract.order)
        )  # fmt: skip

    def _stopped(self, process: Process, err: BaseException) -> None:
        if process in self.cast.zombies and isinstance(err, HoldfastError):
            return  # a replaced instance must stop, whatever the reason
        # All generated faults must be survived, so no process has a reason to stop. Only
        # `StateLost` is correct: all disks with a state are gone.
        why = f"{type(err).__name__}: {err}"
        fault_of = "world" if isinstance(err, StateLost) else "ours"
        self.history.add(Stopped(self.world.now, process.name, fault_of, why))

    def _expect(self) -> None:
        """Runs at short intervals, because processes die, restart and connect at any time."""
        now = self.world.now
        events: list[Event] = []
        if not self._finishing:
            events += self._oracle.look(now)
        events += self._oracle.deserted(now)
        events += self._vigil.look(now)
        events += self._observer.look(now)
        events += self._placement.look(now)
        self.history.events += events
        self.world.at(now + LOOK_US, self._expect)

    # -- the ideal ------------------------------------------------------------------------------

    def _ideal(self) -> None:
        logged = {source.name: source.logged for source in self.cast.sources}
        for output, buckets in ideal(self.network.logical, logged).items():
            for bucket, rows in sorted(buckets.items()):
                end_us = (bucket + 1) * self.network.width_us
                self.history.add(Ideal(end_us, output, bucket, tuple(sorted(rows))))

    def inject(self, fault: Fault) -> None:
        """Injects a fault now, and heals the fault when its time is over. `Healed` is recorded when
        the effects are over."""
        self.world.say("FAULT", str(fault))
        self.history.add(Broke(self.world.now, fault.do, fault.on))
        heal = faults.apply(fault, self.cast)
        self._vigil.broke(fault.on)
        self._oracle.changed(self.world.now, noticed=fault.do in SILENT)

        over_us = self.world.now + fault.for_us

        def heal_it() -> None:
            heal()
            watch()

        def watch() -> None:
            if faults.is_felt(fault, self.cast, over_us):
                self.world.at(self.world.now + FELT_US, watch)
                return
            self._vigil.healed(fault.on)
            self._oracle.changed(self.world.now, noticed=False)
            self.world.say("HEALED", fault.do, fault.on)
            felt_us = self.world.now - over_us
            self.history.add(Healed(self.world.now, fault.do, fault.on, felt_us))

        self.world.at(over_us, heal_it)


def simulate(scenario: Scenario, options: Options | None = None) -> Outcome:
    return Simulation(scenario, options).run()


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The same failure with fewer and shorter faults, as far as a simple search finds them."""
    before = None
    while before != scenario:  # removing one fault may make another one unnecessary
        before = scenario
        for number in reversed(range(len(scenario.faults))):
            if fails(smaller := scenario.without(number)):
                scenario = smaller
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
