"""Borealis Figure 10: policies for new rows during a failure and during its correction.

One stream of three, s3, is cut for D seconds, and `max_delay` (X in Borealis) is 3 s. During the
failure, a node processes new rows at once or delays each of them by alpha X. During the correction,
the node processes, delays or suspends new rows. Delay_new covers the rows of the two remaining
streams, from their stamp to their first delivery, stable or tentative. N_tentative counts the
tentative rows that the client received.

The paper prints curves, no numbers. The values below are a model of its text (section 5.1). `left`
is the rate of the remaining streams, `all` the rate of all three, R the measured time of the
correction, and D the time during which the stream was missing at the node:

    during the failure          none if D <= alpha X, else
                                process: left * D       delay: left * (D - alpha X)
    during the correction       suspend: none           process: all * R
                                delay:   all * R after delay, all * (R - alpha X) after process
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rich.table import Table

from holdfast.experiments.failing import (
    ALPHA,
    BUCKET_MS,
    WARM_AGAIN_S,
    WARM_S,
    Failure,
    failures,
    merging,
)

#: Rows per second of all three streams together, X in seconds, and the rows of state of the join.
RATE, X_S, STATE_ROWS = 4_500, 3.0, 100
POLICIES = [
    (failure, healing)
    for failure in ("process", "delay")
    for healing in ("process", "delay", "suspend")
]
SECONDS = (2, 4, 6, 10, 14, 30, 60)
QUICK_SECONDS = (2, 6)
#: Lengths of the failure in the table; the plot shows all.
SHOWN_S = (2, 6, 14, 30, 60)
#: The checks of `accepted`, in words.
CHECKS = {
    "nothing_tentative_below_alpha_x": "no tentative rows if the failure is shorter than alpha X",
    "in_time": "process+process and delay+delay always below X",
    "delay_gives_fewer": "delay+delay gives fewer tentative rows than process+process, and "
    "delay+suspend than process+suspend",
    "lossless": "each row exactly once as a stable result",
}
#: Policies that must keep every delay below X for any length of the failure (section 5.1).
ALWAYS_IN_TIME = ("process+process", "delay+delay")


def paper_rows(policy: str, missing_s: float, stabilization_ms: float) -> int:
    """N_tentative in a model of the text of section 5.1."""
    failure, healing = policy.split("+")
    held_s, correcting_s = ALPHA * X_S, stabilization_ms / 1_000
    if missing_s <= held_s:
        return 0
    seconds = missing_s - (held_s if failure == "delay" else 0.0)
    if healing == "suspend":
        correcting_s = 0.0
    elif (failure, healing) == ("process", "delay"):
        correcting_s = max(0.0, correcting_s - held_s)
    return round(RATE * 2 / 3 * seconds + RATE * correcting_s)


def paper_delay_ms(policy: str, missing_s: float, stabilization_ms: float) -> float:
    """Delay_new in a model of the text of section 5.1.

    Delay_new is alpha X. Suspended rows wait for the correction in addition to earlier waiting.
    """
    failure, healing = policy.split("+")
    held_ms = 1_000 * ALPHA * X_S
    if missing_s <= ALPHA * X_S or healing != "suspend":
        return min(held_ms, 1_000 * missing_s)
    if failure == "delay":
        return held_ms + stabilization_ms
    return max(held_ms, stabilization_ms)


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for number, (failure, healing) in enumerate(POLICIES):
        policy = f"{failure}+{healing}"
        network, generators = merging(
            RATE,
            join_rows=STATE_ROWS,
            on_failure=failure,
            while_correcting=healing,
            max_delay=f"{X_S:.0f}s",
        )

        def said(outage: Failure, policy: str = policy) -> None:
            say(
                f"{policy}: {outage.failure_s:.0f} s without s3, {outage.tentative_rows} tentative "
                f"rows, corrected in {outage.stabilization_ms:.0f} ms"
            )

        seconds = QUICK_SECONDS if quick else SECONDS
        measured, seen = failures(
            network, seconds, warm_s=WARM_AGAIN_S if number else WARM_S, said=said
        )
        before_us = 0
        for outage in measured:
            delay_ms = seen.delay_new_ms(outage.cut_at_us, outage.until_us)
            runs.append(
                {
                    "policy": policy,
                    "failure_s": outage.failure_s,
                    "missing_s": round(outage.missing_s, 3),
                    "delay_new_ms_max": round(delay_ms, 1),
                    "tentative_rows": outage.tentative_rows,
                    "lossless": seen.lossless(generators, before_us, outage.until_us),
                    "stabilization_ms": round(outage.stabilization_ms, 1),
                }
            )
            before_us = outage.until_us
            say(f"{policy}: {outage.failure_s:.0f} s: delay of new rows at most {delay_ms:.0f} ms")
    return {
        "runs": runs,
        "accepted": accepted(runs),
        "x_ms": 1_000 * X_S,
        "alpha": ALPHA,
        "rows_per_s": RATE,
        "bucket_ms": BUCKET_MS,
    }


def accepted(runs: list[dict[str, Any]]) -> dict[str, bool]:
    """Check what section 5.1 of the paper promises of these policies."""
    tentative_rows = {(row["policy"], row["failure_s"]): row["tentative_rows"] for row in runs}
    longer = {seconds for _, seconds in tentative_rows if seconds > X_S}
    return {
        "nothing_tentative_below_alpha_x": not any(
            row["tentative_rows"] for row in runs if row["failure_s"] < ALPHA * X_S
        ),
        "in_time": all(
            row["delay_new_ms_max"] < 1_000 * X_S for row in runs if row["policy"] in ALWAYS_IN_TIME
        ),
        "delay_gives_fewer": all(
            tentative_rows["delay+delay", seconds] < tentative_rows["process+process", seconds]
            and tentative_rows["delay+suspend", seconds]
            < tentative_rows["process+suspend", seconds]
            for seconds in longer
        ),
        "lossless": all(row["lossless"] for row in runs),
    }


def _model(row: dict[str, Any], model: Callable[[str, float, float], float]) -> float:
    return model(row["policy"], row["missing_s"], row["stabilization_ms"])


def table(result: dict[str, Any]) -> Table:
    """Return the results as a table that fits into 80 columns: not every length of the failure."""
    lengths = sorted({row["failure_s"] for row in result["runs"]})
    shown_lengths = [s for s in lengths if s in SHOWN_S] or lengths
    longest = lengths[-1]
    shown = Table(title="Longest delay of new rows (ms) by length of the failure, X = 3 s")
    shown.add_column("policy")
    for column in (
        *(f"{s:.0f} s" for s in shown_lengths),
        "tentative rows",
        "(model)",
        "corrected in",
    ):
        shown.add_column(column, justify="right")
    for policy in dict.fromkeys(row["policy"] for row in result["runs"]):
        rows = {row["failure_s"]: row for row in result["runs"] if row["policy"] == policy}
        last = rows[longest]
        shown.add_row(
            policy, *(f"{rows[s]['delay_new_ms_max']:,.0f}" for s in shown_lengths),
            f"{last['tentative_rows']:,}", f"{_model(last, paper_rows):,.0f}",
            f"{last['stabilization_ms'] / 1_000:.1f} s",
        )  # fmt: skip
    worst = {
        policy: max(r["delay_new_ms_max"] for r in result["runs"] if r["policy"] == policy)
        for policy in sorted(ALWAYS_IN_TIME)
    }
    checks = ", ".join(
        f"{CHECKS[check]}: {'yes' if passed else 'NO'}"
        for check, passed in result["accepted"].items()
    )
    shown.caption = (
        f"Tentative rows and correction time: failure of {longest:.0f} s; (model): computed after "
        "section 5.1 of the paper, with the correction time measured here\nLongest delay over all "
        + f"{len(lengths)} lengths: "
        + ", ".join(f"{policy} {ms:,.0f} ms" for policy, ms in worst.items())
        + f"\n{checks}"
    )
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, (delay, rows) = plt.subplots(1, 2, figsize=(11, 4.5))
    for number, (failure, healing) in enumerate(POLICIES):
        policy = f"{failure}+{healing}"
        measured = [row for row in result["runs"] if row["policy"] == policy]
        x, color = [row["failure_s"] for row in measured], f"C{number}"
        for axes, key, model in (
            (delay, "delay_new_ms_max", paper_delay_ms),
            (rows, "tentative_rows", paper_rows),
        ):
            y = [row[key] / 1_000 for row in measured]
            axes.plot(x, y, marker="o", color=color, label=policy)
            axes.plot(x, [_model(row, model) / 1_000 for row in measured], ":", color=color)
    delay.axhline(result["x_ms"] / 1_000, color="black", linewidth=0.8)
    delay.set_ylabel("longest delay of a new row (s); the line is X")
    rows.set_ylabel("tentative rows (thousands)")
    for axes in (delay, rows):
        axes.set_xlabel("duration of the failure (s)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rows.plot([], [], ":", color="gray", label="model of the paper's text")
    rows.legend(fontsize="small")
    figure.tight_layout()
    path = os.path.join(folder, "policies.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
