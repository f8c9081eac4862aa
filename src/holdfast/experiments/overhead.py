"""Cost of protection without failures: the same network with `block` and with `process`.

Short runs of both policies alternate in one process, so that changes of machine load affect both
alike. The measure is the CPU time of Python and its JVM per bucket.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable
from typing import Any

import psutil
from rich.table import Table

import holdfast as hf
from holdfast.experiments.failing import Watch, merging
from holdfast.runtime.running import Run

RATE = 4_500
WARM_FIRST_S, WARM_S = 30.0, 4.0
POLICIES = ("block", "process")


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
        "cpu_ratio_median": round(statistics.median(ratios), 4),
        "cpu_ratio_mean": round(statistics.fmean(ratios), 4),
        "bound": 1.05,
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="CPU time per bucket without failures (ms)")
    for column in ("block", "process+process", "ratio"):
        shown.add_column(column, justify="right")
    for row in result["pairs"]:
        shown.add_row(f"{row['block_ms']:.1f}", f"{row['process_ms']:.1f}", f"{row['ratio']:.3f}")
    shown.caption = f"median ratio {result['cpu_ratio_median']:.3f}, bound {result['bound']}"
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 4))
    for name, key in (("block", "block_ms"), ("process+process", "process_ms")):
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
