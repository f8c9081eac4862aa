"""Borealis Table 3: cost of waiting for complete buckets, by bucket width.

Three sources stamp rows with the wall clock when they are pushed, an SUnion merges the streams, and
a client reads the result. The delay of a row is the time from its stamp to its delivery: on average
half a bucket of waiting, plus one step. The deployment is `local`. Logs are flushed before
consumers are notified.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table

import holdfast as hf
from holdfast.clock import now_us
from holdfast.edge.client import BucketInfo
from holdfast.edge.source import Source
from holdfast.runtime.running import Run
from holdfast.storage.rows import times_us

#: Boundary interval in ms to (average processing delay, standard deviation), as published.
PAPER = {
    50: (69, 0.5),
    100: (120, 4),
    150: (174, 10),
    200: (234, 28),
    250: (298, 55),
    300: (327, 70),
}
#: Seconds between two pushes of a source, and rows per push.
PUSH_EVERY_S, PUSH_ROWS = 0.01, 5
#: Warm-up of a cold JVM, in seconds.
WARM_S = 6.0


def network(interval_ms: int) -> hf.Network:
    net = hf.Network("serialization", bucket=f"{interval_ms}ms")
    # Rows are pushed as soon as they are stamped. A row whose bucket ends in between is restamped.
    sources = [
        net.source(f"s{i}", "ts timestamp, value long", time="ts", grace="0s", late="restamp")
        for i in range(3)
    ]
    net.output("merged", net.union(*sources).filter("value >= 0"))
    return net


def measure(interval_ms: int, seconds: float, warm_s: float) -> list[float]:
    """Return the delay of every row after the warm-up, in milliseconds."""
    delays: list[float] = []
    net = network(interval_ms)
    with Run(net, options=hf.Options(archive=False)) as run:
        stop = threading.Event()
        since_us = now_us() + int(warm_s * 1e6)
        pushers = [
            threading.Thread(target=_push, args=(source, stop), daemon=True)
            for source in run.sources.values()
        ]
        client = run.client("merged")

        def take(table: Any, info: BucketInfo) -> None:
            late = (info.received_at_us - times_us(table, "ts")) / 1_000
            if info.received_at_us > since_us:
                delays.extend(late.tolist())
            if info.received_at_us > since_us + seconds * 1e6:
                client.close()

        for pusher in pushers:
            pusher.start()
        try:
            client.foreach_bucket(take)
        finally:
            stop.set()
            for pusher in pushers:
                pusher.join()
        run.raise_failure()
    return delays


def _push(source: Source, stop: threading.Event) -> None:
    number = 0
    while not stop.wait(PUSH_EVERY_S):
        source.push(
            {"ts": np.full(PUSH_ROWS, now_us()), "value": np.arange(number, number + PUSH_ROWS)}
        )
        number += PUSH_ROWS


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    intervals = (100, 200) if quick else tuple(PAPER)
    repeats, seconds = (1, 5.0) if quick else (3, 10.0)
    rows = []
    for number, interval_ms in enumerate(intervals):
        means = []
        for repeat in range(repeats):
            warm_s = WARM_S if (number, repeat) == (0, 0) else 2.0
            means.append(statistics.fmean(measure(interval_ms, seconds, warm_s)))
            say(f"interval {interval_ms} ms: mean delay {means[-1]:.1f} ms")
        paper_ms, paper_stddev = PAPER[interval_ms]
        rows.append(
            {
                "interval_ms": interval_ms,
                "mean_ms": round(statistics.fmean(means), 1),
                "stddev_ms": round(statistics.stdev(means), 2) if len(means) > 1 else 0.0,
                "paper_ms": paper_ms,
                "paper_stddev_ms": paper_stddev,
                "bound_ms": interval_ms + 90,
            }
        )
    return {"rows": rows, "repeats": repeats, "seconds": seconds}


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Delay from source stamp to client (ms), compared with Borealis Table 3")
    for column in ("interval", "ours", "stddev of averages", "paper", "paper stddev", "bound"):
        shown.add_column(column, justify="right")
    for row in result["rows"]:
        shown.add_row(
            str(row["interval_ms"]), f"{row['mean_ms']:.1f}", f"{row['stddev_ms']:.1f}",
            str(row["paper_ms"]), str(row["paper_stddev_ms"]), str(row["bound_ms"]),
        )  # fmt: skip
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    rows = result["rows"]
    x = [row["interval_ms"] for row in rows]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.errorbar(x, [row["mean_ms"] for row in rows], [row["stddev_ms"] for row in rows],
                  marker="o", label="Holdfast")  # fmt: skip
    axes.errorbar(x, [row["paper_ms"] for row in rows], [row["paper_stddev_ms"] for row in rows],
                  marker="s", label="Borealis (2005)")  # fmt: skip
    axes.set_xlabel("boundary interval = bucket width (ms)")
    axes.set_ylabel("mean delay (ms)")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path = os.path.join(folder, "serialization.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
