"""Placement of nodes: chained declustering (Flux section 5.4); replicas never share a host."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import InputError
from holdfast.model.fragments import fragment_of
from holdfast.model.layout import layout_of
from holdfast.model.network import Network
from holdfast.model.partitions import one_of_each, physical


def network(partitions: int, replication: Any = "pairs") -> Network:
    net = hf.Network("n", bucket="1s")
    partitioned = net.source("s", "ts timestamp, k string", time="ts").on(
        "sums", by="k", partitions=partitions
    )
    net.output("o", partitioned.window("1s").group_by("k").agg(n=hf.count()))
    if replication is not None:
        net.protect("sums", replicas=2, replication=replication)
    return physical(net)


def test_the_peer_of_a_node_is_on_the_next_host() -> None:
    assert layout_of(network(4), 4, standby=1) == {
        "host-1": ("sums.0", "sums.3@2"),
        "host-2": ("sums.0@2", "sums.1"),
        "host-3": ("sums.1@2", "sums.2"),
        "host-4": ("sums.2@2", "sums.3"),
        "host-5": (),
        "edge": ("ingress", "egress"),
    }
    assert list(layout_of(network(4), 4, standby=1))[-1] == "host-5"


@pytest.mark.parametrize("partitions", range(1, 9))
@pytest.mark.parametrize("hosts", range(2, 9))
@pytest.mark.parametrize("replication", ["pairs", "clusters"])
def test_two_replicas_never_share_a_host(partitions: int, hosts: int, replication: str) -> None:
    layout = layout_of(network(partitions, replication), hosts)
    names = [name for nodes in layout.values() for name in nodes]
    assert len(names) == len(set(names)) == 2 * partitions + 2
    for nodes in layout.values():
        assert len({fragment_of(name) for name in nodes}) == len(nodes)


def test_in_clusters_each_dataflow_has_its_own_hosts() -> None:
    layout = layout_of(network(4, "clusters"), 4)
    assert layout["host-1"] == ("sums.0", "sums.2") and layout["host-2"] == ("sums.1", "sums.3")
    assert layout["host-3"] == ("sums.0@2", "sums.2@2")


def test_without_hosts_every_node_has_its_own_host() -> None:
    assert layout_of(network(1), None) == {
        name: (name,) for name in ("ingress", "sums.0", "sums.0@2", "egress")
    }


def test_unpartitioned_fragments_are_spread_over_hosts() -> None:
    net = hf.Network("n", bucket="1s")
    stream = net.source("s", "ts timestamp, k string", time="ts").on("a").filter("k > ''").on("b")
    net.output("o", stream.filter("k > 'a'"))
    assert layout_of(net, 2) == {"host-1": ("a",), "host-2": ("b",)}


def test_more_replicas_than_hosts_are_refused() -> None:
    net = hf.Network("n", bucket="1s")
    stream = net.source("s", "ts timestamp, k string", time="ts").filter("k > ''")
    net.output("o", stream, contract=hf.Contract(within="5s"))
    net.protect("main", replicas=3)
    with pytest.raises(InputError, match="has 3 replicas, and no two of them may share a host"):
        layout_of(net, 2)


def test_standby_hosts_without_pairs_are_refused() -> None:
    with pytest.raises(InputError, match="only nodes of pairs can move to a standby host"):
        layout_of(network(2, replication=None), 2, standby=1)


def test_a_fragment_name_with_a_number_is_not_a_partition() -> None:
    net = hf.Network("n", bucket="1s")
    stream = net.source("s", "ts timestamp, k string", time="ts").on("v.7").filter("k > ''")
    net.output("o", stream)
    assert layout_of(net, 4)["host-1"] == ("v.7",)
    assert one_of_each(network(3), ["sums.0", "sums.2", "ingress"]) == ["sums.0", "ingress"]


def test_hosts_require_deployment_in_processes() -> None:
    with pytest.raises(InputError, match="deployment='processes'"):
        hf.run(network(2).logical, options=hf.Options(hosts=2))


def test_invalid_hosts_and_standby_are_refused() -> None:
    with pytest.raises(InputError, match="hosts: 1 must be at least 2"):
        hf.Options(hosts=1)
    with pytest.raises(InputError, match=r"standby: 1 needs hosts, .* or remove standby"):
        hf.Options(standby=1)
    with pytest.raises(InputError, match="standby: -1 must be at least 0"):
        hf.Options(standby=-1)
