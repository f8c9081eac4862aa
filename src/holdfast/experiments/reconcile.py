"""Borealis Figure 12 and Table 2: time to correct a failure, from the state before the failure
(checkpoint) or by undoing and rebuilding the state (undo).

One stream of three is cut for 5 s, `max_delay` (X in Borealis) is 1 s, and new rows are suspended
during the correction. The time is measured from the return of the cut stream at the node to
REC_DONE at the client. As in the paper, two parameters vary: the rows of state at 1,000 rows per
second, and the rows to recompute (by the rate, with a state of 20 rows). The state is held by one
join, or split between two joins in series ("2 boxes" in the paper). Larger states are held by a
window. A further part measures the cost of checkpoints (`checkpoint_cost`).

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

from holdfast.experiments import checkpoint_cost, spread
from holdfast.experiments.failing import WARM_AGAIN_S, WARM_S, failures, merging

FAILURE_S, X = 5.0, "1s"
KINDS = ("checkpoint", "undo")
HOLDERS = {1: "a join", 2: "two joins"}


@dataclass(frozen=True, slots=True)
class Point:
    #: The varied parameter: "state", "window" (larger states) or "failure"; "promise" for the case
    #: with a promised time.
    varied: str
    rows_per_s: int
    state_rows: int
    boxes: int = 1

    @property
    def window_ms(self) -> int | None:
        if self.varied not in ("promise", "window"):
            return None
        return self.state_rows * 1_000 // self.rows_per_s

    @property
    def join_rows(self) -> int | None:
        return self.state_rows if self.window_ms is None else None


#: A failure of 5 s at 4,500 rows/s with 1,350 rows of state must be corrected within 1 s.
PROMISED = Point("promise", 4_500, 1_350)
#: Rows that the joins hold while the rate varies, as in the paper.
SMALL_STATE = 20
POINTS = [
    PROMISED,
    *(
        Point("state", 1_000, state, boxes)
        for state in (500, 1_000, 2_000, 4_000)
        for boxes in (1, 2)
    ),
    *(Point("window", 1_000, state) for state in (1_000, 10_000, 100_000)),
    *(
        Point("failure", rate, SMALL_STATE, boxes)
        for rate in (1_000, 3_000, 5_000, 7_000, 9_000)
        for boxes in (1, 2)
    ),
]
#: The lines that are fitted: the varied parameter and the number of boxes.
FITS = (("state", 1), ("state", 2), ("window", 1), ("failure", 1), ("failure", 2))


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    repeats = 2 if quick else 3
    for point in POINTS[:1] if quick else POINTS:
        for kind in KINDS:
            network, generators = merging(
                point.rows_per_s, window_ms=point.window_ms,
                join_rows=point.join_rows, joins=point.boxes,
                on_failure="process", while_correcting="suspend", reconcile=kind, max_delay=X,
            )  # fmt: skip
            warm_s = WARM_AGAIN_S if runs else WARM_S / (2 if quick else 1)
            filling_s = point.state_rows / point.rows_per_s
            measured, seen = failures(network, [FAILURE_S] * repeats, warm_s=max(warm_s, filling_s))
            for failure in measured:
                runs.append(
                    {
                        "reconcile": kind,
                        "varied": point.varied,
                        "boxes": point.boxes,
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
                f"{kind}, {point.state_rows} rows of state, {point.boxes} boxes, "
                f"{point.rows_per_s} rows/s: "
                f"a failure of {FAILURE_S:.0f} s corrected in {mean_ms:.0f} ms"
            )
    promised = {kind: _mean(runs, kind, "promise") for kind in KINDS}
    return {
        "runs": runs,
        "fits": [
            fit(runs, kind, varied, boxes) for varied, boxes in FITS for kind in KINDS
            if len({row[_rows_of(varied)] for row in _of(runs, kind, varied, boxes)}) > 1
        ],
        "checkpoints": checkpoint_cost.run(quick, say),
        "stabilize_ms": round(promised["checkpoint"], 1),
        "stabilize_undo_ms": round(promised["undo"], 1),
        "failure_s": FAILURE_S,
        "speedup": round(1_000 * FAILURE_S / promised["checkpoint"], 1),
        "speedup_undo": round(1_000 * FAILURE_S / promised["undo"], 1),
        "repeats": repeats,
    }  # fmt: skip


def fit(runs: list[dict[str, Any]], kind: str, varied: str, boxes: int) -> dict[str, Any]:
    """Fit a line to the measurements: milliseconds per 1,000 rows, and fixed milliseconds."""
    measured = _of(runs, kind, varied, boxes)
    rows = [row[_rows_of(varied)] / 1_000 for row in measured]
    slope, fixed = np.polyfit(rows, [row["stabilize_ms"] for row in measured], 1)
    return {
        "reconcile": kind,
        "varied": varied,
        "boxes": boxes,
        "ms_per_1000_rows": round(float(slope), 2),
        "fixed_ms": round(float(fixed), 1),
    }


def _rows_of(varied: str) -> str:
    return "failure_rows" if varied == "failure" else "state_rows"


def _of(runs: list[dict[str, Any]], kind: str, varied: str, boxes: int = 1) -> list[dict[str, Any]]:
    wanted = (kind, varied, boxes)
    return [row for row in runs if (row["reconcile"], row["varied"], row["boxes"]) == wanted]


def _mean(runs: list[dict[str, Any]], kind: str, varied: str) -> float:
    return statistics.fmean(row["stabilize_ms"] for row in _of(runs, kind, varied))


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Time to correct a failure (Borealis Figure 12), ms")
    for column in ("rows/s", "rows of state", "held by", *KINDS, "lossless"):
        shown.add_column(column, justify="right")
    keys = ("rows_per_s", "state_rows", "varied", "boxes")
    for point in dict.fromkeys(tuple(row[key] for key in keys) for row in result["runs"]):
        measured = [row for row in result["runs"] if tuple(row[key] for key in keys) == point]
        times = [[row["stabilize_ms"] for row in measured if row["reconcile"] == k] for k in KINDS]
        rate, state, varied, boxes = point
        holder = "a window" if varied in ("promise", "window") else HOLDERS[boxes]
        shown.add_row(
            f"{rate:,}", f"{state:,}", holder, *(spread(of) for of in times),
            "yes" if all(row["lossless"] for row in measured) else "NO",
        )  # fmt: skip
    lines = [
        f"{line['reconcile']}, {HOLDERS[line['boxes']] if line['varied'] != 'window' else 'window'}"
        f": {line['fixed_ms']:.0f} ms plus {line['ms_per_1000_rows']:.1f} ms per 1,000 rows of "
        + ("the failure" if line["varied"] == "failure" else "state")
        for line in result["fits"]
    ]
    lines.append(
        f"5 s at 4,500 rows/s with 1,350 rows of state: corrected {result['speedup']:.1f} times "
        f"(undo: {result['speedup_undo']:.1f} times) as fast as the failure lasted"
    )
    shown.caption = "\n".join([*lines, *checkpoint_cost.text(result["checkpoints"])])
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(19, 4.5))
    titles = {
        "state": "state in joins", "window": "state in a window", "failure": "rows to recompute"
    }  # fmt: skip
    for axes, (varied, title) in zip(panels, titles.items(), strict=False):
        for color, kind in zip(("C0", "C1"), KINDS, strict=True):
            for boxes, marker in ((1, "o"), (2, "s")):
                measured = _of(result["runs"], kind, varied, boxes)
                if not measured:
                    continue
                x = np.array([row[_rows_of(varied)] / 1_000 for row in measured])
                label = f"{kind}, {HOLDERS[boxes]}" if varied != "window" else kind
                axes.plot(x, [row["stabilize_ms"] for row in measured], marker, color=color,
                          fillstyle="full" if boxes == 1 else "none", label=label)  # fmt: skip
                for line in result["fits"]:
                    if (line["reconcile"], line["varied"], line["boxes"]) == (kind, varied, boxes):
                        fit_x = np.linspace(x.min(), x.max(), 200)
                        fitted = line["fixed_ms"] + line["ms_per_1000_rows"] * fit_x
                        axes.plot(fit_x, fitted, ":" if boxes == 1 else "--", color=color)
        axes.set_title(title)
        axes.set_xlabel(f"rows of {'the failure' if varied == 'failure' else 'state'} (thousands)")
        axes.set_ylabel("time to correct (ms)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[1].set_xscale("log")
    for color, kind in zip(("C0", "C1"), checkpoint_cost.KINDS, strict=True):
        costs = [cost for cost in result["checkpoints"] if cost["state"] == kind]
        rows = [cost["state_rows"] for cost in costs]
        for key, style in (("checkpoint_ms", "o-"), ("step_ms", "s:")):
            label = f"{'checkpoint' if key == 'checkpoint_ms' else 'step'}, {kind}"
            panels[3].plot(rows, [cost[key] for cost in costs], style, color=color, label=label)
    panels[3].set(title="cost of a checkpoint", xlabel="rows of state", ylabel="ms")
    panels[3].set(xscale="log", yscale="log")
    panels[3].grid(alpha=0.3)
    panels[3].legend(fontsize="small")
    figure.tight_layout()
    path = os.path.join(folder, "reconcile.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
