"""Scenarios by lot: a seed becomes a network, options and a list of faults.

What is drawn is what the system promises to survive: with `recovery='checkpoint'` no storage is
deleted, and the storage of sources, clients and the controller never is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.config import Options
from holdfast.model.fragments import fragments, replicas_of
from holdfast.model.network import Network
from holdfast.scenario import Fault, Scenario
from holdfast.sim.networks import NETWORKS

MS = 1_000


def scenario_of(seed: int) -> Scenario:
    chance = random.Random(f"scenario/{seed}")
    network = chance.choice(sorted(NETWORKS))
    seconds = chance.choice([6, 10, 15, 25])
    number = chance.choice([0, 1, 2, 4, 6, 8, 10, 12])
    wipes = options_of(seed).recovery == "replay"
    targets = _Targets.of(network, seed, wipes=wipes, chance=chance)
    if chance.random() < 0.3:
        # A failure that lasts, as the trees of Borealis section 3.5 speak of.
        seconds = 25
        drawn = [_lasting(chance, targets) for _ in range(chance.choice([1, 1, 2, 3]))]
    else:
        # Half of the time nothing breaks in the second half, so that there is calm to be judged.
        until_s = seconds if chance.random() < 0.5 else seconds / 2
        drawn = [_fault(chance, targets, until_s) for _ in range(number)]
    faults = tuple(sorted(drawn, key=lambda fault: fault.at_us))
    return Scenario(f"seed-{seed}", network, seconds, faults, seed)


def options_of(seed: int) -> Options:
    """How nodes are run: also by lot."""
    chance = random.Random(f"options/{seed}")
    recovery = chance.choice(["replay", "replay", "checkpoint"])
    buckets = [3, 7, 20] if recovery == "checkpoint" else [0, 3, 7, 20]
    return Options(
        recovery="checkpoint" if recovery == "checkpoint" else "replay",
        checkpoint_buckets=chance.choice(buckets),
        group_buckets_max=chance.choice([2, 256]),
        buffer_buckets=chance.choice([None, None, None, 24]),
    )


def protect(network: Network, seed: int) -> None:
    """What the fragments do when inputs are missing: also by lot, and nothing without a seed."""
    chance = random.Random(f"protection/{seed}")
    if network.protections or not seed or chance.random() < 0.3:
        return
    x, most = chance.choice(["600ms", "800ms", "1500ms"]), chance.choice([1, 1, 2, 2, 3])
    for fragment in fragments(network):
        network.protect(
            fragment.name,
            failure=chance.choice(["process", "delay", "process", "delay", "block"]),
            stabilization=chance.choice(["suspend", "delay", "process"]),
            reconcile=chance.choice(["checkpoint", "checkpoint", "undo"]),
            x=x,
            replicas=chance.randint(1, most),
        )


@dataclass(frozen=True, slots=True)
class _Targets:
    """Who may be hit."""

    nodes: list[str]
    sources: list[str]
    everybody: list[str]
    #: Hit again and again: what one fault leaves behind is what the next one finds.
    unlucky: str
    wipes: bool

    @staticmethod
    def of(name: str, seed: int, *, wipes: bool, chance: random.Random) -> _Targets:
        network = NETWORKS[name]()
        protect(network, seed)
        parts = [fragment.name for fragment in fragments(network)]
        nodes = [node for part in parts for node in replicas_of(network, part)]
        sources = [op.name for op in network.sources]
        clients = [f"client-{op.name}" for op in network.outputs]
        everybody = [*nodes, *sources, *clients, "controller"]
        unlucky = chance.choice(chance.choice([nodes, sources, clients, ["controller"]]))
        return _Targets(nodes, sources, everybody, unlucky, wipes)

    def one_of(self, names: list[str], chance: random.Random) -> str:
        return self.unlucky if self.unlucky in names and chance.random() < 0.5 else (
            chance.choice(names)
        )  # fmt: skip


def _fault(chance: random.Random, targets: _Targets, until_s: float) -> Fault:
    at_us = chance.randrange(0, int(1_000 * until_s)) * MS if chance.random() < 0.85 else 0
    for_us = chance.choice([50, 200, 700, 1_500, 3_000, 5_000, 9_000]) * MS
    wipes = ["wipe", "wipe", "wipe", "wipe", "replace"] if targets.wipes else []
    do = chance.choice(
        [*wipes, "kill", "kill", "torn", "torn", "torn", "torn", "torn", "pause", "slow", "full",
         "full", "skew", "retire", "silent", "silent", "silent", "cut", "cut", "cut", "reset",
         "delay", "throttle", "repeat", "damage"]
    )  # fmt: skip
    value = 0.0
    match do:
        case "wipe" | "replace" | "slow":
            on = targets.one_of(targets.nodes, chance)
        case "skew" | "silent" | "retire":
            on = targets.one_of(targets.sources, chance)
        case "cut" | "reset" | "delay" | "throttle" | "repeat" | "damage":
            on = _link(chance, targets.everybody)
        case _:
            on = targets.one_of(targets.everybody, chance)
    match do:
        case "slow":
            value = chance.choice([3.0, 10.0, 40.0])
        case "skew":
            value = chance.choice([-3_000.0, -400.0, 300.0, 2_000.0])
        case "delay":
            value = chance.choice([20.0, 200.0, 900.0])
        case "throttle":
            value = chance.choice([1.0, 10.0])
        case "torn":
            value = float(chance.choice([1, 1, 2, 3, 5, 8, 14]))
            for_us = max(for_us, 1_500 * MS)
    return Fault(at_us, do, on, 0 if do == "reset" else for_us, value)


def _lasting(chance: random.Random, targets: _Targets) -> Fault:
    """Something is gone for long, and that is all."""
    do = chance.choice(["silent", "silent", "cut", "cut", "kill", "pause", "kill"])
    on = chance.choice(targets.sources if do == "silent" else targets.nodes + targets.sources)
    if do == "cut":
        others = [name for name in targets.nodes if name != on]
        number = chance.choice([1, len(others)])
        on = f"{on}<->{','.join(chance.sample(others, min(number, len(others))))}" if others else (
            f"{on}<->controller"
        )  # fmt: skip
    return Fault(chance.randrange(2_000, 9_000) * MS, do, on, chance.randrange(5, 14) * 1_000 * MS)


def _link(chance: random.Random, everybody: list[str]) -> str:
    """Any subset against any other, in both directions or in one."""
    shuffled = sorted(everybody, key=lambda _: chance.random())
    left = chance.choice([1, 1, max(1, len(shuffled) // 2)])
    right = chance.choice([1, 1, len(shuffled) - left])
    arrow = chance.choice(["<->", "<->", "->"])
    return f"{','.join(shuffled[:left])}{arrow}{','.join(shuffled[left : left + right])}"
