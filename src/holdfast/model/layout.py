"""Which host runs which node. A host is a process, on a machine of its own if there are several.

Without `hosts` every node is a host of its own. With it, copies are spread over `host-1` to
`host-N` by chained declustering (Flux section 5.4): the copy of what a host runs is on the next
one, so a lost host costs each of the others little, and two copies never share one. What only
passes rows on, `ingress` and `egress`, stands apart in a host `edge`.
"""

from __future__ import annotations

from holdfast.errors import InputError
from holdfast.model.fragments import fragments, pairs_of, replicas_of
from holdfast.model.network import Network
from holdfast.model.partitions import partition_of
from holdfast.model.wellformed import RESERVED

EDGE = "edge"

#: The nodes of each host; those that stand by have none.
Layout = dict[str, tuple[str, ...]]


def layout_of(network: Network, hosts: int | None, standby: int = 0) -> Layout:
    parts = [part.name for part in fragments(network)]
    if hosts is None:
        return {name: (name,) for part in parts for name in replicas_of(network, part)}
    if standby and not pairs_of(network):
        raise InputError(
            "standby: only nodes of pairs can be moved to another host, and there are none; "
            "protect a fragment with replication='pairs', or leave it out"
        )
    # Those that stand by come last: there may be more or fewer another time.
    found: dict[str, list[str]] = {EDGE: []} if network.logical is not network else {}
    found |= {f"host-{n + 1}": [] for n in range(hosts + standby)}
    for order, part in enumerate(parts):
        names = replicas_of(network, part)
        if part in RESERVED and network.logical is not network:
            found[EDGE] += names
            continue
        if len(names) > hosts:
            raise InputError(
                f"hosts={hosts}: fragment {part!r} has {len(names)} replicas, and no two of them "
                f"may share a host; give at least {len(names)}"
            )
        place = partition[1] if (partition := partition_of(network, part)) else order
        # In clusters, each copy of the dataflow has hosts of its own.
        apart = hosts // len(names) if network.protection(part).replication == "clusters" else None
        for copy, name in enumerate(names):
            at = (place + copy) % hosts if apart is None else copy * apart + place % apart
            found[f"host-{at + 1}"].append(name)
    return {host: tuple(names) for host, names in found.items()}
