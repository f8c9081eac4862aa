"""A real deployment whose node is killed with SIGKILL and recovers from footprints.

The node measures its recovery itself, from the moment when it opens its log (the process has
started and has run its first jobs) until the first new bucket is committed. The pause of the
client, from the kill to the first new bucket, also contains the start of the process and of its
JVM. The page cache of the storage is dropped before the process is started again.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.table import Table

import holdfast as hf
from holdfast.experiments import spread
from holdfast.experiments.cec_bench import OUTPUT, WIDTH_US, Workload, forget_pages
from holdfast.runtime.running import Run

WORK = Workload(100_000, 10, 5_000)
net_1s, net_2s, net_5s = (
    WORK.network(recovery="cec", recovery_time=f"{stated_s}s") for stated_s in (1, 2, 5)
)
NETWORKS = {1: net_1s, 2: net_2s, 5: net_5s}
#: Buckets before the first kill, and between two.
WARM, BETWEEN = 120, 30
LIMIT_S = 180.0


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    kills, found = 2 if quick else 10, {}
    for stated_s in NETWORKS:
        folder = tempfile.mkdtemp(prefix="holdfast-cec-kills-")
        try:
            found[f"{stated_s}s"] = _run(folder, stated_s, kills, say)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {"objectives": found}


def _run(folder: str, stated_s: int, kills: int, say: Callable[[str], None]) -> dict[str, Any]:
    options = hf.Options(memory="1g", archive=False, checkpoint_buckets=0)
    running = Run(
        NETWORKS[stated_s], storage=folder, deployment="processes", options=options,
        app=f"holdfast.experiments.cec_kills:net_{stated_s}s",
    )  # fmt: skip
    rng = random.Random(1)
    took_s: list[float] = []
    predicted_s: list[float] = []
    pause_s: list[float] = []
    with running:
        client, source = running.client(OUTPUT), running.source("items")
        thread = threading.Thread(
            target=client.foreach_bucket, args=(lambda table, info: None,), daemon=True
        )
        thread.start()
        pushed = 0

        def wait_for(upto: int) -> None:
            running.wait_for(
                lambda: client.position is not None and client.position >= upto,
                LIMIT_S, f"the results of bucket {upto}",
            )  # fmt: skip

        def push(count: int) -> None:
            nonlocal pushed
            for _ in range(count):
                source.push(WORK.table(pushed))
                pushed += 1
                source.advance(pushed * WIDTH_US)
                wait_for(pushed - 20)

        push(WARM)
        process = running.processes["main"]
        for kill in range(kills):
            push(rng.randrange(BETWEEN // 2, BETWEEN))
            wait_for(pushed - 1)
            predicted_s.append(_footprints(running)["recovery_ms_predicted"] / 1_000)
            killed_s = time.monotonic()
            process.kill(before_restart=lambda: forget_pages(folder))
            push(2)
            wait_for(pushed - 2)
            pause_s.append(time.monotonic() - killed_s)
            wait_for(pushed - 1)
            took_s.append(_footprints(running)["recovery_ms_last"] / 1_000)
            say(f"{stated_s} s stated, SIGKILL {kill + 1}: recovery {took_s[-1]:.2f} s, predicted "
                f"{predicted_s[-1]:.2f} s, pause {pause_s[-1]:.1f} s")  # fmt: skip
        source.end()
        thread.join(LIMIT_S)
    errors = [abs(p - took) / took for p, took in zip(predicted_s, took_s, strict=True)]
    return {
        "kills": kills,
        "within": sum(took <= stated_s for took in took_s),
        "recovery_s": [round(took, 2) for took in took_s],
        "predicted_s": [round(predicted, 2) for predicted in predicted_s],
        "pause_s": [round(pause, 1) for pause in pause_s],
        "error_median": round(statistics.median(errors), 3),
    }


def _footprints(running: Run) -> dict[str, Any]:
    (node,) = (node for node in running.status()["nodes"] if node["node"] == "main")
    (path,) = node["paths"].values()
    found: dict[str, Any] = path["footprints"]
    return found


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="A node with eventual checkpoints is killed with SIGKILL")
    for column in ("recovery stated (s)", "kills", "within", "recovery (s)", "predicted (s)",
                   "median error", "pause of the client (s)"):  # fmt: skip
        shown.add_column(column, justify="right")
    for stated, of in result["objectives"].items():
        shown.add_row(
            stated.removesuffix("s"), str(of["kills"]), str(of["within"]),
            spread(of["recovery_s"], 2), spread(of["predicted_s"], 2), f"{of['error_median']:.0%}",
            spread(of["pause_s"], 1),
        )  # fmt: skip
    shown.caption = "median (range)"
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, at = plt.subplots(figsize=(7, 4))
    of_stated = result["objectives"]
    for key, label, marker in (
        ("recovery_s", "recovery", "o"),
        ("predicted_s", "predicted", "x"),
        ("pause_s", "pause of the client", "s"),
    ):
        places = [n + shift for n, of in enumerate(of_stated.values()) for shift in _apart(of[key])]
        at.scatter(places, [s for of in of_stated.values() for s in of[key]],
                   marker=marker, label=label, alpha=0.7)  # fmt: skip
    for number, stated in enumerate(of_stated):
        at.hlines(float(stated.removesuffix("s")), number - 0.4, number + 0.4, color="red",
                  label="" if number else "stated")  # fmt: skip
    at.set_xticks(range(len(of_stated)), of_stated)
    at.set_xlabel("recovery time stated")
    at.set_ylabel("seconds")
    at.set_ylim(bottom=0)
    at.grid(alpha=0.3)
    at.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=4)
    path = os.path.join(folder, "cec-kills.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


def _apart(values: list[float]) -> list[float]:
    """Places next to each other, so that equal values do not hide one another."""
    return [0.5 * (number / len(values) - 0.5) for number in range(len(values))]
