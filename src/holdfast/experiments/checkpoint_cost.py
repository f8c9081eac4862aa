"""Cost of a checkpoint by the size of the state (Borealis Figure 12, right).

The state holds `state_rows` rows, either one per key (a count window) or in an open time window.
Every bucket brings 100 rows and is followed by a checkpoint. The paper copies the state for a
checkpoint. State versions of Holdfast are immutable files that the step has written, or ranges of
input buckets, so a checkpoint flushes files and appends one record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.clock import now_us
from holdfast.runtime.running import Run

BUCKET_US = 500_000
SIZES = (100, 1_000, 10_000, 100_000)
#: Rows per bucket, and the number of buckets before and during the measurement.
ROWS, WARM_BUCKETS, BUCKETS = 100, 20, 30
LIMIT_S = 120.0
KINDS = ("one row per key", "open window")


def run(quick: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the median duration of checkpoints and steps, by kind and size of the state."""
    costs = []
    for kind in KINDS:
        for state_rows in SIZES[:2] if quick else SIZES:
            costs.append({"state": kind, "state_rows": state_rows, **_measure(kind, state_rows)})
            say(f"checkpoint of {state_rows:,} rows ({kind}): {costs[-1]['checkpoint_ms']} ms, "
                f"a step {costs[-1]['step_ms']} ms")  # fmt: skip
    return costs


def _network(kind: str) -> hf.Network:
    net = hf.Network("checkpoints", bucket=f"{BUCKET_US // 1_000}ms")
    rows = net.source("rows", "ts timestamp, key long", time="ts", clock="manual")
    if kind == KINDS[0]:
        net.output("counts", rows.count_window(2, by="key", slide=1).agg(n=hf.count()))
    else:
        net.output("counts", rows.window("1h").group_by("key").agg(n=hf.count()))
    return net


def _measure(kind: str, state_rows: int) -> dict[str, Any]:
    options = hf.Options(archive=False, checkpoint_buckets=1)
    with Run(_network(kind), options=options) as running:
        client, source = running.client("counts"), running.source("rows")
        threading.Thread(
            target=client.foreach_bucket, args=(lambda table, info: None,), daemon=True
        ).start()
        random, start = np.random.default_rng(state_rows), now_us() // BUCKET_US

        def push(bucket: int, keys: Any) -> None:
            source.push({"ts": np.full(len(keys), bucket * BUCKET_US), "key": keys})
            source.advance((bucket + 1) * BUCKET_US)
            running.wait_for(
                lambda: client.position is not None and client.position >= bucket, LIMIT_S,
                f"the results of bucket {bucket}",
            )  # fmt: skip

        push(start, np.arange(state_rows))
        for number in range(1, 1 + WARM_BUCKETS + BUCKETS):
            push(start + number, random.integers(0, state_rows, ROWS))
        (node,) = running.nodes.values()
        steps_s = sorted(list(node.performer.step_seconds)[-BUCKETS:])
        checkpoints_s = sorted(list(node.performer.checkpoints.seconds)[-BUCKETS:])
    return {
        "checkpoint_ms": round(1_000 * checkpoints_s[BUCKETS // 2], 2),
        "step_ms": round(1_000 * steps_s[BUCKETS // 2], 1),
    }


def text(costs: list[dict[str, Any]]) -> list[str]:
    return [
        f"checkpoint, {kind}: "
        + ", ".join(
            f"{cost['state_rows']:,} rows {cost['checkpoint_ms']:.1f} ms "
            f"(step {cost['step_ms']:.0f} ms)"
            for cost in costs
            if cost["state"] == kind
        )
        for kind in KINDS
    ]
