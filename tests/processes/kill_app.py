"""The network that the process tests kill: every kind of state, three sources."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import holdfast as hf


def totals(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """Running number of rows per key, told for the keys that moved."""
    fresh = rows.group_by("key").aggregate([("key", "count")]).rename_columns(["key", "total"])
    both = pa.concat_tables([state, fresh]).group_by("key").aggregate([("total", "sum")])
    state = both.rename_columns(["key", "total"])
    moved = state.filter(pa.compute.is_in(state["key"], value_set=fresh["key"].combine_chunks()))
    at = pa.scalar(info.end_us - 1, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return moved.append_column("ts", pa.repeat(at, moved.num_rows)), state


net = hf.Network("kill", bucket="100ms")
taps = [
    net.source(f"s{i}", "ts timestamp, key string, x double", time="ts", clock="manual")
    for i in range(3)
]
both = net.union(*taps).filter("x >= 0")
net.output(
    "windows", both.window("1s", slide="300ms").group_by("key").agg(n=hf.count(), x=hf.sum("x"))
)
net.output("counts", both.count_window(7, by="key").agg(x=hf.sum("x"), last=hf.last("x")))
net.output(
    "totals",
    both.stateful(totals, key="key", state="key string, total long",
                  out="key string, total long, ts timestamp"),
)  # fmt: skip
