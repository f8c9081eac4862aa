"""Random scenarios with shared hosts: hosts are lost one after the other, sometimes together with
the standby that takes over their nodes, or with the controller. The faults are limited to those
that pairs promise to survive: never both replicas of a fragment, and enough time for a rebuild
between two hosts. Without checkpoints a restarted node cannot use its disk, so a standby that may
already run nodes is not hit."""

from __future__ import annotations

import random

from holdfast.model.layout import EDGE, Layout, layout_of
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.networks import HOSTS, NETWORKS

MS = 1_000
#: Time after which a restarted host has caught up, and the next host may fail.
CAUGHT_UP_MS = 9_000


def host_scenario_of(seed: int, *, checkpoints: bool) -> Scenario:
    chance = random.Random(f"hosts/{seed}")
    name = chance.choice(sorted(HOSTS))
    network = NETWORKS[name]()
    layout = layout_of(network, *HOSTS[name])
    others = [EDGE, *(op.name for op in network.sources)]
    others += [f"client-{op.name}" for op in network.outputs]
    generated: list[Fault] = []
    at_ms = chance.randrange(1_500, 6_000)
    for number in range(chance.choice([1, 2, 2, 3])):
        for_ms = chance.choice([50, 300, 900, 2_500, 4_000, 7_000])
        idle = number == 0  # the standby has not taken over any node yet
        generated += _lost(chance, layout, others, at_ms, for_ms, standby=checkpoints or idle)
        at_ms += for_ms + CAUGHT_UP_MS + chance.randrange(2_000)
    faults = tuple(sorted(generated, key=lambda fault: fault.at_us))
    return Scenario(f"seed-{seed}", name, at_ms / 1_000, faults, seed)


def _lost(
    chance: random.Random,
    layout: Layout,
    others: list[str],
    at_ms: int,
    for_ms: int,
    *,
    standby: bool,
) -> list[Fault]:
    hosts = [host for host in layout if host != EDGE]
    host = chance.choice(hosts)
    kind = chance.choice(["kill", "kill", "wipe", "wipe", "pause", "cut"])
    on = host
    if kind == "cut":
        apart = [host, *layout[host]]
        rest = [name for other, names in layout.items() if other != host for name in names]
        on = f"{','.join(apart)}<->{','.join([*rest, *others, 'controller'])}"
    faults = [Fault(at_ms * MS, kind, on, for_ms * MS)]
    if chance.random() < 0.4:
        # The standby dies, idle or during its take-over.
        next_one = chance.choice([h for h in hosts if h != host and not layout[h]] or [host])
        when_ms = at_ms + chance.randrange(-500, 3_000)
        fault = Fault(when_ms * MS, "kill", next_one, chance.choice([50, 400, 2_000]) * MS)
        faults += [fault] if standby else []
    if chance.random() < 0.4:
        when_ms = at_ms + chance.randrange(-500, 1_500)
        kind = chance.choice(["kill", "kill", "pause"])
        for_us = chance.choice([50, 900, 3_000]) * MS
        faults.append(Fault(when_ms * MS, kind, "controller", for_us))
    return faults
