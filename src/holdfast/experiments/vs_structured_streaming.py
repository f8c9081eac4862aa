"""The same queries on Holdfast and on plain Structured Streaming, as installed and tuned.

Both sides read the same Parquet buckets, which are written before the measurement starts, and write
their results as Parquet without flushing to disk. Each configuration has its own JVM and a long
warm-up, and the two sides alternate. A Holdfast step lasts from a complete bucket to its logged
result: engine, result segment and manifest record.

`lazy` (the default) computes nothing before a window closes. Its latency is the time of the steps
in which a result is due, because a consumer waits for these. `eager` folds every bucket into panes
at once. Structured Streaming does the work of a batch in every batch, and gives a window one batch
later.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

import holdfast as hf
from holdfast.errors import HoldfastError
from holdfast.experiments.structured_streaming import EPOCH_US, write_buckets
from holdfast.model.fragments import fragments
from holdfast.storage import Log
from holdfast.storage.files import crc_of
from holdfast.types import SegmentId, Stability

WIDTH_US = 100_000


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration of Holdfast. One JVM runs one job."""

    kind: Literal["windowed", "count"] = "windowed"
    eager: bool = False
    rows: int = 1_000
    keys: int = 100
    steps: int = 100
    warm: int = 150
    size: int = 10


def network(job: Job) -> hf.Network:
    net = hf.Network("versus", bucket="100ms")
    flows = net.source("flows", "ts timestamp, src string, bytes long", time="ts")
    if job.kind == "windowed":
        result = flows.window("1s").group_by("src").agg(n=hf.count(), bytes=hf.sum("bytes"))
    else:
        result = flows.count_window(job.size, by="src").agg(bytes=hf.sum("bytes"))
    net.output("result", result)
    return net


def run_job(job: Job) -> dict[str, Any]:
    """Run a job on Holdfast, in this process."""
    from holdfast.engine import session
    from holdfast.engine.engine import Engine
    from holdfast.engine.inputs import InputFile
    from holdfast.engine.step_inputs import PANE_BUCKETS

    total = job.warm + job.steps
    with tempfile.TemporaryDirectory(prefix="holdfast-versus-") as folder:
        files = write_buckets(Path(folder) / "in", total, job.rows, job.keys, WIDTH_US)
        first = EPOCH_US // WIDTH_US
        input_files = [
            InputFile(first + at, path, job.rows, crc_of(path)) for at, path in enumerate(files)
        ]

        class Inputs:
            def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
                return input_files[max(0, lo - first) : max(0, hi - first + 1)]

        net = network(job)
        engine = Engine(
            net, session.start(hf.Options()), os.path.join(folder, "state"),
            pane_buckets=1 if job.eager else PANE_BUCKETS,
        )  # fmt: skip
        (path,) = fragments(net)[0].paths
        log = Log.open(Path(folder) / "log", "versus", fsync="never")
        log.open_stream("result", engine.compiled.schema["result"], "ts", first)
        version, inputs = engine.empty(path, first - 1), Inputs()
        step_ms: list[float] = []
        due_ms: list[float] = []
        rows_out = 0
        began = 0.0
        for at in range(total):
            bucket = first + at
            if at == job.warm:
                began = time.perf_counter()
            start = time.perf_counter()
            result = engine.run(path, version, bucket, bucket, inputs)
            segments = [
                log.write(table, SegmentId("result", 0, b), Stability.STABLE)
                for b, table in result.outputs["result"]
            ]
            log.commit("result", segments, bucket)
            took_ms = 1_000 * (time.perf_counter() - start)
            version = result.version
            engine.release(path, [version])
            rows_out += sum(segment.rows for segment in segments)
            if at >= job.warm:
                step_ms.append(took_ms)
                if segments:
                    due_ms.append(took_ms)
        seconds = time.perf_counter() - began
        log.close()
    return {
        "job": asdict(job),
        "median_ms": statistics.median(step_ms),
        "mean_ms": statistics.fmean(step_ms),
        "due_ms": statistics.median(due_ms) if due_ms else None,
        "rows_per_s": job.rows * job.steps / seconds,
        "rows_out": rows_out,
    }


