"""Rewriting of partitioned fragments: Flux section 4.1 (Exchange) and figure 6."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.errors import InputError, NetworkError
from holdfast.model import operators as ops
from holdfast.model.fragments import consumers_of, fragments, producers_of
from holdfast.model.partitions import partitions_of, physical

SCHEMA = "ts timestamp, src string, dst string, bytes long"


def sessions(first: int = 2, second: int = 3) -> hf.Network:
    """The paper's example: sessions by (src, dst), statistics by src (section 2.4)."""
    net = hf.Network("sessions", bucket="1s")
    packets = net.source("packets", SCHEMA, time="ts")
    by_session = packets.on("sessions", by=["src", "dst"], partitions=first)
    ended = by_session.window("2s").group_by("src", "dst").agg(bytes=hf.sum("bytes"))
    by_source = ended.on("stats", by="src", partitions=second)
    net.output("stats", by_source.window("4s").group_by("src").agg(total=hf.sum("bytes")))
    net.protect("sessions", replicas=2)
    return net


def test_every_partition_becomes_a_fragment() -> None:
    net = sessions()
    net.check()
    expanded = physical(net)
    expanded.check()
    by_name = {fragment.name: fragment for fragment in fragments(expanded)}
    assert list(by_name) == [
        "ingress", "sessions.0", "sessions.1", "stats.0", "stats.1", "stats.2", "egress",
    ]  # fmt: skip
    assert partitions_of(net) == {"sessions": 2, "stats": 3}
    assert by_name["ingress"].inputs == ("packets",)
    assert by_name["ingress"].outputs == ("packets.to-sessions.0", "packets.to-sessions.1")
    assert by_name["sessions.1"].inputs == ("packets.to-sessions.1",)
    assert len(by_name["sessions.1"].outputs) == 3
    assert len(by_name["sessions.1"].paths) == 1
    assert len(by_name["stats.2"].inputs) == 2  # one from every upstream partition
    assert by_name["egress"].outputs == ("stats",)
    assert [expanded.protection(f"sessions.{n}").replicas for n in (0, 1)] == [2, 2]
    producers, consumers = producers_of(expanded), consumers_of(expanded)
    assert producers["packets.to-sessions.0"] == ("ingress",)
    assert consumers["packets.to-sessions.0"] == ["sessions.0", "sessions.0@2"]
    assert consumers["stats"] == ["client-stats"]


def test_a_network_without_partitions_is_unchanged() -> None:
    net = hf.Network("plain")
    net.output("out", net.source("s", SCHEMA, time="ts").filter("bytes > 0"))
    assert physical(net) is net


def test_an_unpartitioned_fragment_reads_all_partitions() -> None:
    net = hf.Network("back")
    split = net.source("s", SCHEMA, time="ts").on("split", by="src", partitions=2)
    filtered = split.filter("bytes > 0")
    net.output("out", filtered.on("whole").window("1s").agg(n=hf.count()))
    expanded = physical(net)
    expanded.check()
    whole = next(fragment for fragment in fragments(expanded) if fragment.name == "whole")
    assert len(whole.inputs) == 2 and whole.outputs == ("out",)


def test_a_single_partition_is_expanded_like_several() -> None:
    expanded = physical(sessions(1, 1))
    expanded.check()
    parts = [op for op in expanded.operators if isinstance(op, ops.Part)]
    assert [(op.number, op.of) for op in parts] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("arguments", [{"by": "src"}, {"partitions": 2}])
def test_by_and_partitions_require_each_other(arguments: dict[str, object]) -> None:
    net = hf.Network("half")
    with pytest.raises(InputError, match="together"):
        net.source("s", SCHEMA, time="ts").on("split", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, -1, 65, 1.5])
def test_the_number_of_partitions_is_bounded(number: int) -> None:
    net = hf.Network("many")
    with pytest.raises(InputError, match="from 1 to 64"):
        net.source("s", SCHEMA, time="ts").on("split", by="src", partitions=number)


def refused(net: hf.Network, *words: str) -> None:
    with pytest.raises(NetworkError) as err:
        net.check()
    for word in words:
        assert word in str(err.value)


def test_a_window_over_coarser_keys_than_the_partitions_is_refused() -> None:
    net = hf.Network("apart")
    split = net.source("s", SCHEMA, time="ts").on("split", by=["src", "dst"], partitions=2)
    net.output("out", split.window("1s").group_by("src").agg(n=hf.count()))
    refused(net, "combines rows by src", "split by dst, src", "different partitions; split by some")


def test_a_window_without_keys_in_a_partition_is_refused() -> None:
    net = hf.Network("whole")
    split = net.source("s", SCHEMA, time="ts").on("split", by="src", partitions=2)
    net.output("out", split.window("1s").agg(n=hf.count()))
    refused(net, "combines all rows", "another fragment")


def test_a_window_over_finer_keys_than_the_partitions_is_allowed() -> None:
    net = hf.Network("finer")
    split = net.source("s", SCHEMA, time="ts").on("split", by="src", partitions=2)
    net.output("out", split.window("1s").group_by("src", "dst").agg(n=hf.count()))
    net.check()


