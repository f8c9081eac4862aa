"""Rare faults, most of which leave a component up but unreliable: nodes that are alive but make no
progress, disks that fail or rot, clock steps, links that are cut in one direction, inputs that are
always late; and failures that coincide, or last for an hour."""

from __future__ import annotations

import random
from collections.abc import Callable

from holdfast.verify.scenario import Fault
from holdfast.verify.sim.random_faults import MS, Targets, death, lasting_of

HOUR_MS = 3_600_000
#: The network for failures of an hour.
HOURS = "hours"

RareFault = Callable[[random.Random, Targets], list[Fault]]


def rare_faults_of(chance: random.Random, targets: Targets, hosts: list[list[str]]) -> list[Fault]:
    """One or two kinds of rare faults, sometimes with a lasting failure beside them. Of a pair,
    only one replica is ever hit: pairs promise to survive no more."""
    if hosts:
        return _of_pairs(chance, targets, hosts)
    faults: list[Fault] = []
    for _ in range(chance.choice([1, 1, 2])):
        faults += chance.choice(RARE_FAULTS)(chance, targets)
    if chance.random() < 0.4:
        faults.append(lasting_of(chance, targets))
    return faults


def hour_of(chance: random.Random) -> tuple[Fault, ...]:
    """A source is away for an hour; sometimes another process is killed or paused meanwhile."""
    at_ms = chance.randrange(20_000, 60_000)
    do, on = chance.choice([("silent", "s2"), ("cut", "s2<->main,main@2"), ("kill", "s2")])
    faults = [Fault(at_ms * MS, do, on, HOUR_MS * MS)]
    for _ in range(chance.choice([0, 1, 2])):
        when_ms = at_ms + chance.randrange(HOUR_MS)
        target = chance.choice(["main", "main@2", "client-windows", "controller"])
        faults.append(death(chance, chance.choice(["kill", "pause"]), target, when_ms, 3_000))
    return tuple(sorted(faults, key=lambda fault: fault.at_us))


# -- one kind of random fault each ----------------------------------------------------------------


def _hang(chance: random.Random, targets: Targets) -> list[Fault]:
    return [_during(chance, "hang", chance.choice(targets.nodes))]


def _clock(chance: random.Random, targets: Targets) -> list[Fault]:
    """The clock of any process is stepped one hour ahead or back, for a short or long time."""
    off_ms = chance.choice([-HOUR_MS, HOUR_MS])
    at_ms, for_ms = chance.randrange(1_500, 12_000), chance.choice([200, 1_000, 4_000, 9_000])
    return [Fault(at_ms * MS, "clock", chance.choice(targets.everybody), for_ms * MS, off_ms)]


def _disk(chance: random.Random, targets: Targets) -> list[Fault]:
    """A disk fault of a node; bits rot only on nodes that can be rebuilt."""
    several = [name for names in targets.replicas if len(names) > 1 for name in names]
    rots = ["rot", "rot"] if targets.wipes and several else []
    do = chance.choice([*rots, "full", "eio-read", "eio-fsync"])
    on = chance.choice(several if do == "rot" else targets.nodes)
    return [_during(chance, do, on)]


def _stuck_when_it_heals(chance: random.Random, targets: Targets) -> list[Fault]:
    """When a failure heals and all replicas correct, a node cannot, and others may wait for it."""
    lasting = lasting_of(chance, targets)
    over_ms = (lasting.at_us + lasting.for_us) // MS
    do, on = chance.choice(["full", "hang", "slow", "kill"]), chance.choice(targets.nodes)
    at_ms = over_ms + chance.randrange(-300, 1_500)
    value = 40.0 if do == "slow" else 0.0
    return [lasting, Fault(at_ms * MS, do, on, chance.choice([4_000, 9_000]) * MS, value)]


def _one_way(chance: random.Random, targets: Targets) -> list[Fault]:
    a, b = chance.sample(targets.everybody, 2)
    return [_during(chance, "cut", f"{a}->{b}")]


def _late(chance: random.Random, targets: Targets) -> list[Fault]:
    """An input that is late from start to end."""
    source, for_us = chance.choice(targets.sources), 26_000 * MS
    if chance.random() < 0.5:
        return [Fault(1_000 * MS, "skew", source, for_us, -chance.choice([900.0, 3e3, 8e3]))]
    link = f"{source}->{','.join(targets.nodes)}"
    return [Fault(1_000 * MS, "delay", link, for_us, chance.choice([400.0, 1_500.0, 6_000.0]))]


def _restarts(chance: random.Random, targets: Targets) -> list[Fault]:
    """While a source is away, nodes are restarted one after the other."""
    source, at_ms = chance.choice(targets.sources), chance.randrange(5_000, 9_000)
    do = chance.choice(["silent", "cut", "kill"])
    on = f"{source}<->{','.join(targets.nodes)}" if do == "cut" else source
    faults = [Fault(at_ms * MS, do, on, 17_000 * MS)]
    for names in targets.replicas:
        when_ms = at_ms + chance.randrange(500, 3_000)
        for name in names:
            faults.append(death(chance, "kill", name, when_ms, chance.choice([100, 600, 1_500])))
            when_ms += chance.randrange(1_000, 5_000)
    return faults


RARE_FAULTS: tuple[RareFault, ...] = (
    _hang, _clock, _disk, _stuck_when_it_heals, _one_way, _late, _restarts,
)  # fmt: skip


def _of_pairs(chance: random.Random, targets: Targets, hosts: list[list[str]]) -> list[Fault]:
    host = chance.choice(hosts)
    others = [name for name in targets.everybody if not any(name in names for names in hosts)]
    match chance.choice(["full", "hang", "eio", "rot", "one way", "clock", "controller"]):
        case "full":
            return [_during(chance, "full", chance.choice(host))]
        case "hang":
            return [_during(chance, "hang", name) for name in _some(chance, host)]
        case "eio":
            do = chance.choice(["eio-read", "eio-fsync"])
            return [_during(chance, do, name) for name in _some(chance, host)]
        case "rot":
            return [_during(chance, "rot", chance.choice(host))]
        case "one way":
            name, other = chance.choice(host), chance.choice([*others, *targets.nodes])
            if name == other:
                other = "controller"
            ends = (name, other) if chance.random() < 0.5 else (other, name)
            return [_during(chance, "cut", "->".join(ends))]
        case "clock":
            return _clock(chance, targets)
        case _:
            # The controller and a host are lost together.
            at_ms, kind = chance.randrange(2_000, 9_000), chance.choice(["kill", "wipe", "pause"])
            away_ms = chance.choice([300, 2_500, 8_000])
            gone = [death(chance, kind, name, at_ms, away_ms) for name in host]
            back_ms = chance.choice([500, 3_000, 7_000])
            return [*gone, death(chance, "kill", "controller", at_ms, back_ms)]


def _during(chance: random.Random, do: str, on: str) -> Fault:
    at_ms = chance.randrange(2_000, 10_000)
    for_ms = 0 if do == "rot" else chance.choice([700, 2_500, 6_000, 12_000])
    return Fault(at_ms * MS, do, on, for_ms * MS)


def _some(chance: random.Random, host: list[str]) -> list[str]:
    return host if chance.random() < 0.5 else [chance.choice(host)]
