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
    links = []
    for fragment in fragments(network):
        for node in replicas_of(network, fragment.name):
            links += [
                (producer, node) for stream in fragment.inputs for producer in producers[stream]
            ]
            if any(op.name in fragment.outputs for op in network.outputs):
                links.append((node, CLIENT))
    return list(dict.fromkeys(links))


def check(scenario: Scenario, network: Network) -> None:
    """Raise InputError for the first fault that cannot be injected into real processes."""
    nodes = [
        node for fragment in fragments(network) for node in replicas_of(network, fragment.name)
    ]
    sources = [op.name for op in network.sources]
    for number, fault in enumerate(scenario.faults, 1):
        where = f"scenario {scenario.name!r}, fault {number} ({fault})"
        kind = KINDS[fault.do]
        if kind.simulated_only:
            possible = ", ".join(name for name, kind in KINDS.items() if not kind.simulated_only)
            raise InputError(
                f"{where}: {fault.do} works only in the simulator; faults for real processes: "
                f"{possible}"
            )
        if kind.target == "link":
            _check_link(fault, network, where)
        elif kind.target == "source":
            if fault.on not in sources:
                raise InputError(
                    f"{where}: expected a source as the target, one of {', '.join(sources)}"
                )
        elif fault.on in sources:
            raise InputError(
                f"{where}: sources run in the process of the harness, which this fault would "
                "terminate; use the simulator, or the fault `silent`"
            )
        elif fault.on == CLIENT:
            if fault.do != "pause":
                raise InputError(
                    f"{where}: clients run in the process of the harness, which allows only `pause`"
                )
        elif fault.on not in nodes:
            raise InputError(f"{where}: expected a node as the target, one of {', '.join(nodes)}")


def _check_link(fault: Fault, network: Network, where: str) -> None:
    links = links_of(network)
    for one, other in ends_of(fault.on):
        if (one, other) not in links and (other, one) not in links:
            existing = ", ".join(f"{producer}->{consumer}" for producer, consumer in links)
            raise InputError(
                f"{where}: there is no link between {one!r} and {other!r} (links: {existing})"
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
    affected = [(link, sender) for one, other in ends_of(fault.on)
                for link, sender in to.links(one, other)]  # fmt: skip

    def each(change: Callable[[Link, str], None]) -> None:
        for link, sender in affected:
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