def test_a_join_reads_both_sides_in_one_partition() -> None:
    net = hf.Network("joined")
    left = net.source("l", SCHEMA, time="ts").on("split", by="src", partitions=2)
    right = net.source("r", "ts timestamp, src string, n long", time="ts")
    net.output("out", left.join(right.on("split", by="src", partitions=2), on=["src"], within="1s"))
    net.check()
    expanded = physical(net)
    expanded.check()
    fragment = next(p for p in fragments(expanded) if p.name == "split.1")
    assert fragment.inputs == ("l.to-split.1", "r.to-split.1")


JOINED = "ts timestamp, src string, dst string, n long"


def joined(left_by: list[str], right_by: list[str]) -> hf.Network:
    net = hf.Network("joined")
    left = net.source("l", SCHEMA, time="ts").on("split", by=left_by, partitions=2)
    right = net.source("r", JOINED, time="ts").on("split", by=right_by, partitions=2)
    net.output("out", left.join(right, on=["src", "dst"], within="1s"))
    return net


def test_the_sides_of_a_join_must_be_split_by_the_same_columns() -> None:
    joined(["src", "dst"], ["dst", "src"]).check()
    refused(joined(["src"], ["dst"]), "split by dst and by src", "the same by=")
    refused(joined(["src"], ["src", "dst"]), "split by dst, src and by src", "the same by=")


def test_united_streams_must_be_split_by_the_same_columns() -> None:
    net = hf.Network("united")
    left = net.source("l", SCHEMA, time="ts").on("split", by="src", partitions=2)
    right = net.source("r", SCHEMA, time="ts").on("split", by="dst", partitions=2)
    united = net.union(left, right)
    net.output("rows", united.filter("bytes > 0"))
    net.check()
    net.output("counts", united.window("1s").group_by("src", "dst").agg(n=hf.count()))
    refused(net, "split by dst and by src")


def test_a_stream_enters_a_fragment_by_one_set_of_columns() -> None:
    net = hf.Network("twice")
    source = net.source("s", SCHEMA, time="ts")
    for number, by in enumerate(("src", "dst")):
        split = source.on("split", by=by, partitions=2)
        net.output(f"out-{number}", split.window("1s").group_by(by).agg(n=hf.count()))
    refused(net, "s enters fragment 'split' split by dst here and by src elsewhere")


def test_a_stream_may_enter_a_fragment_twice_by_the_same_columns() -> None:
    net = hf.Network("twice")
    source = net.source("s", SCHEMA, time="ts")
    for number in range(2):
        split = source.on("split", by="src", partitions=2)
        net.output(f"out-{number}", split.window("1s").group_by("src").agg(n=hf.count()))
    net.check()
    expanded = physical(net)
    expanded.check()
    names = [op.name for op in expanded.operators]
    assert len(names) == len(set(names))


def test_rows_are_not_routed_again_within_a_fragment() -> None:
    net = hf.Network("inside")
    split = net.source("s", SCHEMA, time="ts").on("split", by="src", partitions=2)
    pairs = split.window("1s").group_by("src", "dst").agg(n=hf.count())
    again = pairs.on("split", by="dst", partitions=2)
    net.output("out", again.window("2s").group_by("dst").agg(n=hf.sum("n")))
    refused(net, "already runs in the partitions of fragment 'split'")


def test_results_of_a_stateful_operator_are_routed_again() -> None:
    net = hf.Network("again")
    split = net.source("s", SCHEMA, time="ts").on("split", by="src", partitions=2)
    out = "ts timestamp, src string"
    changed = split.stateful(lambda s, r, i: (r, s), key="src", state="src string", out=out)
    net.output("out", changed.window("1s").group_by("src").agg(n=hf.count()))
    refused(net, "may change src", "route the results of")


def test_different_partition_counts_for_one_fragment_are_refused() -> None:
    net = hf.Network("two")
    left = net.source("l", SCHEMA, time="ts").on("split", by="src", partitions=2)
    right = net.source("r", SCHEMA, time="ts").on("split", by="src", partitions=3)
    net.output("out", net.union(left, right).filter("bytes > 0"))
    refused(net, "into 3 partitions here and into 2 elsewhere")


def test_a_stream_without_keys_into_a_partitioned_fragment_is_refused() -> None:
    net = hf.Network("entered")
    split = net.source("l", SCHEMA, time="ts").on("split", by="src", partitions=2)
    other = net.source("r", SCHEMA, time="ts").on("split")
    net.output("out", net.union(split, other).filter("bytes > 0"))
    refused(net, "without keys that route its rows", "by=..., partitions=2")


def test_the_fragment_names_ingress_and_egress_are_reserved() -> None:
    net = hf.Network("taken")
    first = net.source("s", SCHEMA, time="ts").on("ingress")
    net.output("out", first.on("split", by="src", partitions=2).filter("bytes > 0"))
    refused(net, "'ingress'", "choose another name")