def _elsewhere(module: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a fresh process and JVM."""
    done = subprocess.run(
        [sys.executable, "-m", f"holdfast.experiments.{module}", json.dumps(job)],
        capture_output=True, text=True, timeout=1_800,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise HoldfastError(f"{module} {job} failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    repeats = 1 if quick else 3
    small = {"rows": 1_000, "keys": 100, "steps": 40 if quick else 80,
             "warm": 60 if quick else 200}  # fmt: skip
    large = {"rows": 200_000, "keys": 10_000, "steps": 20, "warm": 20 if quick else 40}
    # Most buckets of Holdfast need no job. With these numbers, both warm-ups take about the same
    # time, 40 s in the long form. Both sides still get faster after a hundred batches.
    lazy = {
        "small": {"warm": 25 * small["warm"], "steps": 10 * small["steps"]},
        "large": {"warm": 3 * large["warm"], "steps": 2 * large["steps"]},
    }
    # Structured Streaming takes tens of seconds per step at this size, so it runs few steps.
    count = {"kind": "count", "rows": 100_000, "keys": 100_000}
    states = ("hdfs",) if quick else ("hdfs", "rocksdb")
    results: dict[str, list[dict[str, Any]]] = {}

    def measure(name: str, module: str, job: dict[str, Any]) -> None:
        result = _elsewhere(module, job)
        results.setdefault(name, []).append(result)
        due = result.get("due_ms")
        say(f"{name}: {result['median_ms']:.1f} ms per step"
            + (f", {due:.1f} ms where a result is due" if due else "")
            + f", {result['rows_per_s']:,.0f} rows/s")  # fmt: skip

    ours, theirs = "vs_structured_streaming", "structured_streaming"
    for repeat in range(repeats):
        for size, shape in (("small", small), ("large", large)):
            sides: list[tuple[str, str, dict[str, Any]]] = [
                (f"lazy {size}", ours, {**shape, **lazy[size]}),
                *[
                    (f"{'tuned' if tuned else 'installed'} {state} {size}", theirs,
                     {**shape, "tuned": tuned, "state": state, "partitions": 2})
                    for tuned in (False, True)
                    for state in states
                ],
                (f"eager {size}", ours, {**shape, "eager": True}),
            ]  # fmt: skip
            for name, module, job in sides if repeat % 2 == 0 else reversed(sides):
                measure(name, module, job)
        measure("count ours", ours, {**count, "steps": 10, "warm": 10})
        if repeat == 0:
            theirs_count = {**count, "steps": 1 if quick else 2, "warm": 1}
            measure("count theirs", theirs, {**theirs_count, "tuned": True, "state": "hdfs"})
    return summary(results, states)


def summary(found: dict[str, list[dict[str, Any]]], states: tuple[str, ...]) -> dict[str, Any]:
    def middle(name: str, key: str) -> float:
        return float(statistics.median(result[key] for result in found[name]))

    def best(form: str, size: str, key: str, choose: Callable[..., float]) -> float:
        return choose(middle(f"{form} {state} {size}", key) for state in states)

    result: dict[str, Any] = {"no_fork": all(r["no_fork"] for r in found["tuned hdfs small"])}
    for form, tag in (("installed", ""), ("tuned", "_tuned")):
        delay = best(form, "small", "median_ms", min)
        rate = best(form, "large", "rows_per_s", max)
        result[f"latency_ratio{tag}"] = round(middle("lazy small", "due_ms") / delay, 3)
        result[f"latency_ratio_eager{tag}"] = round(middle("eager small", "median_ms") / delay, 3)
        result[f"throughput_ratio{tag}"] = round(middle("lazy large", "rows_per_s") / rate, 2)
        result[f"throughput_ratio_eager{tag}"] = round(
            middle("eager large", "rows_per_s") / rate, 2
        )
    result["count_window_ratio"] = round(
        middle("count ours", "median_ms") / middle("count theirs", "median_ms"), 3
    )
    result["runs"] = {
        name: {
            key: round(middle(name, key), 1)
            for key in ("median_ms", "mean_ms", "due_ms", "rows_per_s")
            if results[0].get(key) is not None
        }
        for name, results in found.items()
    }
    return result


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="Holdfast compared with Structured Streaming (medians)")
    for column in ("configuration", "ms per step", "ms where a result is due", "rows/s"):
        shown.add_column(column, justify="left" if column == "configuration" else "right")
    for name, run_of in sorted(result["runs"].items(), key=lambda item: item[0].split()[-1]):
        due = run_of.get("due_ms")
        shown.add_row(name, f"{run_of['median_ms']:.1f}", f"{due:.1f}" if due else "",
                      f"{run_of['rows_per_s']:,.0f}")  # fmt: skip
    shown.caption = (
        f"eager, which does the same work: ms per step {result['latency_ratio_eager']:.2f} of "
        f"installed, {result['latency_ratio_eager_tuned']:.2f} of tuned; rows/s "
        f"{result['throughput_ratio_eager']:.1f} and {result['throughput_ratio_eager_tuned']:.1f} "
        f"times\nlazy, which does less: ms where a result is due {result['latency_ratio']:.2f} and "
        f"{result['latency_ratio_tuned']:.2f}; rows/s {result['throughput_ratio']:.1f} and "
        f"{result['throughput_ratio_tuned']:.1f} times\ncount windows: "
        f"{result['count_window_ratio']:.2f} of the time of applyInPandasWithState"
        + ("" if result["no_fork"] else "; no JDK: tuned without the no-fork file system")
    )
    return shown


def plot(result: dict[str, Any], folder: str) -> list[str]:
    import matplotlib.pyplot as plt

    runs = {name: run_of for name, run_of in result["runs"].items() if name.endswith("small")}
    figure, axes = plt.subplots(figsize=(7, 4))
    names = sorted(runs, key=lambda name: runs[name].get("due_ms") or runs[name]["median_ms"])
    axes.barh([name.removesuffix(" small") for name in names],
              [runs[name].get("due_ms") or runs[name]["median_ms"] for name in names])  # fmt: skip
    axes.set_xlabel("ms per step in which a result is due, 1,000 rows per bucket")
    figure.tight_layout()
    path = os.path.join(folder, "vs-structured-streaming.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]


if __name__ == "__main__":
    print(json.dumps(run_job(Job(**json.loads(sys.argv[1])))), flush=True)
