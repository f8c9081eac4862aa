"""Ratios, medians and spreads of the comparison, and its table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from holdfast.experiments import spread
from holdfast.experiments.versus.workload import WIDTH_US

#: Measures of a repeat by query and side.
Found = dict[str, dict[str, list[Any]]]
TUNED = ("tuned", "tuned-rocksdb")
#: Buckets of a window of 1 s.
WINDOW_BUCKETS = 1_000_000 // WIDTH_US
#: A query, and how the table describes it.
TITLES = {
    "tumbling": "tumbling 1 s, 1,000 rows and 100 keys a bucket",
    "sliding": "sliding 10 s every 1 s, 1,000 rows and 100 keys a bucket",
    "join": "join within 300 ms, 1,000 and 100 rows a bucket",
    "large": "tumbling 1 s, 200,000 rows and 10,000 keys a bucket",
    "large_10": "the same, 10 buckets a step",
    "stateless": "filter and map, 200,000 rows a bucket, 90% of them results",
    "count": "count windows, 100,000 rows and keys a bucket",
    "count applyInPandasWithState": "count windows with applyInPandasWithState",
    "count transformWithStateInPandas": "count windows with transformWithStateInPandas",
    "lazy_tumbling": "tumbling, 1,000 rows, lazy",
    "lazy_large": "tumbling, 200,000 rows, lazy",
}
SIDES = {
    "holdfast": "Holdfast", "tuned": "tuned", "tuned-rocksdb": "tuned, RocksDB",
    "installed": "installed",
}  # fmt: skip
#: A median of such values, rounded to this number of digits.
_DIGITS = {"due_ms": 1, "step_ms": 1, "rows_per_s": 0}


def middle(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def one_line(results: dict[str, Any]) -> str:
    """The medians of one process, for the log."""
    return ", ".join(
        f"{name} {middle(of['due_ms'] or of['step_ms']):.0f} ms {of['rows_per_s'] / 1e3:,.0f} k/s"
        for name, of in results.items()
        if name != "profile"
    )


def of_repeats(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and range over the repeats. The value of a repeat is its median over the steps."""
    result: dict[str, Any] = {}
    for key, digits in _DIGITS.items():
        values = [
            middle(one[key]) if isinstance(one[key], list) else float(one[key])
            for one in repeats
            if one[key]
        ]
        if values:
            result[key] = {
                "median": round(middle(values), digits),
                "min": round(min(values), digits),
                "max": round(max(values), digits),
                "repeats": [round(value, digits) for value in values],
            }
    return result


def watermark_wait_ms(found: Found) -> float | None:
    """How long after the last bucket of a tumbling window the bucket arrives whose batch emits the
    window. Batch n processes bucket n, and a window has ten buckets."""
    repeats = [one for side in TUNED for one in found["tumbling"].get(side, ())]
    lags = [(batch + 1) % WINDOW_BUCKETS for one in repeats for batch in one.get("emitting", ())]
    return middle(lags) * WIDTH_US / 1_000 if lags else None


def summarize(found: Found) -> dict[str, Any]:
    runs = {
        query: {side: of_repeats(repeats) for side, repeats in sides.items()}
        for query, sides in found.items()
        if query != "profile"
    }

    def ours(query: str, key: str) -> float:
        return float(runs[query]["holdfast"][key]["median"])

    def theirs(query: str, key: str, sides: Sequence[str], best: Callable[..., float]) -> float:
        return float(best(runs[query][s][key]["median"] for s in sides if s in runs[query]))

    def slower(query: str, sides: Sequence[str]) -> float:
        """Our time of a result over theirs."""
        return round(ours(query, "due_ms") / theirs(query, "due_ms", sides, min), 3)

    def faster(query: str, sides: Sequence[str]) -> float:
        """Our rows per second over theirs."""
        return round(ours(query, "rows_per_s") / theirs(query, "rows_per_s", sides, max), 2)

    counts = {
        query.removeprefix("count").strip() or "foreachBatch": min(
            sides[side]["step_ms"]["median"] for side in TUNED if side in sides
        )
        for query, sides in runs.items()
        if query.split()[0] == "count"
    }
    installed = ("installed",)
    result: dict[str, Any] = {
        "latency_ratio": slower("tumbling", installed),
        "latency_ratio_tuned": slower("tumbling", TUNED),
        "watermark_wait_ms": watermark_wait_ms(found),
        "throughput_ratio": faster("large", installed),
        "throughput_ratio_tuned": faster("large", TUNED),
        "throughput_ratio_10": faster("large_10", installed),
        "throughput_ratio_10_tuned": faster("large_10", TUNED),
        "join_ratio_tuned": slower("join", TUNED),
        "sliding_ratio_tuned": slower("sliding", TUNED),
        "stateless_ratio_tuned": slower("stateless", TUNED),
        "count_window_ratio": round(ours("count", "step_ms") / min(counts.values()), 3),
        "count_window_ms": counts,
    }
    if "lazy_tumbling" in runs:
        result["lazy_latency_ms"] = ours("lazy_tumbling", "due_ms")
        result["lazy_rows_per_s"] = ours("lazy_large", "rows_per_s")
    if "profile" in found:
        result["profile"] = found["profile"]["holdfast"][0]
    return {**result, "runs": runs}


