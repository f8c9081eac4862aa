"""The query of Flux section 2.4: sessions of packets, and statistics of sessions.

Packets open and close sessions between a source and a destination. Every ended session emits its
application, source and duration. Every two seconds, the query gives the longest and the mean
duration for each application and source. Sessions are partitioned by source and destination, the
statistics by application and source, into four partitions each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.model.protection import Replication

PARTITIONS = 4
APPS = 10
BUCKET_MS = 2_000
#: Four hosts on a small machine. Their JVMs live for minutes, so the first-tier compiler is enough.
HOSTS = hf.Options(
    memory="512m", master="local[1]", java_options="-XX:TieredStopAtLevel=1", heartbeat="250ms",
    hosts=4, by_reference=False,
)  # fmt: skip


def sessions(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """Emit ended sessions. The state holds the opening packet of each open session."""
    names = ["src", "dst", "app", "ts"]
    packets = pa.concat_tables([state.select(names), rows.select(names)])
    ends = np.r_[np.zeros(state.num_rows, bool), rows["ends"].to_numpy(zero_copy_only=False)]
    src, dst = packets["src"].to_numpy(), packets["dst"].to_numpy()
    at = packets["ts"].cast(pa.int64()).to_numpy()
    order = np.lexsort((at, dst, src))
    same = (np.diff(src[order]) == 0) & (np.diff(dst[order]) == 0)
    first, last = np.r_[True, ~same], np.r_[~same, True]
    ended = np.flatnonzero(ends[order] & ~first & ~np.r_[True, ends[order][:-1]])
    closing, opening = order[ended], order[ended - 1]
    done = packets.take(pa.array(closing)).select(["app", "src", "ts"])
    out = done.append_column("dur", pa.array(at[closing] - at[opening], pa.int64()))
    return out, packets.take(pa.array(np.sort(order[last & ~ends[order]])))


def network(replication: Replication | None) -> hf.Network:
    """Build the network with replication by pairs or clusters, or without protection (None)."""
    net = hf.Network(f"sessions-{replication or 'plain'}", bucket=f"{BUCKET_MS}ms", partitions=1)
    packets = net.source(
        "packets", "ts timestamp, src long, dst long, app int, ends boolean", time="ts",
        clock="manual",
    )  # fmt: skip
    ended = packets.on("sessions", by=["src", "dst"], partitions=PARTITIONS).stateful(
        sessions,
        key=["src", "dst"],
        state="src long, dst long, app int, ts timestamp",
        out="app int, src long, ts timestamp, dur long",
    )
    by_source = ended.on("stats", by=["app", "src"], partitions=PARTITIONS)
    stats = by_source.window(f"{BUCKET_MS}ms").group_by("app", "src")
    net.output("stats", stats.agg(longest=hf.max("dur"), mean=hf.avg("dur"), ended=hf.count()))
    if replication is not None:
        for fragment in ("sessions", "stats"):
            net.protect(fragment, replicas=2, replication=replication)
    return net


plain, flux, clusters = network(None), network("pairs"), network("clusters")


class Packets:
    """Generator of packets, one bucket at a time, uniformly distributed.

    There are `keys` pairs of source and destination; each pair alternately opens and closes a
    session. There are a tenth as many combinations of application and source.
    """

    def __init__(self, keys: int, rows: int) -> None:
        self._keys, self._rows = keys, rows
        self._open = np.zeros(keys, bool)

    def bucket(self, number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        pair = rng.permutation(self._keys)[: self._rows]
        ends = self._open[pair]
        self._open[pair] = ~ends
        sources = max(1, self._keys // (10 * APPS))
        start_us = number * BUCKET_MS * 1_000
        return {
            "ts": np.sort(rng.integers(start_us, start_us + BUCKET_MS * 1_000, len(pair))),
            "src": pair % sources, "dst": pair, "app": pair % (sources * APPS) // sources,
            "ends": ends,
        }  # fmt: skip
