"""Random scenarios: a seed becomes a network, options and a list of faults.

Only faults that the system promises to survive are generated: with `recovery='checkpoint'` no
storage is deleted or rots, and the storage of sources, clients and the controller never does.
"""

from __future__ import annotations

import random
from dataclasses import replace

from holdfast.config import Options
from holdfast.model.fragments import fragments, replicas_of
from holdfast.model.layout import EDGE, layout_of
from holdfast.model.network import Network
from holdfast.model.protection import FailurePolicy
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.networks import NETWORKS
from holdfast.verify.sim.random_eventual import (
    CEC,
    CEC_NETWORKS,
    ROTTEN,
    SHARE,
    failures_together,
    limits_of,
    rotten,
    survivable,
)
from holdfast.verify.sim.random_faults import Targets, beside_of, fault_of, hosts_fail, lasting_of
from holdfast.verify.sim.random_host_faults import host_scenario_of
from holdfast.verify.sim.rare_faults import HOURS, hour_of, rare_faults_of

#: Whether the faults of `rare_faults` and fragments with three replicas are generated, too.
FAULTS_2 = True
#: A third of `NETWORK_CHOICES`; the number of partitions is generated separately.
PAIRS = "pairs"
#: Share of the networks of pairs in which nodes share hosts.
SHARED = 0.3
#: The network whose nodes are never idle, and its share of the seeds.
SHORT, NEVER_IDLE = "short", 0.01
NETWORK_CHOICES = [
    name for name in sorted(NETWORKS) if not name.startswith((PAIRS, HOURS, SHORT, CEC))
]
NETWORK_CHOICES = sorted([*NETWORK_CHOICES, *[PAIRS] * (len(NETWORK_CHOICES) // 2)])
#: Share of seeds with rare faults, and among those the share with a failure of one hour.
RARE_FAULTS, AN_HOUR = 0.5, 0.012


#: Numbers of short faults.
NUMBERS = [0, 1, 2, 4, 6, 8, 10, 12]
#: Share of seeds in which a source ends during the faults, and in which a node is restarted with an
#: older copy of its storage.
ENDS, OLDER_COPIES = 0.06, 0.06


def scenario_of(seed: int, only: str | None = None) -> Scenario:
    """The scenario of a seed. `only`: `cec`, one with continuous eventual checkpoints."""
    if only == CEC or random.Random(f"{CEC}/{seed}").random() < SHARE:
        scenario = _with_checkpoints(seed)
    else:
        scenario = _with_rare_faults(seed)
    if not FAULTS_2 or scenario.network == HOURS:
        return scenario
    chance = random.Random(f"ends/{seed}")
    added = []
    if chance.random() < ENDS:
        source = chance.choice([op.name for op in NETWORKS[scenario.network]().sources])
        added.append(Fault(_time_in(chance, scenario.seconds, 0.1, 0.9), "end", source))
    if chance.random() < OLDER_COPIES and options_of(seed).recovery == "replay":
        targets = _targets(scenario.network, seed, chance)
        if scenario.network.startswith(PAIRS):
            # Without other faults: the peer must have the newest state, or the pair has lost it.
            scenario = replace(scenario, faults=())
        at_us = _time_in(chance, scenario.seconds, 0.1, 0.6)
        for_us = _time_in(chance, scenario.seconds, 0.05, 0.35)
        added.append(Fault(at_us, "restore", chance.choice(targets.nodes), for_us))
    faults = [*scenario.faults, *added]
    if scenario.network in CEC_NETWORKS:
        network, rots = _protected(scenario.network, seed), random.Random(f"rot/{seed}")
        faults = survivable(faults, network)
        if rots.random() < ROTTEN:
            faults += rotten(rots, network, scenario.seconds)
    faults.sort(key=lambda fault: fault.at_us)
    return replace(scenario, faults=tuple(faults))


def _with_checkpoints(seed: int) -> Scenario:
    chance = random.Random(f"footprints/{seed}")
    network = chance.choice(CEC_NETWORKS)
    targets = _targets(network, seed, chance)
    kind = chance.random()
    seconds: float = 30
    if kind < 0.35:
        faults = failures_together(chance, targets, chance.choice([8, 16, 24]))
    elif kind < 0.55 and FAULTS_2:
        faults = rare_faults_of(chance, targets, [])
    else:
        seconds, faults = _faults_of(
            chance, targets, chance.choice([10, 15, 25]), chance.choice(NUMBERS)
        )
    faults = survivable(faults, _protected(network, seed))
    in_order = tuple(sorted(faults, key=lambda fault: fault.at_us))
    return Scenario(f"seed-{seed}", network, seconds, in_order, seed)


def _time_in(chance: random.Random, seconds: float, low: float, high: float) -> int:
    return round(1_000 * seconds * chance.uniform(low, high)) * 1_000


def _with_rare_faults(seed: int) -> Scenario:
    scenario = _scenario_of(seed)
    chance = random.Random(f"hardship/{seed}")
    if not FAULTS_2 or chance.random() >= RARE_FAULTS:
        return scenario
    if chance.random() < AN_HOUR and scenario.network != SHORT:
        return replace(scenario, network=HOURS, seconds=3_800, faults=hour_of(chance))
    targets = _targets(scenario.network, seed, chance)
    faults = rare_faults_of(chance, targets, _hosts(scenario.network))
    return replace(scenario, seconds=30, faults=tuple(sorted(faults, key=lambda f: f.at_us)))


def _scenario_of(seed: int) -> Scenario:
    chance = random.Random(f"scenario/{seed}")
    network = chance.choice(NETWORK_CHOICES)
    if random.Random(f"short/{seed}").random() < NEVER_IDLE:
        network = SHORT
    if network == PAIRS and random.Random(f"shared/{seed}").random() < SHARED:
        return host_scenario_of(seed, checkpoints=bool(options_of(seed).checkpoint_buckets))
    if network == PAIRS:
        network = f"pairs-{chance.randint(1, 8)}"
    seconds: float = chance.choice([6, 10, 15, 25])
    number = chance.choice(NUMBERS)
    targets = _targets(network, seed, chance)
    if network.startswith(PAIRS):
        seconds, generated = 30, hosts_fail(chance, targets, _hosts(network))
    else:
        seconds, generated = _faults_of(chance, targets, seconds, number)
    faults = tuple(sorted(generated, key=lambda fault: fault.at_us))
    return Scenario(f"seed-{seed}", network, seconds, faults, seed)


def _faults_of(
    chance: random.Random, targets: Targets, seconds: float, number: int
) -> tuple[float, list[Fault]]:
    """The seconds and the faults of a run."""
    if chance.random() < 0.5:
        # Lasting failures, as in the trees of Borealis section 3.5; often with short faults before,
        # during or after them.
        generated = [lasting_of(chance, targets) for _ in range(chance.choice([1, 1, 2, 3]))]
        for _ in range(chance.choice([0, 0, 1, 2, 3, 4])):
            generated.append(beside_of(chance, targets, chance.choice(generated)))
        return 25, generated
    # Half of the time no fault begins in the second half, so that calm operation is judged.
    until_s = seconds if chance.random() < 0.5 else seconds / 2
    return seconds, [fault_of(chance, targets, until_s) for _ in range(number)]


def _hosts(network: str) -> list[list[str]]:
    """The nodes of each host, where the network is one of pairs."""
    if not network.startswith(PAIRS):
        return []
    placed = layout_of(NETWORKS[network](), max(2, int(network.rpartition("-")[2])))
    return [list(names) for host, names in placed.items() if host != EDGE]


def _targets(name: str, seed: int, chance: random.Random) -> Targets:
    network = _protected(name, seed)
    replicas = [list(replicas_of(network, part.name)) for part in fragments(network)]
    nodes = [node for names in replicas for node in names]
    sources = [op.name for op in network.sources]
    clients = [f"client-{op.name}" for op in network.outputs]
    everybody = [*nodes, *sources, *clients, "controller"]
    unlucky = chance.choice(chance.choice([nodes, sources, clients, ["controller"]]))
    wipes = options_of(seed).recovery == "replay"
    return Targets(nodes, sources, clients, everybody, replicas, unlucky, wipes)


def _protected(name: str, seed: int) -> Network:
    network = NETWORKS[name]()
    protect(network, seed)
    return network


def options_of(seed: int, network: str = "") -> Options:
    """Random options of the nodes. `hours` and `short` always use large groups of buckets: two
    buckets per step are too slow to correct an hour, or to keep up if a step takes longer than a
    bucket."""
    chance = random.Random(f"options/{seed}")
    one_by_one = network not in (HOURS, SHORT)
    recovery = chance.choice(["replay", "replay", "checkpoint"])
    buckets = [3, 7, 20] if recovery == "checkpoint" else [0, 3, 7, 20]
    return Options(
        recovery="checkpoint" if recovery == "checkpoint" else "replay",
        checkpoint_buckets=chance.choice(buckets),
        group_buckets_max=max(chance.choice([2, 256]), 0 if one_by_one else 256),
        buffer_buckets=chance.choice([None, None, None, 600 if network == SHORT else 24]),
        rejoin=chance.choice(["2s", "6s", "1min"]),
        stall=chance.choice(["4s", "8s"]),
    )


def protect(network: Network, seed: int) -> None:
    """Sets random protections of the fragments; none for seed 0, or if the network has its own."""
    chance, limiting = random.Random(f"protection/{seed}"), random.Random(f"limits/{seed}")
    if network.protections or not seed:
        return
    if chance.random() < 0.2:
        for fragment in fragments(network):
            if (limits := limits_of(network, fragment, limiting)) is not None:
                rows, entries = limits
                network.protect(
                    fragment.name, recovery="cec", recovery_rows=rows, recovery_entries=entries
                )
        return
    x, most = chance.choice(["850ms", "1s", "1500ms"]), chance.choice([1, 2, 2, 3])
    blocks: list[FailurePolicy] = ["block"] if chance.random() < 0.3 else []
    # Also with `recovery='checkpoint'`, some fragments may be rebuilt by replay.
    mixed = random.Random(f"recovery/{seed}")
    three = FAULTS_2 and random.Random(f"three/{seed}").random() < 0.25
    for fragment in fragments(network):
        limits = limits_of(network, fragment, limiting)
        network.protect(
            fragment.name,
            on_failure=chance.choice(["process", "delay", *blocks]),
            while_correcting=chance.choice(["suspend", "delay", "process"]),
            reconcile="undo" if chance.choice([0, 0, 1]) and not limits else "checkpoint",
            max_delay=x,
            replicas=max(chance.randint(1, most), 3 if three else 1),
            recovery="cec" if limits else "replay" if mixed.random() < 0.2 else None,
            recovery_rows=limits and limits[0],
            recovery_entries=limits and limits[1],
        )
