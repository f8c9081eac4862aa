"""Placement: chained declustering (Flux section 5.4), and what may not share a host."""

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
    taken = net.source("s", "ts timestamp, k string", time="ts").on(
        "sums", by="k", partitions=partitions
    )
    net.output("o", taken.window("1s").group_by("k").agg(n=hf.count()))
    if replication is not None:
        net.protect("sums", replicas=2, replication=replication)
    return physical(net)


def test_the_copy_of_what_a_host_runs_is_on_the_next() -> None:
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
@pytest.mark.parametrize("read", ["pairs", "clusters"])
def test_two_copies_never_share_a_host(partitions: int, hosts: int, read: str) -> None:
    found = layout_of(network(partitions, read), hosts)
    names = [name for held in found.values() for name in held]
    assert len(names) == len(set(names)) == 2 * partitions + 2
    for held in found.values():
        assert len({fragment_of(name) for name in held}) == len(held)


def test_in_clusters_each_copy_of_the_dataflow_has_hosts_of_its_own() -> None:
    found = layout_of(network(4, "clusters"), 4)
    assert found["host-1"] == ("sums.0", "sums.2") and found["host-2"] == ("sums.1", "sums.3")
    assert found["host-3"] == ("sums.0@2", "sums.2@2")


def test_without_hosts_every_node_is_one() -> None:
    assert layout_of(network(1), None) == {
        name: (name,) for name in ("ingress", "sums.0", "sums.0@2", "egress")
    }


def test_what_is_not_split_is_spread_too() -> None:
    net = hf.Network("n", bucket="1s")
    one = net.source("s", "ts timestamp, k string", time="ts").on("a").filter("k > ''").on("b")
    net.output("o", one.filter("k > 'a'"))
    assert layout_of(net, 2) == {"host-1": ("a",), "host-2": ("b",)}


def test_more_replicas_than_hosts_are_refused() -> None:
    net = hf.Network("n", bucket="1s")
    one = net.source("s", "ts timestamp, k string", time="ts").filter("k > ''")
    net.output("o", one, contract=hf.Contract(within="5s"))
    net.protect("main", replicas=3)
    with pytest.raises(InputError, match="has 3 replicas, and no two of them may share a host"):
        layout_of(net, 2)


def test_nobody_stands_by_for_what_cannot_be_moved() -> None:
    with pytest.raises(InputError, match="only nodes of pairs can be moved"):
        layout_of(network(2, replication=None), 2, standby=1)


def test_a_name_with_a_number_is_no_partition() -> None:
    net = hf.Network("n", bucket="1s")
    one = net.source("s", "ts timestamp, k string", time="ts").on("v.7").filter("k > ''")
    net.output("o", one)
    assert layout_of(net, 4)["host-1"] == ("v.7",)
    assert one_of_each(network(3), ["sums.0", "sums.2", "ingress"]) == ["sums.0", "ingress"]


def test_hosts_want_processes() -> None:
    with pytest.raises(InputError, match="deployment='processes'"):
        hf.run(network(2).logical, options=hf.Options(hosts=2))


def test_hosts_and_standby_are_checked() -> None:
    with pytest.raises(InputError, match="hosts: 1 must be at least 2"):
        hf.Options(hosts=1)
    with pytest.raises(InputError, match="only together with hosts"):
        hf.Options(standby=1)
