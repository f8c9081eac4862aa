"""Thousands of buckets in one run: memory, step time and number of files must not grow.

The network has a window and a join, on a manual clock, with one bucket per step. Clients
acknowledge results, so logs are trimmed. Resident memory of driver and JVM at the end is compared
with the memory after the first fifth of the run.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from pyspark.sql import SparkSession
from rich.table import Table

import holdfast as hf
from holdfast.errors import HoldfastError
from holdfast.runtime.running import Run

BUCKETS, QUICK_BUCKETS = 5_000, 500
ROWS, KEYS = 1_000, 100
WIDTH_US = 100_000
#: Deadline for one step, in seconds.
LIMIT_S = 60.0


def network() -> hf.Network:
    net = hf.Network("endurance", bucket="100ms")
    schema = "ts timestamp, src string, bytes long, x double"
    flows = net.source("flows", schema, time="ts", clock="manual")
    alarms = net.source("alarms", "ts timestamp, host string", time="ts", clock="manual")
    per_second = flows.window("1s").group_by("src").agg(n=hf.count(), x=hf.sum("x"))
    net.output("per_second", per_second)
    net.output("hits", alarms.join(flows, on="l.host = r.src and r.bytes > 1400", within="300ms"))
    return net


def rows_of(bucket: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(bucket)
    times = np.sort(rng.integers(bucket * WIDTH_US, (bucket + 1) * WIDTH_US, ROWS))
    hosts = np.char.add("h", np.arange(KEYS).astype(str))
    flows = {"ts": times, "src": hosts[rng.integers(0, KEYS, ROWS)],
             "bytes": rng.integers(40, 1_500, ROWS), "x": rng.random(ROWS)}  # fmt: skip
    alarms = {"ts": times[:5], "host": hosts[rng.integers(0, KEYS, 5)]}
    return flows, alarms


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    buckets = QUICK_BUCKETS if quick else BUCKETS
    base = buckets // 5
    seconds: list[float] = []
    samples: list[dict[str, float]] = []
    options = hf.Options(archive=False, checkpoint_buckets=50, memory="1g")
    with Run(network(), options=options) as running:
        node = running.nodes["main"]
        clients = [iter(running.client(name)) for name in ("per_second", "hits")]
        _drain_in_background(clients)
        for bucket in range(buckets):
            for source, rows in zip(("flows", "alarms"), rows_of(bucket), strict=True):
                running.source(source).push(rows)
            began = time.monotonic()
            for source in ("flows", "alarms"):
                running.source(source).advance((bucket + 1) * WIDTH_US)
            while any(
                state.position is None or state.position < bucket
                for state in node.performer.core.paths.values()
            ):
                running.raise_failure()
                if time.monotonic() > began + LIMIT_S:
                    raise HoldfastError(f"bucket {bucket} was not finished within {LIMIT_S:.0f} s")
                time.sleep(0.001)
            seconds.append(time.monotonic() - began)
            if (bucket + 1) % (base // 2) == 0:
                sample = _sample(running.storage)
                samples.append({"bucket": bucket + 1, **sample})
                say(
                    f"bucket {bucket + 1}: driver {sample['driver_mb']:.0f} MB, JVM "
                    f"{sample['jvm_mb']:.0f} MB (heap in use {sample['heap_mb']:.0f}), step "
                    f"{1_000 * statistics.median(seconds[-base // 2 :]):.0f} ms, "
                    f"{sample['files']:.0f} files"
                )
    first, last = samples[1], samples[-1]
    total = [s["driver_mb"] + s["jvm_mb"] for s in (first, last)]
    early, late = seconds[base // 2 : base], seconds[-base // 2 :]
    return {
        "buckets": buckets,
        "rss_growth": round(total[1] / total[0] - 1, 4),
        "heap_growth": round(last["heap_mb"] / first["heap_mb"] - 1, 4),
        "step_growth": round(statistics.median(late) / statistics.median(early) - 1, 4),
        "step_ms_median": round(1_000 * statistics.median(seconds), 1),
        "files_first": first["files"],
        "files_last": last["files"],
        "samples": samples,
    }


def _drain_in_background(clients: list[Any]) -> None:
    import threading

    for client in clients:
        threading.Thread(target=lambda results=client: [None for _ in results], daemon=True).start()


def _sample(storage: str) -> dict[str, float]:
    gc.collect()
    me = psutil.Process()
    java = [child for child in me.children(recursive=True) if "java" in child.name()]
    session = SparkSession.getActiveSession()
    assert session is not None
    jvm: Any = session.sparkContext._jvm
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    return {
        "driver_mb": me.memory_info().rss / 2**20,
        "jvm_mb": sum(child.memory_info().rss for child in java) / 2**20,
        "heap_mb": (runtime.totalMemory() - runtime.freeMemory()) / 2**20,
        "files": float(sum(len(files) for _, _, files in os.walk(storage))),
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title=f"{result['buckets']} buckets in one run")
    for column in ("bucket", "driver MB", "JVM MB", "heap in use MB", "files"):
        shown.add_column(column, justify="right")
    for s in result["samples"]:
        shown.add_row(f"{s['bucket']:.0f}", f"{s['driver_mb']:.0f}", f"{s['jvm_mb']:.0f}",
                      f"{s['heap_mb']:.0f}", f"{s['files']:.0f}")  # fmt: skip
    shown.caption = (
        f"resident memory {result['rss_growth']:+.1%}, step time {result['step_growth']:+.1%} "
        f"(median {result['step_ms_median']:.0f} ms)"
    )
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    x = [s["bucket"] for s in result["samples"]]
    for key, label in (("driver_mb", "driver"), ("jvm_mb", "JVM"), ("heap_mb", "heap in use")):
        axes.plot(x, [s[key] for s in result["samples"]], marker="o", label=label)
    axes.set_xlabel("buckets")
    axes.set_ylabel("MB")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    path = os.path.join(folder, "endurance.png")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
