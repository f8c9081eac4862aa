"""A pair that keeps state which an empty start cannot rebuild, split by key."""

from __future__ import annotations

import holdfast as hf
from tests.processes.kill_app import totals

net = hf.Network("pairs", bucket="500ms")
tap = net.source("tap", "ts timestamp, key string, x double", time="ts", clock="manual")
split = tap.on("totals", by="key", partitions=1)
running = split.filter("x >= 0").stateful(
    totals, key="key", state="key string, total long", out="key string, total long, ts timestamp"
)
net.output("totals", running)
net.protect("totals", replicas=2, read="pairs")
