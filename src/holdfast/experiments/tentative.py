"""Borealis Figure 9: how long to wait before results become tentative.

One stream of three is cut for 5 s. A node that has waited for alpha X (X is `max_delay`) either
continues to delay every row by that time (delay), or catches up and processes new rows as they
arrive (process). New rows are suspended during the correction, so that all tentative rows belong to
the failure.

The paper prints curves. According to its text (section 5.1), Delay_new rises one to one with X
under both policies. Under delay, the number of tentative rows falls in proportion to X:
`left * (D - alpha X)`. Under process, the number is a step function: `left * D` as long as there is
time to catch up. `left` is the rate of the remaining streams, and D the time during which the third
stream was missing at the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rich.table import Table

from holdfast.experiments.failing import ALPHA, WARM_AGAIN_S, WARM_S, failures, merging

#: Rows per second of all three streams together, and length of the failure in seconds.
RATE, FAILURE_S = 3_000, 5.0
HELD_S = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
QUICK_HELD_S = (1.0, 3.0)


def paper_rows(policy: str, held_s: float, missing_s: float) -> int:
    if missing_s <= held_s:
        return 0
    return round(RATE * 2 / 3 * (missing_s - (held_s if policy == "delay" else 0.0)))


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    repeats = 1 if quick else 3
    for policy in ("delay", "process"):
        for held_s in QUICK_HELD_S if quick else HELD_S:
            network, generators = merging(
                RATE, on_failure=policy, while_correcting="suspend",
                max_delay=f"{round(1_000 * held_s / ALPHA)}ms",
            )  # fmt: skip
            measured, seen = failures(
                network, [FAILURE_S] * repeats, warm_s=WARM_AGAIN_S if runs else WARM_S
            )
            for failure in measured:
                runs.append(
                    {
                        "policy": policy,
                        "held_ms": round(1_000 * held_s),
                        "missing_s": round(failure.missing_s, 3),
                        "delay_new_ms_max": round(
                            seen.delay_new_ms(failure.cut_at_us, failure.until_us), 1
                        ),
                        "tentative_rows": failure.tentative_rows,
                        "tentative_rows_paper": paper_rows(policy, held_s, failure.missing_s),
                        "stabilization_ms": round(failure.stabilization_ms, 1),
                        "lossless": seen.lossless(generators, failure.cut_at_us, failure.until_us),
                    }
                )
                say(
                    f"{policy}, alpha X {held_s:.1f} s: delay of new rows at most "
                    f"{runs[-1]['delay_new_ms_max']:.0f} ms, {failure.tentative_rows} tentative"
                )
    return {"runs": runs, "failure_s": FAILURE_S, "rows_per_s": RATE, "repeats": repeats}


def points(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return means over the repeats; for the delay, the maximum."""
    means = []
    for policy, held_ms in dict.fromkeys((row["policy"], row["held_ms"]) for row in result["runs"]):
        repeats = [
            row for row in result["runs"] if (row["policy"], row["held_ms"]) == (policy, held_ms)
        ]
        means.append(
            {
                "policy": policy,
                "held_ms": held_ms,
                "delay_new_ms_max": max(row["delay_new_ms_max"] for row in repeats),
                "tentative_rows": sum(row["tentative_rows"] for row in repeats) / len(repeats),
                "tentative_rows_paper": sum(row["tentative_rows_paper"] for row in repeats)
                / len(repeats),
                "lossless": all(row["lossless"] for row in repeats),
            }
        )
    return means


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="A failure of 5 s (Borealis Figure 9); in brackets: computed from its text")
    for column in ("policy", "alpha X", "delay of new rows", "tentative rows", "lossless"):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for row in points(result):
        shown.add_row(
            row["policy"], f"{row['held_ms']:,.0f} ms",
            f"{row['delay_new_ms_max']:,.0f} ms",
            f"{row['tentative_rows']:,.0f} ({row['tentative_rows_paper']:,.0f})",
            "yes" if row["lossless"] else "NO",
        )  # fmt: skip
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, (delay, rows) = plt.subplots(1, 2, figsize=(9, 3.8))
    for color, policy in (("C0", "process"), ("C1", "delay")):
        shown = [row for row in points(result) if row["policy"] == policy]
        x = [row["held_ms"] / 1_000 for row in shown]
        delay.plot(x, [row["delay_new_ms_max"] / 1_000 for row in shown], marker="o", color=color,
                   label=policy)  # fmt: skip
        rows.plot(x, [row["tentative_rows"] / 1_000 for row in shown], marker="o", color=color,
                  label=policy)  # fmt: skip
        rows.plot(x, [row["tentative_rows_paper"] / 1_000 for row in shown], ":", color=color,
                  label=f"{policy}, from the text of the paper")  # fmt: skip
    delay.set_ylabel("longest delay of a new row (s)")
    rows.set_ylabel("tentative rows (thousands)")
    rows.set_ylim(0, 15)
    delay.set_ylim(bottom=0)
    for axes in (delay, rows):
        axes.set_xlabel("alpha X (s)")
        axes.legend(fontsize="small", loc="upper left")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path = os.path.join(folder, "tentative.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
