"""Random scenarios with continuous eventual checkpoints: limits that make checkpoints frequent or
rare, nodes that fail together, also at any write, and bits that flip in footprints. As with
`recovery='checkpoint'`, the storage of a node with `recovery='cec'` is not deleted, and what is
damaged is restored later."""

from __future__ import annotations

import random
from dataclasses import replace

from holdfast.model import operators as ops
from holdfast.model.fragments import Fragment, fragment_of, fragments, replicas_of
from holdfast.model.network import Network
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import NETWORKS
from holdfast.verify.sim.random_faults import MS, Targets, death

CEC = "cec"
#: Share of the seeds.
SHARE = 0.08
CEC_NETWORKS = [name for name in sorted(NETWORKS) if name.startswith(CEC)]
#: Share of the scenarios with bits that flip in footprints.
ROTTEN = 0.2
#: Faults after which the storage of a node is empty, old or damaged.
_LOST = {"wipe", "replace", "rot", "restore"}


def limits_of(
    network: Network, part: Fragment, chance: random.Random
) -> tuple[int | None, int | None] | None:
    """Most rows to replay and most entries to read, or None if the fragment recovers otherwise."""
    if not network.name.startswith(CEC):
        return None
    operators = [op for path in part.paths for op in path.operators]
    if not any(isinstance(op, ops.Stateful) for op in operators) and chance.random() < 0.4:
        return None
    rows = chance.choice([1, 15, 40, 40, 120, 120, 400, None])
    return rows, chance.choice([None, None, None, 1, 8, 30])


def survivable(faults: list[Fault], network: Network) -> list[Fault]:
    """The faults, where nodes with `recovery='cec'` are killed instead of losing their
    storage."""
    return [
        replace(fault, do="kill", for_us=fault.for_us or 500 * MS)
        if fault.do in _LOST and network.protection(fragment_of(fault.on)).recovery == "cec"
        else fault
        for fault in faults
    ]


def rotten(chance: random.Random, network: Network, seconds: float) -> list[Fault]:
    """Bits that flip in files of the state, which are restored later, of nodes with
    `recovery='cec'`. Sometimes the node is killed, so that its recovery finds the damage."""
    nodes = [
        node
        for part in fragments(network)
        if network.protection(part.name).recovery == CEC
        for node in replicas_of(network, part.name)
    ]
    faults: list[Fault] = []
    for name in chance.sample(nodes, min(len(nodes), chance.choice([1, 1, 2]))):
        at_ms, for_ms = chance.randrange(1_500, int(600 * seconds)), chance.choice([300, 2_500])
        faults.append(Fault(at_ms * MS, "rot-state", name, for_ms * MS))
        if chance.random() < 0.5:
            faults.append(death(chance, "kill", name, at_ms + chance.randrange(100), 50))
    return faults


def failures_together(chance: random.Random, targets: Targets, until_s: float) -> list[Fault]:
    """Nodes die together several times: all of them, one replica of each fragment, or neighbors;
    sometimes while a source is missing, so that tentative results follow a recovery."""
    faults: list[Fault] = []
    at_ms = chance.randrange(1_000, 6_000)
    while at_ms < 1_000 * until_s:
        first = [names[0] for names in targets.replicas]
        place = chance.randrange(len(first))
        struck = chance.choice([targets.nodes, first, first[place : place + 2]])
        for_ms = chance.choice([50, 300, 900, 2_500])
        for name in struck:
            do, when_ms = chance.choice(["kill", "torn", "torn"]), at_ms + chance.randrange(300)
            fault = death(chance, do, name, when_ms, for_ms)
            if do == "torn":  # the write that fails follows within this time
                fault = replace(fault, for_us=max(fault.for_us, 1_500 * MS))
            faults.append(fault)
        at_ms += for_ms + chance.choice([150, 400, 700, 1_500, 1_500, 4_000])
    if chance.random() < 0.5:
        source, do = chance.choice(targets.sources), chance.choice(["silent", "cut", "cut"])
        on = f"{source}<->{','.join(targets.nodes)}" if do == "cut" else source
        since_ms, for_ms = chance.randrange(1_000, 12_000), chance.randrange(3_000, 15_000)
        faults.append(Fault(since_ms * MS, do, on, for_ms * MS))
    return faults
