"""Scenarios by lot: a seed becomes a network, options and a list of faults.

What is drawn is what the system promises to survive: with `recovery='checkpoint'` no storage is
deleted, and the storage of sources, clients and the controller never is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from holdfast.config import Options
from holdfast.model.fragments import fragment_of, fragments, replicas_of
from holdfast.model.layout import EDGE, layout_of
from holdfast.model.network import Network
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.networks import NETWORKS

MS = 1_000
HOUR_MS = 3_600_000.0
#: A third of the lot; how many partitions is drawn apart.
PAIRS = "pairs"
LOT = [name for name in sorted(NETWORKS) if not name.startswith(PAIRS)]
LOT = sorted([*LOT, *[PAIRS] * (len(LOT) // 2)])


def scenario_of(seed: int) -> Scenario:
    chance = random.Random(f"scenario/{seed}")
    network = chance.choice(LOT)
    if network == PAIRS:
        network = f"pairs-{chance.randint(1, 8)}"
    seconds = chance.choice([6, 10, 15, 25])
    number = chance.choice([0, 1, 2, 4, 6, 8, 10, 12])
    wipes = options_of(seed).recovery == "replay"
    targets = _Targets.of(network, seed, wipes=wipes, chance=chance)
    if network.startswith(PAIRS):
        made = NETWORKS[network]()
        placed = layout_of(made, max(2, int(network.rpartition("-")[2])))
        hosts = [list(names) for host, names in placed.items() if host != EDGE]
        seconds, drawn = 30, _hosts_fail(chance, targets, hosts)
    elif chance.random() < 0.5:
        # Failures that last, as the trees of Borealis section 3.5 speak of; and half of the time
        # something that finds their traces: before, meanwhile, or when they heal.
        seconds = 25
        drawn = [_lasting(chance, targets) for _ in range(chance.choice([1, 1, 2, 3]))]
        for _ in range(chance.choice([0, 0, 1, 2, 3, 4])):
            drawn.append(_beside(chance, targets, chance.choice(drawn)))
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
        rejoin=chance.choice(["2s", "6s", "1min"]),
        stall=chance.choice(["4s", "8s"]),
    )


def protect(network: Network, seed: int) -> None:
    """What the fragments do when inputs are missing: also by lot, and nothing without a seed."""
    chance = random.Random(f"protection/{seed}")
    if network.protections or not seed or chance.random() < 0.2:
        return
    x, most = chance.choice(["850ms", "1s", "1500ms"]), chance.choice([1, 2, 2, 3])
    blocks = ["block"] if chance.random() < 0.3 else []
    for fragment in fragments(network):
        network.protect(
            fragment.name,
            failure=chance.choice(["process", "delay", *blocks]),
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
    clients: list[str]
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
        return _Targets(nodes, sources, clients, everybody, unlucky, wipes)

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
            value = chance.choice([-HOUR_MS, -3_000.0, -400.0, 300.0, 2_000.0, HOUR_MS])
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
    do = chance.choice(
        ["silent", "silent", "silent", "cut", "cut", "cut", "kill", "pause", "delay"]
    )
    on = chance.choice(targets.sources if do == "silent" else targets.nodes + targets.sources)
    if do in ("cut", "delay"):
        others = [name for name in targets.nodes + targets.sources if name != on]
        number = chance.choice([1, 1, 2, len(others)])
        on = f"{on}<->{','.join(chance.sample(others, min(number, len(others))))}"
    at_us, for_us = chance.randrange(2_000, 9_000) * MS, chance.randrange(5, 14) * 1_000 * MS
    return Fault(at_us, do, on, for_us, 3_000.0 if do == "delay" else 0.0)


def _beside(chance: random.Random, targets: _Targets, lasting: Fault) -> Fault:
    """Something short that meets a failure which lasts, or the traces of it."""
    over_us = lasting.at_us + lasting.for_us
    for_us = chance.choice([300, 900, 2_000, 4_000]) * MS
    if chance.random() < 0.4 and lasting.do != "kill":
        # It comes back before it was made good.
        return replace(lasting, at_us=over_us + chance.randrange(20, 600) * MS, for_us=for_us)
    at_us = chance.choice(
        [
            chance.randrange(500 * MS, lasting.at_us),
            chance.randrange(lasting.at_us, over_us + 1),
            chance.randrange(over_us - 500 * MS, over_us + 2_000 * MS),
        ]
    )
    wipes = ["wipe", "replace"] if targets.wipes else []
    do = chance.choice([*wipes, "kill", "kill", "kill", "torn", "pause", "reset", "slow"])
    same = lasting.on in targets.nodes and chance.random() < 0.4
    on = lasting.on if same else chance.choice(targets.nodes)
    if do in ("kill", "pause") and chance.random() < 0.25:
        on = chance.choice(targets.clients)
    if do == "reset":
        on = _link(chance, targets.everybody)
    value = {"torn": float(chance.randint(1, 14)), "slow": chance.choice([3.0, 10.0, 40.0])}
    if do == "reset":
        for_us = 0
    return Fault(at_us - at_us % MS, do, on, for_us, value.get(do, 0.0))


#: After so long a host that came back is as good as any other, and the next one may fail.
CAUGHT_UP_MS = 9_000


def _hosts_fail(chance: random.Random, targets: _Targets, hosts: list[list[str]]) -> list[Fault]:
    """One host after the other, each with time to be made anew: what pairs promise to survive.
    Meanwhile anybody else may fail who can come back alone, and the newcomer again and again."""
    others = [name for name in targets.everybody if not any(name in host for host in hosts)]
    found: list[Fault] = []
    at_ms = chance.randrange(1_500, 6_000)
    for _ in range(chance.choice([1, 2, 2])):
        host = chance.choice(hosts)
        gone = host if chance.random() < 0.6 else [chance.choice(host)]
        how = chance.choice(["kill", "kill", "wipe", "wipe", "torn", "pause", "replace"])
        for_ms = chance.choice([50, 300, 900, 2_500, 4_000, 7_000])
        for name in gone:
            found.append(_death(chance, how, name, at_ms, for_ms))
        back_ms = at_ms + for_ms
        for _ in range(chance.choice([0, 0, 1, 2, 3])):
            when_ms = chance.randrange(at_ms, back_ms + 2_000)
            do, on = chance.choice(["kill", "torn", "pause"]), chance.choice(others)
            found.append(_death(chance, do, on, when_ms, chance.choice([50, 300, 900])))
        if chance.random() < 0.5:
            # The newcomer dies while it is being made, at any of its writes or between them.
            again = chance.choice(["kill", "torn", "torn", "wipe"])
            when_ms = back_ms + chance.randrange(1, 250)
            found.append(_death(chance, again, chance.choice(gone), when_ms, 300))
        if for_ms == 7_000 and how in ("kill", "wipe") and chance.random() < 0.5:
            # Who is left alone has what it knows on its disk, and comes back with that.
            both = [name for name in targets.nodes if fragment_of(name) == fragment_of(gone[0])]
            (partner,) = [name for name in both if name != gone[0]]
            found.append(_death(chance, "kill", partner, at_ms + 5_000, chance.choice([50, 900])))
        at_ms = back_ms + CAUGHT_UP_MS + chance.randrange(2_000)
    return found


def _death(chance: random.Random, do: str, on: str, at_ms: int, for_ms: int) -> Fault:
    value = float(chance.randint(1, 40)) if do == "torn" else 0.0
    return Fault(at_ms * MS, do, on, for_ms * MS, value)


def _link(chance: random.Random, everybody: list[str]) -> str:
    """Any subset against any other, in both directions or in one."""
    shuffled = sorted(everybody, key=lambda _: chance.random())
    left = chance.choice([1, 1, max(1, len(shuffled) // 2)])
    right = chance.choice([1, 1, len(shuffled) - left])
    arrow = chance.choice(["<->", "<->", "->"])
    return f"{','.join(shuffled[:left])}{arrow}{','.join(shuffled[left : left + right])}"
