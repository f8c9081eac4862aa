"""The networks that the process tests break: every kind of state, three sources."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import holdfast as hf


def totals(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """Running number of rows per key, emitted for the keys that changed."""
    fresh = rows.group_by("key").aggregate([("key", "count")]).rename_columns(["key", "total"])
    both = pa.concat_tables([state, fresh]).group_by("key").aggregate([("total", "sum")])
    state = both.rename_columns(["key", "total"])
    moved = state.filter(pa.compute.is_in(state["key"], value_set=fresh["key"].combine_chunks()))
    at = pa.scalar(info.end_us - 1, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return moved.append_column("ts", pa.repeat(at, moved.num_rows)), state


def network(name: str, partitions: int | None = None) -> hf.Network:
    net = hf.Network(name, bucket="100ms")
    taps = [
        net.source(f"s{i}", "ts timestamp, key string, x double", time="ts", clock="manual")
        for i in range(3)
    ]
    if partitions is not None:
        taps = [tap.on("main", by="key", partitions=partitions) for tap in taps]
    both = net.union(*taps).filter("x >= 0")
    windows = both.window("1s", slide="300ms").group_by("key")
    net.output("windows", windows.agg(n=hf.count(), x=hf.sum("x")))
    net.output("counts", both.count_window(7, by="key").agg(x=hf.sum("x"), last=hf.last("x")))
    net.output(
        "totals",
        both.stateful(totals, key="key", state="key string, total long",
                      out="key string, total long, ts timestamp"),
    )  # fmt: skip
    return net


def keyed(name: str) -> hf.Network:
    """With eventual checkpoints: keyed state, windows, a join, and keyed state behind a window."""
    net = hf.Network(name, bucket="100ms")
    taps = [
        net.source(f"s{i}", "ts timestamp, key string, x double", time="ts", clock="manual")
        for i in range(3)
    ]
    both = net.union(*taps).filter("x >= 0")
    net.output("counts", both.count_window(7, by="key").agg(x=hf.sum("x"), last=hf.last("x")))
    windows = both.window("1s", slide="300ms").group_by("key").agg(n=hf.count(), x=hf.sum("x"))
    net.output("windows", windows)
    net.output("of_windows", windows.count_window(3, by="key").agg(n=hf.max("n")))
    large = taps[1].filter("x > 1").map("ts", "key", "x AS y")
    net.output("joined", taps[0].join(large, on=["key"], within="400ms"))
    net.output("sums", both.count_window(5, by="key").agg(n=hf.count(), x=hf.sum("x")))
    net.output(
        "totals",
        both.stateful(totals, key="key", state="key string, total long",
                      out="key string, total long, ts timestamp"),
    )  # fmt: skip
    net.protect("main", recovery="cec", recovery_rows=300)
    return net


net = network("kill")
footprints = keyed("footprints")
#: The same with two replicas, and as pairs of partitions.
twins = network("twins")
twins.protect("main", replicas=2)
paired = network("paired", partitions=2)
paired.protect("main", replicas=2, replication="pairs")
