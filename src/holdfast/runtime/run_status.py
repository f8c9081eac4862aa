"""The status of a run, as one JSON object."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.streams.calls import GetNodeStatus
from holdfast.transport.flight import FlightPeer

if TYPE_CHECKING:
    from holdfast.runtime.running import Run


def status_of(run: Run) -> dict[str, Any]:
    # While the run starts, the nodes of this process are incomplete.
    nodes = [] if run.state == "starting" else [node.status() for node in run.nodes.values()]
    hosted: list[tuple[str, dict[str, Any]]] = []
    for host, process in run.processes.items():
        process_info = {"host": host, "pid": process.pid, "restarts": process.restarts}
        hosted += [(name, process_info) for name in run.controller.assigned(host)]
    if hosted and run.state != "stopped":
        with ThreadPoolExecutor(len(hosted)) as pool:  # a hung node does not delay the others
            statuses = pool.map(partial(node_status, run), [name for name, _ in hosted])
            nodes += [
                status | process_info
                for status, (_, process_info) in zip(statuses, hosted, strict=True)
            ]
    return {
        "network": run.network.name,
        "deployment": run.deployment,
        "state": run.state,
        "pid": os.getpid(),
        "bucket_us": run.network.width_us,
        "sources": {name: source.status() for name, source in run.sources.items()},
        "nodes": nodes,
        "hosts": {host: run.controller.assigned(host) for host in run.processes},
        "processes": {
            host: {"pid": process.pid, "restarts": process.restarts}
            for host, process in run.processes.items()
        },
        "clients": {
            client.name.removeprefix("client-"): {
                "output": client.output,
                "position": client.position,
                "tentative_upto": client.tentative_upto,
                "tentative_rows": client.tentative_rows,
                "replacements": client.replacements,
                "reads": client.switches[-1][0] if client.switches else None,
                "switches": max(0, len(client.switches) - 1),
                "reconnects": client.reconnects,
            }
            for client in run.clients
        },
        "contracts": run.monitor.contracts(),
        "failures": [
            failure.body() for failure in (*run.failures.all(), *run.failures.troubles(nodes))
        ],
        "unhealthy": run.parts.status(),
        "differs": run.parts.differs(),
        "stopped": run.parts.stopped(),
    }


def node_status(run: Run, node: str) -> dict[str, Any]:
    """The status of a node in another process, as the node reports it."""
    address = run.controller.address(node)
    if address is None:
        return {"node": node}
    try:
        peer = FlightPeer(address, silence_s=run.options.silence_s)
        status = peer.call(GetNodeStatus()).body
        peer.close()
        return status
    except HoldfastError as err:
        return {"node": node, "failure": str(err)}
