"""Placement of nodes on hosts. A host is a process; hosts may run on different machines.

Without `hosts`, every node has its own host. With `hosts`, replicas are placed on `host-1` to
`host-N` by chained declustering (Flux section 5.4): the peer of a node is on the next host. The
peers of the nodes of a lost host are therefore spread over other hosts, and no two replicas of a
fragment share a host. The fragments `ingress` and `egress`, which only forward rows, run on the
host `edge`.
"""

from __future__ import annotations

from holdfast.errors import InputError
from holdfast.model.fragments import fragments, pairs_of, replicas_of
from holdfast.model.network import Network
from holdfast.model.partitions import partition_of
from holdfast.model.wellformed import RESERVED

EDGE = "edge"

#: The nodes of each host; a standby host has none.
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
    # Standby hosts come last, so that their number can change without renaming other hosts.
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
        # With "clusters", the two dataflows use disjoint sets of hosts.
        apart = hosts // len(names) if network.protection(part).replication == "clusters" else None
        for copy, name in enumerate(names):
            at = (place + copy) % hosts if apart is None else copy * apart + place % apart
            found[f"host-{at + 1}"].append(name)
    return {host: tuple(names) for host, names in found.items()}
