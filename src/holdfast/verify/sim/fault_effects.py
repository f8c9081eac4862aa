"""Injects the faults of a scenario into a simulated run, and heals them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from holdfast.engine.state import Version
from holdfast.errors import InputError
from holdfast.node.node_events import Work
from holdfast.verify.scenario import KINDS, Fault, Scenario, ends_of
from holdfast.verify.sim import inspection
from holdfast.verify.sim.links import Link, Server
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_run import Cast
from holdfast.verify.sim.sources import SourceProcess

Heal = Callable[[], None]
#: Maximum time for which a source feels the effects of a clock fault after the clock is correct.
UNSTEADY_US = 7_000_000


def spelled_out(scenario: Scenario, cast: Cast) -> Scenario:
    """Expands `client` to all clients, as in scenarios for real processes. Raises `InputError` for
    a fault whose target does not exist."""
    names = [client.name for client in cast.clients]
    faults: list[Fault] = []
    for fault in scenario.faults:
        if fault.on == "client":
            faults += [replace(fault, on=name) for name in names]
        else:
            on = re.sub(r"\bclient\b(?!-)", ",".join(names), fault.on)
            faults.append(replace(fault, on=on))
    for fault in faults:
        _check(fault, cast, scenario.name)
    return replace(scenario, faults=tuple(faults))


def _check(fault: Fault, cast: Cast, scenario: str) -> None:
    kind = KINDS[fault.do]
    targets = [fault.on]
    if kind.target == "link":
        targets = [name for pair in ends_of(fault.on) for name in pair]
    for name in targets:
        process = cast.by_name.get(name)
        if process is None:
            raise InputError(
                f"{scenario}: {fault}: no such target; choose from {', '.join(cast.by_name)}"
            )
        wanted = {"node": NodeProcess, "source": SourceProcess}.get(kind.target)
        if wanted is not None and not isinstance(process, wanted):
            raise InputError(
                f"{scenario}: {fault}: the target of {fault.do} must be a {kind.target}"
            )


def apply(fault: Fault, cast: Cast) -> Heal:
    """Injects a fault; the returned function heals the fault."""
    if KINDS[fault.do].target == "link":
        return _apply_to_links(fault, cast)
    process = cast.by_name[fault.on]
    match fault.do:
        case "kill" | "wipe":
            process.die("killed")
            if fault.do == "wipe":
                for disk in process.disks():
                    disk.wipe()
            return lambda: cast.start(process)
        case "torn":
            process.disk.crash_after = int(fault.value)

            def recover() -> None:
                process.disk.crash_after = None
                cast.start(process)

            return recover
        case "pause":
            process.pause()
            return process.resume
        case "full":
            process.disk.full = True
            return lambda: setattr(process.disk, "full", False)
        case "eio-read":
            process.disk.unreadable = True
            return lambda: setattr(process.disk, "unreadable", False)
        case "eio-fsync":
            process.disk.unsyncable = True
            return lambda: setattr(process.disk, "unsyncable", False)
        case "rot" | "rot-state":
            is_state = fault.do == "rot-state"
            path, restore = process.disk.rot(state=is_state) or (None, lambda: None)
            process.disk.rotten = is_state and path is not None
            process.world.say(process.name, "bit flipped in", path)

            def restart_repaired() -> None:
                """An operator restores the file from a backup and restarts the host."""
                restore()
                process.disk.rotten = False
                process.die("killed")
                cast.start(process)

            return restart_repaired if is_state else lambda: None
        case "skew" | "clock":
            return _set_clock(process, int(fault.value * 1_000))
        case "silent":
            assert isinstance(process, SourceProcess)
            process.silent = True
            return lambda: setattr(process, "silent", False)
        case "retire":
            assert isinstance(process, SourceProcess)
            process.silent = True
            return process.retire
        case "end":
            assert isinstance(process, SourceProcess)
            process.finish()
            return lambda: None
        case "restore":
            copies = [(disk, disk.copied()) for disk in process.disks()]

            def restart() -> None:
                process.die("killed")
                for disk, copy in copies:
                    disk.restore(copy)
                cast.start(process)

            return restart
    assert isinstance(process, NodeProcess)
    if fault.do == "hang":
        return _hang(process)
    if fault.do == "slow":
        process.slowness = fault.value
        return lambda: setattr(process, "slowness", 1.0)
    assert fault.do == "replace", fault
    if not process.is_up:  # the node has not registered yet, so there is no instance to replace
        process.die("killed")
        return lambda: cast.start(process)
    cast.replace(process)
    return process.resume


def is_felt(fault: Fault, cast: Cast, over_us: int) -> bool:
    """Whether a fault still has effects after it was healed. Messages sent over a slow link arrive
    late, and later messages do not overtake them. A source follows a corrected clock only after the
    clock has been steady for a while."""
    if fault.do == "delay":
        return cast.world.now < over_us + int(fault.value * 1_000)
    if fault.do not in ("clock", "skew"):
        return False
    process = cast.by_name[fault.on]
    unsteady = cast.world.now < process.unsteady_until
    return unsteady and isinstance(process, SourceProcess) and inspection.is_apart(process)


def _set_clock(process: Server, off_us: int) -> Heal:
    process.offset_us += off_us

    def restore() -> None:
        """A source whose clock was ahead closes no bucket until time has caught up with the clock;
        the source waits for a limited time only, however far ahead the clock was."""
        process.offset_us -= off_us
        process.unsteady_until = process.world.now + min(abs(off_us), UNSTEADY_US)

    return restore


def _hang(node: NodeProcess) -> Heal:
    """Running steps complete, but no other step begins in this life of the node."""
    if node.hung:
        return lambda: None
    postponed: list[tuple[Work, Version]] = []
    life, run = node.life, node.run

    def hung_run(work: Work, version: Version) -> None:
        if node.hung:
            postponed.append((work, version))
        else:
            run(work, version)

    def resume() -> None:
        if not node.hung or node.life != life:
            return
        node.hung_in = None
        for work, version in postponed:
            node.after(0, partial(run, work, version))

    node.hung_in = life
    node.__dict__["run"] = hung_run
    return resume


def _apply_to_links(fault: Fault, cast: Cast) -> Heal:
    pairs = ends_of(fault.on)
    links = [cast.wire.link(a, b) for a, b in pairs]

    def each(change: Callable[[Link], None]) -> None:
        for link in links:
            change(link)

    def add(name: str, amount: int) -> Heal:
        """Faults may overlap: each fault removes only the amount that it added."""
        each(lambda link: setattr(link, name, getattr(link, name) + amount))
        return lambda: each(lambda link: setattr(link, name, getattr(link, name) - amount))

    match fault.do:
        case "delay":
            return add("delay_us", int(fault.value * 1_000))
        case "throttle":
            return add("row_us", int(30_000 / fault.value))
        case "reset":
            for process in cast.by_name.values():
                for connection in process.connections:
                    ends = (process.name, connection.follower.consumer.name)
                    if ends in pairs or ends[::-1] in pairs:
                        connection.reset()
            return lambda: None
        case _:
            return add(fault.do, 1)
