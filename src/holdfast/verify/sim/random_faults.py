"""Random faults: single faults, lasting failures with short faults beside them, and hosts of pairs
that are lost one after the other."""

from __future__ import annotations

import random
from dataclasses import replace

from holdfast.frozen import dataclass
from holdfast.model.fragments import fragment_of
from holdfast.verify.scenario import Fault

MS = 1_000
HOUR_MS = 3_600_000.0

#: By then a source has opened its stream. The start of a stream is taken from the source's clock,
#: so the clock must not be wrong before.
OPENED_MS = 100


@dataclass(frozen=True, slots=True)
class Targets:
    """Processes that faults may hit."""

    nodes: list[str]
    sources: list[str]
    clients: list[str]
    everybody: list[str]
    #: The replicas of each fragment.
    replicas: list[list[str]]
    #: A process that is hit repeatedly, so that faults meet the traces of earlier ones.
    unlucky: str
    wipes: bool

    def one_of(self, names: list[str], chance: random.Random) -> str:
        return self.unlucky if self.unlucky in names and chance.random() < 0.5 else (
            chance.choice(names)
        )  # fmt: skip


def fault_of(chance: random.Random, targets: Targets, until_s: float) -> Fault:
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
            on = link_of(chance, targets.everybody)
        case _:
            on = targets.one_of(targets.everybody, chance)
    match do:
        case "slow":
            value = chance.choice([3.0, 10.0, 40.0])
        case "skew":
            value = chance.choice([-HOUR_MS, -3_000.0, -400.0, 300.0, 2_000.0, HOUR_MS])
            at_us = max(at_us, OPENED_MS * MS)
        case "delay":
            value = chance.choice([20.0, 200.0, 900.0])
        case "throttle":
            value = chance.choice([1.0, 10.0])
        case "torn":
            value = float(chance.choice([1, 1, 2, 3, 5, 8, 14]))
            for_us = max(for_us, 1_500 * MS)
    return Fault(at_us, do, on, 0 if do == "reset" else for_us, value)


def lasting_of(chance: random.Random, targets: Targets) -> Fault:
    """A single failure that lasts long."""
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


def beside_of(chance: random.Random, targets: Targets, lasting: Fault) -> Fault:
    """A short fault before, during or after a lasting failure."""
    over_us = lasting.at_us + lasting.for_us
    for_us = chance.choice([300, 900, 2_000, 4_000]) * MS
    if chance.random() < 0.4 and lasting.do != "kill":
        # The same fault returns before the recovery is complete.
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
        on = link_of(chance, targets.everybody)
    value = {"torn": float(chance.randint(1, 14)), "slow": chance.choice([3.0, 10.0, 40.0])}
    if do == "reset":
        for_us = 0
    return Fault(at_us - at_us % MS, do, on, for_us, value.get(do, 0.0))


#: Time after which a restarted host has caught up, and the next host may fail.
CAUGHT_UP_MS = 9_000


def hosts_fail(chance: random.Random, targets: Targets, hosts: list[list[str]]) -> list[Fault]:
    """Hosts fail one after the other, each with time to be rebuilt: the failures that pairs promise
    to survive. Meanwhile, processes that recover without a peer may fail, and the new replica may
    fail repeatedly."""
    others = [name for name in targets.everybody if not any(name in host for host in hosts)]
    faults: list[Fault] = []
    at_ms = chance.randrange(1_500, 6_000)
    for _ in range(chance.choice([1, 2, 2])):
        host = chance.choice(hosts)
        gone = host if chance.random() < 0.6 else [chance.choice(host)]
        kind = chance.choice(["kill", "kill", "wipe", "wipe", "torn", "pause", "replace"])
        for_ms = chance.choice([50, 300, 900, 2_500, 4_000, 7_000])
        for name in gone:
            faults.append(death(chance, kind, name, at_ms, for_ms))
        back_ms = at_ms + for_ms
        for _ in range(chance.choice([0, 0, 1, 2, 3])):
            when_ms = chance.randrange(at_ms, back_ms + 2_000)
            do, on = chance.choice(["kill", "torn", "pause"]), chance.choice(others)
            faults.append(death(chance, do, on, when_ms, chance.choice([50, 300, 900])))
        if chance.random() < 0.5:
            # The new replica dies during its rebuild, at any of its writes or between them.
            again = chance.choice(["kill", "torn", "torn", "wipe"])
            when_ms = back_ms + chance.randrange(1, 250)
            faults.append(death(chance, again, chance.choice(gone), when_ms, 300))
        if for_ms == 7_000 and kind in ("kill", "wipe") and chance.random() < 0.5:
            # The unpaired replica has its state on its disk, and restarts from there.
            both = [name for name in targets.nodes if fragment_of(name) == fragment_of(gone[0])]
            (peer,) = [name for name in both if name != gone[0]]
            faults.append(death(chance, "kill", peer, at_ms + 5_000, chance.choice([50, 900])))
        at_ms = back_ms + CAUGHT_UP_MS + chance.randrange(2_000)
    return faults


def death(chance: random.Random, do: str, on: str, at_ms: int, for_ms: int) -> Fault:
    value = float(chance.randint(1, 40)) if do == "torn" else 0.0
    return Fault(at_ms * MS, do, on, for_ms * MS, value)


def link_of(chance: random.Random, everybody: list[str]) -> str:
    """A link from a random subset to another one, in both directions or in one."""
    shuffled = sorted(everybody, key=lambda _: chance.random())
    left = chance.choice([1, 1, max(1, len(shuffled) // 2)])
    right = chance.choice([1, 1, len(shuffled) - left])
    arrow = chance.choice(["<->", "<->", "->"])
    return f"{','.join(shuffled[:left])}{arrow}{','.join(shuffled[left : left + right])}"