def beside(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The delays of both sides from end to end."""
    return {
        side: {
            "final_ms": round(one["final_ms"], 1),
            "min": round(min(one["final_ms_all"]), 1),
            "max": round(max(one["final_ms_all"]), 1),
            "windows": len(one["final_ms_all"]),
        }
        for side, one in (("holdfast", ours), ("structured_streaming", theirs))
    }


def realtime(ours: dict[str, Any], theirs: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Both sides by measure. `alone`: the kill of the only replica of Holdfast."""
    digits = {
        "update_ms": 1, "final_ms": 1, "rows_per_s": 0, "pause_after_kill_s": 2,
        "duplicates_after_kill": 0,
    }  # fmt: skip
    result: dict[str, Any] = {
        key: {
            "holdfast": round(ours[key], places),
            "structured_streaming": round(theirs[key], places),
        }
        for key, places in digits.items()
    }
    for key in ("pause_after_kill_s", "duplicates_after_kill"):
        result[key]["holdfast_one_replica"] = round(alone[key], digits[key])
    return result


def _range(values: dict[str, Any] | None, scale: float = 1.0, digits: int = 0) -> str:
    return spread([v / scale for v in values["repeats"]], digits) if values else ""


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Holdfast and Structured Streaming: median (range) of the repeats")
    columns = ("query", "side", "ms to a result", "ms per step", "1,000 rows/s")
    for column in columns:
        shown.add_column(column, justify="left" if column in columns[:2] else "right")
    runs = result["runs"]
    for query, title in TITLES.items():
        for side, name in SIDES.items():
            if one := runs.get(query, {}).get(side):
                shown.add_row(title, name, _range(one.get("due_ms")), _range(one["step_ms"]),
                              _range(one["rows_per_s"], 1e3))  # fmt: skip
    shown.caption = "\n".join(_captions(result))
    return shown


def _captions(result: dict[str, Any]) -> list[str]:
    lines = [
        f"ms to a result, Holdfast over Structured Streaming: tumbling "
        f"{result['latency_ratio']:.2f} of installed, {result['latency_ratio_tuned']:.2f} of tuned;"
        f" of tuned: sliding {result['sliding_ratio_tuned']:.2f}, join "
        f"{result['join_ratio_tuned']:.2f}, stateless {result['stateless_ratio_tuned']:.2f}; count "
        f"windows {result['count_window_ratio']:.2f} of the fastest of three ways (ms per step)",
        f"rows/s, Holdfast over Structured Streaming: one bucket a step "
        f"{result['throughput_ratio']:.1f} of installed, {result['throughput_ratio_tuned']:.1f} of "
        f"tuned; ten buckets {result['throughput_ratio_10']:.2f} and "
        f"{result['throughput_ratio_10_tuned']:.2f}",
    ]
    if wait_ms := result["watermark_wait_ms"]:
        lines.append(
            f"not counted: Structured Streaming emits a window in the batch of a bucket that "
            f"arrives {wait_ms:.0f} ms after the last bucket of the window "
            "(`noDataMicroBatches` disabled)"
        )
    ends = result["end_to_end"]
    lines.append(
        "end of a window to its consumer, with fsync: "
        + "; ".join(
            f"{name} {ends[side]['final_ms']:.0f} ms ({ends[side]['min']:.0f} to "
            f"{ends[side]['max']:.0f})"
            for side, name in (("holdfast", "Holdfast"), ("structured_streaming", "tuned"))
        )
    )
    if live := result.get("realtime"):

        def both(key: str, digits: int, unit: str = "") -> str:
            ours, theirs = live[key]["holdfast"], live[key]["structured_streaming"]
            return f"{ours:,.{digits}f}{unit} and {theirs:,.{digits}f}{unit}"

        lines.append(
            f"Holdfast and real-time mode: delay of updates {both('update_ms', 0, ' ms')}, of "
            f"final results {both('final_ms', 0, ' ms')}; {both('rows_per_s', 0)} rows/s; after "
            f"SIGKILL a pause of {both('pause_after_kill_s', 1, ' s')} (Holdfast with one replica "
            f"{live['pause_after_kill_s']['holdfast_one_replica']:.1f} s), rows written again "
            f"{both('duplicates_after_kill', 0)}"
        )
    if profile := result.get("profile"):
        parts = sorted(profile.items(), key=lambda part: -part[1])
        lines.append(
            "where the time of Holdfast's step of 200,000 rows goes: "
            + ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
        )
    if not result["no_fork"]:
        lines.append("no JDK: tuned without the no-fork file system, and no real-time mode")
    return lines
