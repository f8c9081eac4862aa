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
    names = [fragment.name for fragment in fragments(network)]
    if hosts is None:
        return {name: (name,) for fragment in names for name in replicas_of(network, fragment)}
    if standby and not pairs_of(network):
        raise InputError(
            f"standby={standby}: only nodes of pairs can move to a standby host, and this network "
            "has no pairs; protect a fragment with replication='pairs', or remove standby"
        )
    # Standby hosts come last, so that their number can change without renaming other hosts.
    placed: dict[str, list[str]] = {EDGE: []} if network.logical is not network else {}
    placed |= {f"host-{n + 1}": [] for n in range(hosts + standby)}
    for order, fragment in enumerate(names):
        nodes = replicas_of(network, fragment)
        if fragment in RESERVED and network.logical is not network:
            placed[EDGE] += nodes
            continue
        if len(nodes) > hosts:
            raise InputError(
                f"hosts={hosts}: fragment {fragment!r} has {len(nodes)} replicas, and no two of "
                f"them may share a host; use at least {len(nodes)} hosts"
            )
        place = partition[1] if (partition := partition_of(network, fragment)) else order
        # With "clusters", the two dataflows use disjoint sets of hosts.
        per_cluster = (
            hosts // len(nodes) if network.protection(fragment).replication == "clusters" else None
        )
        for replica, name in enumerate(nodes):
            number = (
                (place + replica) % hosts
                if per_cluster is None
                else replica * per_cluster + place % per_cluster
            )
            placed[f"host-{number + 1}"].append(name)
    return {host: tuple(nodes) for host, nodes in placed.items()}
