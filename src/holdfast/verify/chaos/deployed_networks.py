"""Networks used by chaos scenarios.

All values are integers, so that rows compare exactly. Every row has a unique `id`. A node process
imports a network by its path, for example `holdfast.verify.chaos.deployed_networks:chain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import holdfast as hf

SCHEMA = "ts timestamp, id bigint, key bigint, x bigint"
SOURCES = ("s1", "s2")
KEYS = 8


def totals(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """Keep a running sum and row count per key; emit the keys that occur in `rows`."""
    fresh = pa.table(
        {"key": rows["key"], "n": pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows),
         "total": rows["x"]}
    )  # fmt: skip
    summed = [("n", "sum"), ("total", "sum")]
    both = pa.concat_tables([state, fresh]).group_by("key").aggregate(summed)
    state = both.select(["key", "n_sum", "total_sum"]).rename_columns(["key", "n", "total"])
    moved = state.filter(pc.is_in(state["key"], value_set=rows["key"].combine_chunks()))
    at = pa.scalar(info.end_us - 1, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return moved.append_column("ts", pa.repeat(at, moved.num_rows)), state


def _outputs(net: hf.Network, rows: Any) -> None:
    """Declare two outputs that recover differently.

    `windows` can be rebuilt from recent input. `totals` needs the input from the first row on.
    """
    net.output(
        "windows",
        rows.window("1s", slide="400ms").group_by("key").agg(n=hf.count(), x=hf.sum("x")),
        contract=hf.Contract(within="6s"),
    )
    net.output(
        "totals",
        rows.stateful(
            totals,
            key="key",
            state="key bigint, n bigint, total bigint",
            out="key bigint, n bigint, total bigint, ts timestamp",
        ),
    )


def _taps(net: hf.Network) -> list[Any]:
    # The harness advances the boundaries, following the wall clock.
    return [net.source(name, SCHEMA, time="ts", clock="live") for name in SOURCES]


single = hf.Network("single", bucket="200ms")
_outputs(single, single.union(*_taps(single)).filter("x % 10 <> 0"))

chain = hf.Network("chain", bucket="200ms")
_kept = chain.union(*(tap.on("first") for tap in _taps(chain))).filter("x % 10 <> 0", name="kept")
_outputs(chain, _kept.on("second"))

pair = hf.Network("pair", bucket="200ms")
_outputs(pair, pair.union(*_taps(pair)).filter("x % 10 <> 0"))
pair.protect(
    "main", replicas=2, on_failure="process", while_correcting="process", max_delay="1500ms"
)

NETWORKS: Mapping[str, hf.Network] = {net.name: net for net in (single, chain, pair)}
