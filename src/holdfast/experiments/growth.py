"""Growth curves of the engine: how the cost of a step grows with the size of a query.

Eight dimensions are measured, each in a process of its own with everything else fixed. a + b x^p is
fitted to the median times of steps (`growth_fit.py`); no exponent should exceed 1. Three further
ratios compare steps whose results are the same size: the bound of a join, the length of a window
and the history of a join should matter little, and so should keys that a step does not touch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.table import Table

from holdfast.errors import HoldfastError
from holdfast.experiments.growth_cases import TOUCHED, Job
from holdfast.experiments.growth_fit import Fit, growth

#: The dimensions that have an exponent, with what x is.
DIMENSIONS = {
    "rows": "rows per bucket", "keys": "keys of keyed state", "window": "window length (s)",
    "join_bound": "join bound (s)", "columns": "columns", "outputs": "outputs",
    "sources": "sources", "partitions": "partitions",
}  # fmt: skip
KEYS_FEW, KEYS_MANY = 10_000, 10_000_000
#: Longest time of one dimension, in seconds, before its process is killed.
LIMIT_S = 3_600


def jobs(quick: bool) -> list[Job]:
    """The sizes of every dimension. In the long form, at least four sizes are in the upper decades,
    where the growth exceeds the constant cost."""
    if quick:
        return [
            Job("rows", (1_000, 10_000, 100_000, 500_000, 1_000_000, 2_000_000, 5_000_000)),
            Job("keys", (KEYS_FEW, 100_000, 1_000_000, KEYS_MANY), steps=150, point_s=20.0,
                last_steps=1_000),
            Job("window", (1, 10, 60, 600, 3_600)),
            Job("join_bound", (1, 10, 60, 300, 600), steps=24),
            Job("columns", (2, 10, 25, 50, 100, 200)),
            Job("outputs", (1, 2, 5, 10, 15, 20)),
            Job("sources", (1, 5, 15, 30, 50, 75, 100)),
            Job("partitions", (1, 4, 8, 16, 32, 64), steps=20),
            Job("history", (50_000, 5_000_000), steps=24),
        ]  # fmt: skip
    return [
        _long("rows", (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 600_000, 1_000_000,
                       2_000_000, 3_500_000, 5_000_000)),
        _long("keys", (KEYS_FEW, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, KEYS_MANY),
              steps=300, last_steps=1_000),
        _long("window", (1, 3, 10, 30, 60, 180, 600, 1_200, 1_800, 2_700, 3_600)),
        _long("join_bound", (1, 3, 10, 30, 60, 120, 180, 300, 450, 600)),
        _long("columns", (2, 5, 10, 20, 35, 50, 75, 100, 150, 200)),
        _long("outputs", (1, 2, 3, 5, 7, 10, 13, 16, 20)),
        _long("sources", (1, 2, 5, 10, 20, 35, 50, 75, 100)),
        _long("partitions", (1, 2, 4, 8, 16, 32, 48, 64)),
        _long("history", (50_000, 500_000, 5_000_000)),
    ]  # fmt: skip


def _long(dimension: str, xs: tuple[int, ...], *, steps: int = 100, last_steps: int = 0) -> Job:
    return Job(
        dimension, xs, seconds=900.0, warm=60, steps=steps, point_s=45.0, last_steps=last_steps
    )


def required(job: Job) -> tuple[int, ...]:
    """The sizes that the ratios compare."""
    return {
        "keys": (KEYS_FEW, KEYS_MANY), "window": (60, 3_600), "join_bound": (10, 600),
        "history": (50_000, 5_000_000),
    }.get(job.dimension, ())  # fmt: skip


def _elsewhere(job: Job, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a dimension in a fresh process and JVM."""
    tail: list[str] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-growth-") as folder, subprocess.Popen(
        [sys.executable, "-m", "holdfast.experiments.growth_cases",
         json.dumps({**asdict(job), "required": required(job), "folder": folder})],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            assert process.stderr is not None and process.stdout is not None
            for line in process.stderr:
                tail = [*tail[-2:], line.strip()]
                if line.startswith(f"{job.dimension} "):
                    say(line.strip())
            lines = [line for line in process.stdout if line.startswith("{")]
        except BaseException:
            process.kill()
            raise
        finally:
            limit.cancel()
    if process.returncode or not lines:
        raise HoldfastError(f"growth: {job.dimension} failed: {' / '.join(tail)}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    return summary({job.dimension: _elsewhere(job, say) for job in jobs(quick)})


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Exponents, ratios and memory from the results of the dimensions."""
    curves = {
        name: {**curve(found[name]["points"]), "skipped": found[name]["skipped"]}
        for name in DIMENSIONS
    }
    many, few = _point(found, "keys", KEYS_MANY), _point(found, "keys", KEYS_FEW)
    touched_bytes = TOUCHED * many["state_bytes"] / KEYS_MANY
    memory = [result["memory"] for result in found.values()]
    peaks = [use["heap_mb"] + use["python_peak_mb"] for use in memory]
    return {
        "exponents": {name: found_curve["exponent"] for name, found_curve in curves.items()},
        "join_bound_ratio": _ratio(found, "join_bound", 600, 10),
        "window_ratio": _ratio(found, "window", 3_600, 60),
        "history_ratio": _ratio(found, "history", 5_000_000, 50_000),
        "keys_step_ratio": round(many["step_ms"] / few["step_ms"], 3),
        "keys_bytes_ratio": round(many["bytes_written"] / touched_bytes, 3),
        "keys_steps": many["steps"],
        "driver_memory": {
            "limit_mb": memory[0]["limit_mb"],
            "peak_mb": round(max(peaks), 1),
            "by_dimension": {name: result["memory"] for name, result in found.items()},
        },
        "curves": curves,
        "history": list(found["history"]["points"]),
    }


def _point(found: Mapping[str, Mapping[str, Any]], name: str, x: int) -> Mapping[str, Any]:
    point: Mapping[str, Any] = next(p for p in found[name]["points"] if p["x"] == x)
    return point


def _ratio(found: Mapping[str, Mapping[str, Any]], name: str, large: int, small: int) -> float:
    """Time of a step at a large size over that at a small size; both give equally many rows."""
    above, below = _point(found, name, large), _point(found, name, small)
    if abs(above["rows_out"] - below["rows_out"]) > 0.01 * below["rows_out"]:
        raise HoldfastError(
            f"growth: {name}: expected equally many results at {small:,} and {large:,}, found "
            f"{below['rows_out']} and {above['rows_out']} per step"
        )
    return float(round(above["step_ms"] / below["step_ms"], 3))


def curve(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The growth of the median and of the mean time of a step. Work that is done only now and then,
    such as merges of files, is in the mean."""
    x = [float(point["x"]) for point in points]
    median = growth(x, [point["step_ms"] for point in points])
    mean = growth(x, [point["step_ms_mean"] for point in points])
    return {
        "exponent": round(median.exponent, 3),
        "flat": median.flat,
        "points_above_3a": median.points_above,
        "certain": median.certain,
        "fit": {key: float(f"{value:.4g}") for key, value in asdict(median.fit).items()},
        "slope": round(median.slope, 3),
        "last_slope": round(median.last_slope, 3),
        "exponent_of_mean": round(mean.exponent, 3),
        "points": points,
    }


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Growth of the cost of a step")
    for column in ("dimension", "sizes", "ms per step", "p99 (ms)", "bytes written", "files",
                   "heap + Python (MB)", "p", "p of the last two"):  # fmt: skip
        shown.add_column(column, justify="left" if column == "dimension" else "right")
    for name, label in DIMENSIONS.items():
        found = result["curves"][name]
        ends = (found["points"][0], found["points"][-1])
        shown.add_row(
            label,
            *(_to(ends, key) for key in ("x", "step_ms", "step_ms_p99", "bytes_written", "files")),
            " to ".join(f"{sum(point['memory_mb'].values()):,.0f}" for point in ends),
            f"{found['exponent']:.2f}{_remark(found)}",
            f"{found['last_slope']:.2f}",
        )
    memory = result["driver_memory"]
    shown.caption = (
        f"join within 10 min compared with 10 s, equal results: {result['join_bound_ratio']:.2f} "
        f"times the step\nwindow of 1 h compared with 1 min: {result['window_ratio']:.2f} times\n"
        f"join history of 5 million rows compared with 50,000, equal new rows and results: "
        f"{result['history_ratio']:.2f} times\n{KEYS_MANY:,} keys compared with {KEYS_FEW:,}, "
        f"{TOUCHED:,} touched in a step: {result['keys_step_ratio']:.2f} times; "
        f"{result['keys_bytes_ratio']:.2f} times the touched state written in "
        f"{result['keys_steps']:,} steps\nmemory of the driver, heap after a collection and peak "
        f"of Python: at most {memory['peak_mb']:,.0f} MB (limit {memory['limit_mb']:,.0f} MB)"
    )
    return shown


def _remark(found: Mapping[str, Any]) -> str:
    if found["flat"]:
        return " (flat)"
    return "" if found["certain"] else " (uncertain)"


def _to(ends: tuple[dict[str, Any], dict[str, Any]], key: str) -> str:
    return " to ".join(f"{point[key]:,.0f}" for point in ends)


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 4, figsize=(14, 7))
    for axes, (name, label) in zip(panels.flat, DIMENSIONS.items(), strict=True):
        found = result["curves"][name]
        x = np.array([point["x"] for point in found["points"]], dtype=np.float64)
        medians = [point["step_ms"] for point in found["points"]]
        axes.loglog(x, medians, "o", color="C0", label="median")
        axes.loglog(x, [point["step_ms_p99"] for point in found["points"]], ".", color="0.6",
                    label="p99")  # fmt: skip
        along = np.logspace(np.log10(x[0]), np.log10(x[-1]), 100)
        fitted = Fit(**found["fit"])
        axes.loglog(along, fitted.at(along), "-", color="C1", linewidth=1,
                    label=f"a + b x^p, p = {fitted.p:.2f}")  # fmt: skip
        if found["flat"]:
            axes.plot([], [], " ", label=f"flat: p = {found['slope']:.2f} without a")
        axes.set_xlabel(label)
        axes.set_ylim(min(medians) / 3, max(10 * min(medians), 3 * max(medians)))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left")
    for axes in panels[:, 0]:
        axes.set_ylabel("ms per step")
    figure.tight_layout()
    path = os.path.join(folder, "growth.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]
