"""The plot of the comparison: times of results and rows per second, with the spread."""

from __future__ import annotations

import os
from typing import Any

_COLORS = {"holdfast": "#1b6ca8", "tuned": "#e08e0b", "tuned-rocksdb": "#f2c46d",
           "installed": "#b0b0b0"}  # fmt: skip
_NAMES = {
    "holdfast": "Holdfast, eager", "tuned": "Structured Streaming, tuned",
    "tuned-rocksdb": "tuned, RocksDB", "installed": "Structured Streaming, as installed",
}  # fmt: skip
_LATENCY = {
    "tumbling": "tumbling\n1 s",
    "sliding": "sliding\n10 s / 1 s",
    "join": "join\n300 ms",
    "stateless": "stateless\n200,000 rows",
    "count": "count\nwindow",
}
_RATES = {"large": "1 bucket\na step", "large_10": "10 buckets\na step"}


def _bars(axes: Any, runs: dict[str, Any], labels: dict[str, str], key: str, scale: float) -> None:
    queries = [query for query in labels if query in runs]
    sides = [side for side in _NAMES if any(side in runs[query] for query in queries)]
    width = 0.8 / len(sides)
    for at, query in enumerate(queries):
        present = [side for side in sides if runs[query].get(side, {}).get(key)]
        for number, side in enumerate(present):
            one = runs[query][side][key]
            median, low, high = (one[name] / scale for name in ("median", "min", "max"))
            x = at + (number - (len(present) - 1) / 2) * width
            axes.bar(x, median, 0.92 * width, color=_COLORS[side],
                     yerr=[[median - low], [high - median]], capsize=2.5,
                     error_kw={"linewidth": 1, "ecolor": "#333333"})  # fmt: skip
            text = f"{median:.0f}" if median >= 10 else f"{median:.2f}".rstrip("0").rstrip(".")
            axes.annotate(text, (x, high), xytext=(0, 2), textcoords="offset points",
                          ha="center", va="bottom", fontsize=7)  # fmt: skip
    axes.set_xticks(range(len(queries)), [labels[query] for query in queries], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def _delays(axes: Any, result: dict[str, Any]) -> None:
    """Delays while rows arrive: both sides from end to end, and real-time mode."""
    live, ends = result.get("realtime"), result["end_to_end"]
    groups = {"window end to\nconsumer, fsync": {s: ends[s]["final_ms"] for s in ends}}
    if live:
        groups["real-time:\nupdate"] = live["update_ms"]
        groups["real-time:\nfinal result"] = live["final_ms"]
    colors = {"holdfast": _COLORS["holdfast"], "structured_streaming": _COLORS["tuned"]}
    for at, values in enumerate(groups.values()):
        for number, (side, color) in enumerate(colors.items()):
            x = at + (number - 0.5) * 0.38
            axes.bar(x, values[side], 0.35, color=color)
            axes.annotate(f"{values[side]:,.0f}", (x, values[side]), xytext=(0, 2),
                          textcoords="offset points", ha="center", fontsize=7)  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(bottom=1)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title("delay while rows arrive (ms, log scale)", fontsize=9)


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, (latency, rates, delays) = plt.subplots(
        1, 3, figsize=(13, 4.2), gridspec_kw={"width_ratios": [5, 2.2, 3]}
    )
    _bars(latency, result["runs"], _LATENCY, "due_ms", 1.0)
    latency.set_title("from a complete bucket to a readable result (ms)", fontsize=9)
    _bars(rates, result["runs"], _RATES, "rows_per_s", 1e6)
    rates.set_title("million rows/s, 200,000 rows a bucket", fontsize=9)
    _delays(delays, result)
    sides = {side for of in result["runs"].values() for side in of}
    legend = [Patch(color=_COLORS[side], label=_NAMES[side]) for side in _NAMES if side in sides]
    figure.legend(handles=legend, loc="lower center", ncols=len(legend), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path = os.path.join(folder, "vs-structured-streaming.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]
