"""Faults on real processes: validation before a run starts, injection and repair."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import InputError
from holdfast.model.fragments import fragments, producers_of, replicas_of
from holdfast.model.network import Network
from holdfast.verify.chaos.proxy import Link
from holdfast.verify.scenario import KINDS, Fault, Scenario, ends_of

if TYPE_CHECKING:
    from holdfast.verify.chaos.deployment import Deployment

#: The name that scenarios use for all clients of a run.
CLIENT = "client"
#: Longest wait for the successor of a replaced process, in seconds.
REPLACED_S = 60.0


def links_of(network: Network) -> list[tuple[str, str]]:
    """Return all (producer, consumer) links: sources and nodes to nodes, nodes to clients."""
    producers = producers_of(network)
    found = []
    for part in fragments(network):
        for node in replicas_of(network, part.name):
            found += [(producer, node) for stream in part.inputs for producer in producers[stream]]
            if any(op.name in part.outputs for op in network.outputs):
                found.append((node, CLIENT))
    return list(dict.fromkeys(found))


def check(scenario: Scenario, network: Network) -> None:
    """Raise InputError for the first fault that cannot be injected into real processes."""
    nodes = [node for part in fragments(network) for node in replicas_of(network, part.name)]
    sources = [op.name for op in network.sources]
    for number, fault in enumerate(scenario.faults, 1):
        where = f"scenario {scenario.name!r}, fault {number} ({fault})"
        kind = KINDS[fault.do]
        if kind.simulated_only:
            able = ", ".join(name for name, kind in KINDS.items() if not kind.simulated_only)
            raise InputError(f"{where}: {fault.do} is for the simulator only; here: {able}")
        if kind.target == "link":
            _check_link(fault, network, where)
        elif kind.target == "source":
            if fault.on not in sources:
                raise InputError(f"{where}: hits a source, one of {', '.join(sources)}")
        elif fault.on in sources:
            raise InputError(
                f"{where}: sources live in the process of the harness, which it would end itself; "
                "simulate it, or make the source `silent`"
            )
        elif fault.on == CLIENT:
            if fault.do != "pause":
                raise InputError(
                    f"{where}: clients live in the process of the harness; they can only pause"
                )
        elif fault.on not in nodes:
            raise InputError(f"{where}: hits a node, one of {', '.join(nodes)}")


def _check_link(fault: Fault, network: Network, where: str) -> None:
    links = links_of(network)
    for one, other in ends_of(fault.on):
        if (one, other) not in links and (other, one) not in links:
            known = ", ".join(f"{producer}->{reader}" for producer, reader in links)
            raise InputError(
                f"{where}: nobody sends rows from {one!r} to {other!r} (links: {known})"
            )


def apply(fault: Fault, to: Deployment) -> Callable[[], None]:
    """Inject the fault. Returns the function that repairs it."""
    match fault.do:
        case "kill" | "wipe" | "pause" | "replace":
            return _apply_to_process(fault, to)
        case "silent":
            to.pusher.silence(fault.on)
            return lambda: to.pusher.speak(fault.on)
        case _:
            return _apply_to_links(fault, to)


def _apply_to_process(fault: Fault, to: Deployment) -> Callable[[], None]:
    if fault.on == CLIENT:
        to.pause_clients()
        return to.resume_clients
    process = to.run.processes[fault.on]
    match fault.do:
        case "kill":
            process.kill(restart_after_s=fault.for_us / 1e6)
            return _by_itself
        case "wipe":

            def wipe() -> None:
                to.watcher.look_into_logs()
                shutil.rmtree(process.folder, ignore_errors=True)

            process.kill(restart_after_s=fault.for_us / 1e6, before_restart=wipe)
            return _by_itself
        case "replace":
            before = to.run.controller.address(fault.on)
            process.pause()
            process.replace()

            def wake() -> None:
                # The successor replaces the paused process only after its JVM has started.
                to.wait(lambda: to.run.controller.address(fault.on) != before, REPLACED_S)
                process.resume()

            return wake
        case _:
            process.pause()
    return process.resume


def _apply_to_links(fault: Fault, to: Deployment) -> Callable[[], None]:
    """Inject a link fault. `a->b` means bytes from `a` to `b`, whichever end connected."""
    hit = [(link, sender) for one, other in ends_of(fault.on)
           for link, sender in to.links(one, other)]  # fmt: skip

    def each(change: Callable[[Link, str], None]) -> None:
        for link, sender in hit:
            change(link, sender)

    match fault.do:
        case "cut":
            each(lambda link, sender: link.cut(sender))
            return lambda: each(lambda link, sender: link.mend(sender))
        case "delay":
            each(lambda link, sender: link.delay(fault.value, sender))
            return lambda: each(lambda link, sender: link.delay(0, sender))
        case "throttle":
            each(lambda link, sender: link.throttle(fault.value, sender))
            return lambda: each(lambda link, sender: link.throttle(0, sender))
        case "reset":
            each(lambda link, sender: link.reset())
            return _by_itself
    raise AssertionError(fault.do)


def _by_itself() -> None:
    """Do nothing: the fault ends without the harness."""
