"""Continuous eventual checkpointing: the figures of the paper, recovery-time objectives, and
checkpoints of the whole state on the same workload.

Everything runs in this process, without transport (`cec_bench.py`), on Spark. Crashes forget
everything but the files, and the page cache is dropped; the JVM stays, as if the process had
started and done a first job. The experiment `cec-kills` kills real processes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from holdfast.config import Options
from holdfast.engine import session
from holdfast.experiments.cec_objectives import delays, objectives, whole_state
from holdfast.experiments.cec_sweeps import CHANGES, PAPER, SCALE, baseline, load_times, sweep


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    sessions = session.start(Options(master="local[2]", memory="2g"))
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-cec-") as folder:
            slow = delays(sessions, folder, 500 if quick else 5_000, say)
            base = baseline(sessions, folder, *((3, 20) if quick else (5, 200)), say)
            swept = sweep(sessions, folder, *((3, 10) if quick else (5, 20)), say)
            stated = objectives(sessions, folder, 10 if quick else 100, say)
            whole = whole_state(sessions, folder, *((50, 2) if quick else (100, 5)), say)
    finally:
        sessions.stop()
    return {
        **_ratios(base),
        **load_times(swept),
        "monotone": swept["monotone"],
        "time_ratio": whole["time_ratio"],
        "bytes_ratio": whole["bytes_ratio"],
        "p999_ratio": slow["p999_ratio"],
        "baseline": base,
        "sweeps": swept,
        "objectives": stated,
        "whole_state": whole,
        "delays": slow,
    }


def _ratios(base: Mapping[str, Any]) -> dict[str, float]:
    forms = {"baseline": "default", "literal": "literal", "noise": "again"}
    return {
        f"{name}_ratio_{kind}": base[kind]["ratio"][form]
        for name, form in forms.items()
        for kind in ("fast", "slow")
    } | {"lazy_ratio": base["slow"]["ratio"]["lazy"]}


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Continuous eventual checkpoints: what the dials change")
    for column in ("dial", "footprints a step", "rewritten a step", "entries to read", "read (s)",
                   "replayed (MB)", "recovery (s)", "response (s)"):  # fmt: skip
        shown.add_column(column, justify="left" if column == "dial" else "right")
    units = {"q": "Q = {} times the open windows", "u": "U = {:,} rows", "cp": "CP = {} ms"}
    for dial, label in units.items():
        paper = PAPER[dial]
        for number, row in enumerate(result["sweeps"][dial]):
            value = SCALE[dial] * row["value"] if dial == "cp" else row["value"]
            shown.add_row(
                label.format(value), f"{row['footprints']:,.0f}", f"{row['rewritten']:,.0f}",
                *(_beside(row, key, paper, number) for key in ("extent", "load_s", "replayed_mb")),
                f"{row['recovery_s']:.1f}", _beside(row, "response_s", paper, number),
            )  # fmt: skip
    response_s = result["sweeps"]["without"]["response_s"]
    shown.add_row("without checkpoints", *("" for _ in range(6)), f"{response_s:.2f}")
    shown.caption = "\n".join(_captions(result))
    return shown


def _beside(row: Mapping[str, Any], key: str, paper: Mapping[str, Any], number: int) -> str:
    value = f"{row[key]:,.0f}" if row[key] >= 100 else f"{row[key]:.2f}"
    theirs = paper.get(key, (None,) * 4)[number]
    return value if theirs is None else f"{value} (paper {theirs:,g})"


def _captions(result: dict[str, Any]) -> list[str]:
    whole, slow = result["whole_state"], result["delays"]
    captions = [
        f"rows/s with footprints over those without: fast windows "
        f"{result['baseline_ratio_fast']:.2f} (literal {result['literal_ratio_fast']:.2f}), slow "
        f"windows {result['baseline_ratio_slow']:.2f} (literal {result['literal_ratio_slow']:.2f}; "
        f"paper: above 0.9); ten buckets a step without footprints {result['lazy_ratio']:.2f}; "
        f"the same steps without footprints measured twice {result['noise_ratio_fast']:.2f} and "
        f"{result['noise_ratio_slow']:.2f}",
        *(
            f"reading and verifying {size} entries: {result[f'load_s_{size}']:.3f} s; decoding "
            f"all of them: {result[f'decode_s_{size}']:.3f} s"
            for size in ("120k", "500k")
            if f"load_s_{size}" in result
        ),
        f"at the same recovery time as copies of the whole state every "
        f"{whole['full_every_rows']:,} rows: {result['time_ratio']:.2f} of their time, "
        f"{result['bytes_ratio']:.2f} of their bytes ({whole['durable_ratio']:.2f} of those that "
        f"are flushed); step {whole['cec']['step_ms']:.0f} ms, with copies "
        f"{whole['full']['step_ms']:.0f}, without both {whole['none']['step_ms']:.0f}",
        f"99.9th percentile of delays over {slow['steps']:,} steps: "
        f"{slow['cec']['ms_p999']:.0f} ms with footprints, {slow['none']['ms_p999']:.0f} without "
        f"(measured twice: {slow['again']['ms_p999']:.0f})",
    ]
    stated_times = {s: of for s, of in result["objectives"].items() if isinstance(of, dict)}
    captions += [
        f"recovery stated {stated}: {of['within']} of {of['crashes']} crashes within, median "
        f"{statistics.median(of['recovery_s']):.2f} s, predicted "
        f"{statistics.median(of['predicted_s']):.2f} s (error: median {of['error_median']:.0%}, "
        f"90th percentile {of['error_p90']:.0%})"
        for stated, of in stated_times.items()
    ]
    return [
        *captions,
        "bytes made durable at 5 s over those at 1 s: "
        f"{result['objectives']['bytes_5s_over_1s']:.2f}",
    ]


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(14, 6))
    keys = ("rewritten", "extent", "load_s", "replayed_mb")
    titles = {
        "rewritten": "rewritten a step", "footprints": "footprints a step",
        "extent": "extent (entries)", "load_s": "read (s)", "replayed_mb": "replayed (MB)",
    }  # fmt: skip
    for line, (dial, name) in enumerate((("q", "Q / open windows"), ("u", "U (rows)"))):
        rows = result["sweeps"][dial]
        keys = (CHANGES[dial][0], *keys[1:])
        labels = [titles[key] for key in keys]
        for at, key, label in zip(axes[line], keys, labels, strict=True):
            at.plot([row["value"] for row in rows], [row[key] for row in rows], marker="o")
            theirs = PAPER[dial].get(key)
            if theirs:
                points = [(r["value"], v) for r, v in zip(rows, theirs, strict=True) if v]
                at.plot(*zip(*points, strict=True), marker="x", linestyle=":", label="paper")
                at.legend()
            at.set_xlabel(name)
            at.set_title(label, fontsize=10)
            at.set_ylim(bottom=0)
            at.grid(alpha=0.3)
    path = os.path.join(folder, "cec.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]
