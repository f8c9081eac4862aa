"""Borealis Figure 12 and Table 2: time to correct a failure, from the state before the failure
(checkpoint) or by undoing and rebuilding the state (undo).

One stream of three is cut for 5 s, `max_delay` (X in Borealis) is 1 s, and new rows are suspended
during the correction. The time is measured from the return of the cut stream at the node to
REC_DONE at the client. As in the paper, two parameters vary: the rows of state (by the width of a
window at 1,000 rows per second) and the rows to recompute (by the rate, with a window of one
bucket).

Table 2 expects, in addition to a fixed cost,

    checkpoint  S p_copy            + D rate p_proc
    undo        S (p_comp + p_proc) + D rate (p_comp + p_proc)

so a line is fitted to each: the cost per row and the fixed cost. State versions of Holdfast are
immutable, so a rollback copies nothing: p_copy is 0, and the fixed cost is a Spark job.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from holdfast.experiments.failing import WARM_AGAIN_S, WARM_S, failures, merging

FAILURE_S, X = 5.0, "1s"
KINDS = ("checkpoint", "undo")


@dataclass(frozen=True, slots=True)
class Point:
    #: The varied parameter: "state" or "failure"; "promise" for the case with a promised time.
    varied: str
    rows_per_s: int
    window_ms: int

    @property
    def state_rows(self) -> int:
        return self.rows_per_s * self.window_ms // 1_000


#: A failure of 5 s at 4,500 rows/s with 1,350 rows of state must be corrected within 1 s.
PROMISED = Point("promise", 4_500, 300)
POINTS = [
    PROMISED,
    *(Point("state", 1_000, window) for window in (100, 500, 1_000, 2_000, 4_000, 10_000, 100_000)),
    *(Point("failure", rate, 100) for rate in (1_000, 3_000, 5_000, 7_000, 9_000)),
]


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    repeats = 2 if quick else 3
    for point in POINTS[:1] if quick else POINTS:
        for kind in KINDS:
            network, generators = merging(
                point.rows_per_s, window_ms=point.window_ms,
                on_failure="process", while_correcting="suspend", reconcile=kind, max_delay=X,
            )  # fmt: skip
            warm_s = WARM_AGAIN_S if runs else WARM_S / (2 if quick else 1)
            measured, seen = failures(
                network, [FAILURE_S] * repeats, warm_s=max(warm_s, point.window_ms / 1_000)
            )
            for failure in measured:
                runs.append(
                    {
                        "reconcile": kind,
                        "varied": point.varied,
                        "rows_per_s": point.rows_per_s,
                        "state_rows": point.state_rows,
                        "failure_s": FAILURE_S,
                        "failure_rows": round(point.rows_per_s * failure.missing_s),
                        "stabilize_ms": round(failure.stabilization_ms, 1),
                        "lossless": seen.lossless(generators, failure.cut_at_us, failure.until_us),
                    }
                )
            mean_ms = statistics.fmean(failure.stabilization_ms for failure in measured)
            say(
                f"{kind}, {point.state_rows} rows of state, {point.rows_per_s} rows/s: "
                f"a failure of {FAILURE_S:.0f} s corrected in {mean_ms:.0f} ms"
            )
    promised = {kind: _mean(runs, kind, "promise") for kind in KINDS}
    return {
        "runs": runs,
        "fits": [
            fit(runs, kind, varied) for varied in ("state", "failure") for kind in KINDS
            if len({failure[f"{varied}_rows"] for failure in _of(runs, kind, varied)}) > 1
        ],
        "stabilize_ms": round(promised["checkpoint"], 1),
        "stabilize_undo_ms": round(promised["undo"], 1),
        "failure_s": FAILURE_S,
        "speedup": round(1_000 * FAILURE_S / promised["checkpoint"], 1),
        "speedup_undo": round(1_000 * FAILURE_S / promised["undo"], 1),
        "repeats": repeats,
    }  # fmt: skip


def fit(runs: list[dict[str, Any]], kind: str, varied: str) -> dict[str, Any]:
    """Fit a line to the measurements: milliseconds per 1,000 rows, and fixed milliseconds."""
    measured = _of(runs, kind, varied)
    rows = [row[f"{varied}_rows"] / 1_000 for row in measured]
    slope, fixed = np.polyfit(rows, [row["stabilize_ms"] for row in measured], 1)
    return {"reconcile": kind, "varied": varied, "ms_per_1000_rows": round(float(slope), 2),
            "fixed_ms": round(float(fixed), 1)}  # fmt: skip


def _of(runs: list[dict[str, Any]], kind: str, varied: str) -> list[dict[str, Any]]:
    return [row for row in runs if (row["reconcile"], row["varied"]) == (kind, varied)]


def _mean(runs: list[dict[str, Any]], kind: str, varied: str) -> float:
    return statistics.fmean(row["stabilize_ms"] for row in _of(runs, kind, varied))


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Time to correct a failure (Borealis Figure 12), ms")
    for column in ("rows/s", "rows of state", *KINDS, "lossless"):
        shown.add_column(column, justify="right")
    keys = ("rows_per_s", "state_rows", "varied")
    for point in dict.fromkeys(tuple(row[key] for key in keys) for row in result["runs"]):
        measured = [row for row in result["runs"] if tuple(row[key] for key in keys) == point]
        means = [
            statistics.fmean(row["stabilize_ms"] for row in measured if row["reconcile"] == kind)
            for kind in KINDS
        ]
        shown.add_row(
            f"{point[0]:,}", f"{point[1]:,}", *(f"{mean:.0f}" for mean in means),
            "yes" if all(row["lossless"] for row in measured) else "NO",
        )  # fmt: skip
    lines = [
        f"{line['reconcile']}: {line['fixed_ms']:.0f} ms plus {line['ms_per_1000_rows']:.1f} ms "
        f"per 1,000 rows of {line['varied']}"
        for line in result["fits"]
    ]
    promise = "speed-up, 5 s at 4,500 rows/s with 1,350 rows of state:"
    lines.append(f"{promise} {result['speedup']:.1f} (undo: {result['speedup_undo']:.1f})")
    shown.caption = "\n".join(lines)
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5))
    for axes, varied in zip(panels, ("state", "failure"), strict=True):
        for color, kind in zip(("C0", "C1"), KINDS, strict=True):
            measured = _of(result["runs"], kind, varied)
            x = np.array([row[f"{varied}_rows"] / 1_000 for row in measured])
            axes.plot(x, [row["stabilize_ms"] for row in measured], "o", color=color, label=kind)
            for line in result["fits"]:
                if (line["reconcile"], line["varied"]) == (kind, varied):
                    axes.plot(x, line["fixed_ms"] + line["ms_per_1000_rows"] * x, ":", color=color,
                              label=f"{kind}: linear fit, as in Table 2")  # fmt: skip
        axes.set_xlabel(f"rows of {varied} (thousands)")
        axes.set_ylabel("time to correct (ms)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[0].set_xscale("log")
    figure.tight_layout()
    path = os.path.join(folder, "reconcile.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
