"""Cost of protection without failures: the same network with `block` and with `process`, and with
one, two and three replicas.

Short runs of both policies alternate in one process, so that changes of machine load affect both
alike. The measure is the CPU time of Python and its JVM per bucket. Replicas are processes with
their own JVM; runs with one, two and three replicas alternate as well. Their measures are the CPU
time of all processes per bucket, and the delay of the rows at the client.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from rich.table import Table

import holdfast as hf
from holdfast.clock import now_us
from holdfast.experiments import spread
from holdfast.experiments.failing import Seen, Watch, merging
from holdfast.runtime.running import Run

RATE = 4_500
WARM_FIRST_S, WARM_S = 30.0, 4.0
#: Deadline for all replicas to start, in seconds.
START_S = 120.0
POLICIES = ("block", "process")
#: Runs with replicas: rows per second, bucket width and warm-up.
REPLICAS_RATE, REPLICAS_BUCKET_MS, REPLICAS_WARM_S = 3_000, 500, 20.0


def _network(replicas: int) -> hf.Network:
    net, _ = merging(
        REPLICAS_RATE, bucket_ms=REPLICAS_BUCKET_MS, replicas=replicas,
        on_failure="process", while_correcting="process", max_delay="3s",
    )  # fmt: skip
    return net


one, two, three = _network(1), _network(2), _network(3)
REPLICAS = {1: (one, "one"), 2: (two, "two"), 3: (three, "three")}


def _cpu_s() -> float:
    """CPU time of this process and all its descendants."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


def measure(policy: str, seconds: float, warm_s: float) -> float:
    """Return the CPU time per bucket, in milliseconds."""
    net, _ = merging(
        RATE, window_ms=1_000, on_failure=policy, while_correcting="process", max_delay="3s"
    )  # fmt: skip
    with (
        Run(net, options=hf.Options(archive=False)) as run,
        Watch(run.client("merged", tentative=True)) as watch,
        Watch(run.client("counts", tentative=True)),
    ):
        watch.wait(lambda: watch.client.position is not None)
        pause = threading.Event()
        pause.wait(warm_s)
        before_s, first = _cpu_s(), watch.client.position
        pause.wait(seconds)
        after_s, last = _cpu_s(), watch.client.position
        run.raise_failure()
        assert first is not None and last is not None
        if watch.client.tentative_rows:
            raise hf.HoldfastError(
                "results became tentative without a failure; is the machine overloaded?"
            )
    return 1_000 * (after_s - before_s) / (last - first)


def measure_replicas(replicas: int, seconds: float) -> dict[str, Any]:
    """Return the CPU time per bucket of all processes and the median delay, in milliseconds."""
    net, name = REPLICAS[replicas]
    storage = tempfile.mkdtemp(prefix="holdfast-overhead-")
    options = hf.Options(archive=False, memory="512m", master="local[1]")
    try:
        with (
            Run(net, storage=storage, deployment="processes", options=options,
                app=f"holdfast.experiments.overhead:{name}") as run,
            Watch(run.client("merged", tentative=True, durable=False)) as watch,
        ):  # fmt: skip
            run.wait_for(
                lambda: all(node.get("paths") for node in run.status()["nodes"])
                and watch.client.position is not None,
                START_S, "all replicas to start",
            )  # fmt: skip
            pause = threading.Event()
            pause.wait(REPLICAS_WARM_S)
            before_s, first, since_us = _cpu_s(), watch.client.position, now_us()
            pause.wait(seconds)
            after_s, last, until_us = _cpu_s(), watch.client.position, now_us()
            run.raise_failure()
            assert first is not None and last is not None
            delays_ms = Seen(watch).delays_ms(since_us, until_us)
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    return {
        "replicas": replicas,
        "cpu_ms": round(1_000 * (after_s - before_s) / (last - first), 1),
        "delay_ms": round(float(np.median(delays_ms)), 1),
    }


def _replicas(quick: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    rounds, seconds = (1, 10.0) if quick else (3, 20.0)
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        order = list(REPLICAS) if number % 2 == 0 else list(REPLICAS)[::-1]
        for replicas in order:
            rows.append(measure_replicas(replicas, seconds))
            say(f"replicas={replicas}: {rows[-1]['cpu_ms']} ms of CPU time per bucket, median "
                f"delay {rows[-1]['delay_ms']} ms")  # fmt: skip
    return rows


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    pairs, seconds = (3, 6.0) if quick else (8, 15.0)
    measure("block", 1.0, WARM_FIRST_S)
    rows = []
    for number in range(pairs):
        order = POLICIES if number % 2 == 0 else POLICIES[::-1]
        cost = {policy: measure(policy, seconds, WARM_S) for policy in order}
        rows.append({**{f"{policy}_ms": round(ms, 2) for policy, ms in cost.items()},
                     "ratio": round(cost["process"] / cost["block"], 4)})  # fmt: skip
        say(f"CPU time per bucket: block {cost['block']:.1f} ms, process "
            f"{cost['process']:.1f} ms, ratio {rows[-1]['ratio']:.3f}")  # fmt: skip
    ratios = [row["ratio"] for row in rows]
    return {
        "pairs": rows,
        "replicas": _replicas(quick, say),
        "cpu_ratio_median": round(statistics.median(ratios), 4),
        "cpu_ratio_mean": round(statistics.fmean(ratios), 4),
        "bound": 1.05,
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Cost of protection without failures: median (range)")
    for column in ("configuration", "CPU time per bucket (ms)", "ratio", "delay (ms)"):
        shown.add_column(column, justify="left" if column == "configuration" else "right")
    ratios = [row["ratio"] for row in result["pairs"]]
    for policy in POLICIES:
        shown.add_row(
            f'on_failure="{policy}"', spread([row[f"{policy}_ms"] for row in result["pairs"]], 1),
            spread(ratios, 3) if policy == "process" else "1", "",
        )  # fmt: skip
    single_ms = statistics.median(r["cpu_ms"] for r in result["replicas"] if r["replicas"] == 1)
    for replicas in REPLICAS:
        mine = [row for row in result["replicas"] if row["replicas"] == replicas]
        cpu_ms = [row["cpu_ms"] for row in mine]
        shown.add_row(
            f"replicas={replicas}, {REPLICAS_BUCKET_MS} ms buckets", spread(cpu_ms, 0),
            f"{statistics.median(cpu_ms) / single_ms:.2f}",
            spread([row["delay_ms"] for row in mine], 0),
        )  # fmt: skip
    shown.caption = (
        f"on_failure: {len(ratios)} pairs of runs; the ratio is the median (range) of the ratios "
        f"within a pair, their mean is {result['cpu_ratio_mean']:.3f}"
    )
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 4))
    for name, key in (("block", "block_ms"), ("process", "process_ms")):
        axes.plot([row[key] for row in result["pairs"]], marker="o", label=name)
    axes.set_xlabel("pair of runs")
    axes.set_ylabel("CPU time per bucket (ms)")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path = os.path.join(folder, "overhead.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
