"""Network monitoring: three taps, the top talkers of the last ten seconds, and alarms.

holdfast run holdfast.examples.netmon:net --seconds 30 --audit
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.edge.feeds import Generate

FLOWS_PER_S = 1_000


def flows(tap: int) -> Generate:
    """Generated traffic of one tap: few hosts send most of it; one host sometimes scans ports."""

    def make(number: int, from_us: int, to_us: int) -> dict[str, Any]:
        rng = np.random.default_rng([zlib.crc32(b"netmon"), tap, number])
        count = int((to_us - from_us) * FLOWS_PER_S / 1_000_000)
        talker = np.minimum(rng.zipf(1.4, count), 200)
        scanning = (rng.random(count) < 0.05) & (number // 40 % 4 == 3)
        return {
            "ts": np.sort(rng.integers(from_us, to_us, count)),
            "src": np.where(scanning, "10.0.9.9", np.char.add("10.0.0.", talker.astype(str))),
            "port": np.where(scanning, rng.integers(1, 65_000, count), 443),
            "bytes": np.where(scanning, 40, rng.integers(40, 1_500, count) * 10),
        }

    return Generate(make)


net = hf.Network("netmon", bucket="500ms")
taps = [
    net.source(
        f"tap{tap}", "ts timestamp, src string, port int, bytes long", time="ts", feed=flows(tap)
    )
    for tap in range(3)
]
traffic = net.union(*taps).filter("bytes > 0")

net.output(
    "top_talkers",
    traffic.window("10s", slide="1s")
    .group_by("src")
    .agg(bytes=hf.sum("bytes"), flows=hf.count())
    .window("1s")
    .apply(lambda df: df.orderBy(df.bytes.desc(), df.src).limit(5)),
    contract=hf.Contract(within="3s", loss=0, order="intra"),
)
net.output(
    "port_scans",
    traffic.window("2s")
    .group_by("src")
    .agg(ports=hf.approx_distinct("port"), flows=hf.count())
    .filter("ports > 50"),
    contract=hf.Contract(within="3s"),
)
