"""Hosts and nodes of a run that are not healthy, and the outputs that have no replica left.

Hosts report the health of their nodes with heartbeats; the supervisor reports the health of hosts.
`core.quarantine` decides how to react. This module collects the reports for status, metrics and
log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.clock import monotonic_us, now_us
from holdfast.cluster.supervisor import HostProcess
from holdfast.core.quarantine import PartStatus, kind_of, stopped
from holdfast.model.fragments import fragments, replicas_of
from holdfast.model.network import Network
from holdfast.runtime.failures import Failures

_log = logging.getLogger("holdfast.parts")
#: Interval between two checks for stopped outputs.
LOOK_S = 0.5
#: Host name of nodes that run in the process of the run.
HERE = "local"


class Parts:
    def __init__(
        self,
        network: Network,
        processes: Mapping[str, HostProcess],
        assigned: Callable[[str], list[str]],
        reported: Callable[[str], Mapping[str, PartStatus]],
        differs: Callable[[], Mapping[str, Sequence[str]]] = dict,
        recovery_ms: Callable[[], Mapping[str, Mapping[str, int]]] = dict,
        failures: Failures | None = None,
    ) -> None:
        """`assigned` and `reported`: the nodes of a host, and the unhealthy nodes that it reported.
        `differs`: differences between the results of replicas. `recovery_ms`: predicted times of
        recoveries by node and path, of nodes in other processes. `failures`: set for a run without
        hosts, whose nodes run in its own process."""
        self._processes, self._assigned, self._reported = processes, assigned, reported
        self._failures = failures
        self.differs, self.recovery_ms = differs, recovery_ms
        self._needs = {op.name: _needs(network, op.name) for op in network.outputs}

    def hosts(self) -> dict[str, PartStatus]:
        at = monotonic_us()
        conditions = {host: process.condition for host, process in list(self._processes.items())}
        return {host: one.status(at, host) for host, one in conditions.items() if one is not None}

    def nodes(self) -> dict[str, PartStatus]:
        return {
            name: status
            for host in list(self._processes)
            for name, status in self._reported(host).items()
        }

    def status(self) -> list[dict[str, Any]]:
        """All unhealthy hosts and nodes, as `status` reports them."""
        hosts = [_body("host", host, host, one) for host, one in self.hosts().items()]
        nodes = [
            _body("node", name, host, one)
            for host in list(self._processes)
            for name, one in self._reported(host).items()
        ]
        return hosts + nodes + self._failed_here()

    def _failed_here(self) -> list[dict[str, Any]]:
        """Failed nodes of this process, which are not restarted automatically."""
        failed = [] if self._failures is None else self._failures.all()
        return [
            _body("node", failure.node, HERE, PartStatus(
                kind="refused" if failure.error is None else kind_of(failure.error),
                reason=failure.message, remedy=failure.remedy, failures=1, quarantined=True,
                out=True, final=True, for_ms=(now_us() - failure.at) // 1_000, retry_in_ms=None,
            ))
            for failure in failed
            if failure.kind == "node" and failure.permanent
        ]  # fmt: skip

    def gone(self, *, final: bool = False) -> dict[str, tuple[str, PartStatus]]:
        """The nodes that currently give no results, with the failed component (the node or its
        host) and its status; with `final` only nodes that are not restarted automatically."""
        nodes = self.nodes().items()
        why = {name: (f"node {name}", one) for name, one in nodes if _out(one, final)}
        for host, one in self.hosts().items():
            if _out(one, final):
                why |= dict.fromkeys(self._assigned(host), (f"host {host}", one))
        return why

    def stopped(self) -> dict[str, str]:
        """The outputs that currently give no results, and why."""
        if self._failures is not None:
            lost = {output: self._failures.why_lost(output) for output in self._needs}
            return {output: text for output, text in lost.items() if text is not None}
        why = {
            name: f"{component} {status.text}" for name, (component, status) in self.gone().items()
        }
        return {
            output: "; ".join(dict.fromkeys(why[name] for name in gone))
            for output, gone in stopped(self._needs, why).items()
        }

    def settled(self, host: str) -> bool:
        """Whether waiting for the host is useless: the host, or each of its nodes, is out of
        service."""
        host_status = self.hosts().get(host)
        node_statuses = self._reported(host)
        nodes = self._assigned(host)
        return (host_status is not None and host_status.out) or (
            bool(nodes) and all(name in node_statuses and node_statuses[name].out for name in nodes)
        )

    def watch(self, stop: threading.Event, looked: Callable[[], None] = lambda: None) -> None:
        """Log which outputs stop and which continue."""
        previous: dict[str, str] = {}
        while not stop.wait(LOOK_S):
            looked()
            current = self.stopped()
            for output in current.keys() - previous.keys():
                _log.error("output %s stopped, no replica is left: %s", output, current[output])
            for output in previous.keys() - current.keys():
                _log.warning("output %s continues, a replica is available again", output)
            previous = current


def _body(what: str, part: str, host: str, status: PartStatus) -> dict[str, Any]:
    return {"part": part, "what": what, "host": host, "state": status.state} | asdict(status)


def _out(status: PartStatus, final: bool) -> bool:
    return status.final if final else status.out


def _needs(network: Network, output: str) -> list[tuple[str, ...]]:
    """The replicas of every fragment that an output depends on."""
    all_fragments = fragments(network)
    producer_of = {stream: fragment for fragment in all_fragments for stream in fragment.outputs}
    replicas: dict[str, tuple[str, ...]] = {}
    streams = [output]
    while streams:
        fragment = producer_of.get(streams.pop())
        if fragment is not None and fragment.name not in replicas:
            replicas[fragment.name] = replicas_of(network, fragment.name)
            streams += fragment.inputs
    return list(replicas.values())
