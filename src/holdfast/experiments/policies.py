"""Borealis Figure 10: policies for new rows during a failure and during its correction.

One stream of three, s3, is cut for D seconds, and `max_delay` (X in Borealis) is 3 s. During the
failure, a node processes new rows at once or delays each of them by alpha X. During the correction,
the node processes, delays or suspends new rows. Delay_new covers the rows of the two remaining
streams, from their stamp to their first delivery, stable or tentative. N_tentative counts the
tentative rows that the client received.

The paper prints curves, no numbers. Its text (section 5.1) implies the values below. `left` is the
rate of the remaining streams, `all` the rate of all three, R the measured time of the correction,
and D the time during which the stream was missing at the node:

    during the failure          none if D <= alpha X, else
                                process: left * D       delay: left * (D - alpha X)
    during the correction       suspend: none
                                process: all * R, and rows held back by a failure policy of delay
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

#: Rows per second of all three streams together, and X in seconds.
RATE, X_S = 4_500, 3.0
POLICIES = [
    (failure, healing)
    for failure in ("process", "delay")
    for healing in ("process", "delay", "suspend")
]
SECONDS = (2, 4, 6, 8, 10, 14, 20, 30, 45, 60)
QUICK_SECONDS = (2, 6)
#: Policies that must keep every delay below X for any length of the failure (section 5.1).
ALWAYS_IN_TIME = ("process+process", "delay+delay")


def paper_rows(policy: str, missing_s: float, stabilization_ms: float) -> int:
    """N_tentative as the text of section 5.1 implies it."""
    failure, healing = policy.split("+")
    held_s, correcting_s = ALPHA * X_S, stabilization_ms / 1_000
    if missing_s <= held_s:
        return 0
    seconds = missing_s - (held_s if failure == "delay" else 0.0)
    if healing == "suspend":
        correcting_s = 0.0
    elif (failure, healing) == ("delay", "process"):
        correcting_s += held_s
    elif (failure, healing) == ("process", "delay"):
        correcting_s = max(0.0, correcting_s - held_s)
    return round(RATE * 2 / 3 * seconds + RATE * correcting_s)


def paper_delay_ms(policy: str, missing_s: float, stabilization_ms: float) -> float:
    """Delay_new as the text of section 5.1 implies it.

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
        network, made = merging(
            RATE, on_failure=failure, while_correcting=healing, max_delay=f"{X_S:.0f}s"
        )

        def said(met: Failure, policy: str = policy) -> None:
            say(
                f"{policy}: {met.failure_s:.0f} s without s3, {met.tentative_rows} tentative rows, "
                f"corrected in {met.stabilization_ms:.0f} ms"
            )

        seconds = QUICK_SECONDS if quick else SECONDS
        found, seen = failures(
            network, seconds, warm_s=WARM_AGAIN_S if number else WARM_S, said=said
        )
        before_us = 0
        for met in found:
            delay_ms = seen.delay_new_ms(met.cut_at_us, met.until_us)
            runs.append(
                {
                    "policy": policy,
                    "failure_s": met.failure_s,
                    "missing_s": round(met.missing_s, 3),
                    "delay_new_ms_max": round(delay_ms, 1),
                    "delay_new_ms_paper": round(
                        paper_delay_ms(policy, met.missing_s, met.stabilization_ms), 1
                    ),
                    "tentative_rows": met.tentative_rows,
                    "tentative_rows_paper": paper_rows(policy, met.missing_s, met.stabilization_ms),
                    "lossless": seen.lossless(made, before_us, met.until_us),
                    "stabilization_ms": round(met.stabilization_ms, 1),
                }
            )
            before_us = met.until_us
            say(f"{policy}: {met.failure_s:.0f} s: new rows were at most {delay_ms:.0f} ms late")
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
    given = {(met["policy"], met["failure_s"]): met["tentative_rows"] for met in runs}
    longer = {seconds for _, seconds in given if seconds > X_S}
    return {
        "nothing_tentative_below_alpha_x": not any(
            met["tentative_rows"] for met in runs if met["failure_s"] < ALPHA * X_S
        ),
        "in_time": all(
            met["delay_new_ms_max"] < 1_000 * X_S for met in runs if met["policy"] in ALWAYS_IN_TIME
        ),
        "delay_gives_fewer": all(
            given["delay+delay", seconds] < given["process+process", seconds]
            and given["delay+suspend", seconds] < given["process+suspend", seconds]
            for seconds in longer
        ),
        "lossless": all(met["lossless"] for met in runs),
    }


def table(result: dict[str, Any]) -> Table:
    """Return the results as a table that fits into 80 columns."""
    shown = Table(
        title="Borealis Figure 10, X = 3 s: failure (s), delay of new rows and correction (R) in ms"
    )
    for column in ("policy", "s", "delay", "(text)", "tentative", "(text)", "R", "lost"):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    for met in result["runs"]:
        shown.add_row(
            met["policy"], f"{met['failure_s']:.0f}", f"{met['delay_new_ms_max']:.0f}",
            f"{met['delay_new_ms_paper']:.0f}", f"{met['tentative_rows']:,}",
            f"{met['tentative_rows_paper']:,}", f"{met['stabilization_ms']:.0f}",
            "none" if met["lossless"] else "SOME",
        )  # fmt: skip
    shown.caption = ", ".join(
        f"{what.replace('_', ' ')}: {'yes' if held else 'NO'}"
        for what, held in result["accepted"].items()
    )
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, (delay, rows) = plt.subplots(1, 2, figsize=(11, 4.5))
    for number, (failure, healing) in enumerate(POLICIES):
        policy = f"{failure}+{healing}"
        mine = [met for met in result["runs"] if met["policy"] == policy]
        x, color = [met["failure_s"] for met in mine], f"C{number}"
        for axes, key, paper in (
            (delay, "delay_new_ms_max", "delay_new_ms_paper"),
            (rows, "tentative_rows", "tentative_rows_paper"),
        ):
            y = [met[key] / 1_000 for met in mine]
            axes.plot(x, y, marker="o", color=color, label=policy)
            axes.plot(x, [met[paper] / 1_000 for met in mine], ":", color=color)
    delay.axhline(result["x_ms"] / 1_000, color="black", linewidth=0.8)
    delay.set_ylabel("longest delay of a new row (s); the line is X")
    rows.set_ylabel("tentative rows (thousands)")
    for axes in (delay, rows):
        axes.set_xlabel("duration of the failure (s)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rows.plot([], [], ":", color="gray", label="by the paper's text")
    rows.legend(fontsize="small")
    figure.tight_layout()
    path = os.path.join(folder, "policies.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
