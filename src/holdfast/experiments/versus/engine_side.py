"""The side of Holdfast: steps of the engine, from complete buckets to results in the log.

Source log, transport, client and fsync are not part of a step; `live_holdfast` measures them.
`eager` folds every bucket into panes at once, the work that Structured Streaming does in every
batch. `lazy` is the default: the rows of an open window are folded when it closes, or when 16
buckets or 100,000 rows have gathered.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.experiments.versus.step_profile import timed_parts
from holdfast.experiments.versus.workload import COUNT_SIZE, FIRST, WITHIN_MS, Buckets, Query
from holdfast.model.fragments import fragments
from holdfast.storage import Log
from holdfast.storage.files import crc_of
from holdfast.types import SegmentId, Stability


def network(query: Query) -> hf.Network:
    net = hf.Network("versus", bucket="100ms")
    flows = net.source("flows", "ts timestamp, src string, bytes long", time="ts")
    match query.kind:
        case "tumbling":
            windows = flows.window("1s").group_by("src")
            result = windows.agg(n=hf.count(), bytes=hf.sum("bytes"))
        case "sliding":
            windows = flows.window("10s", slide="1s").group_by("src")
            result = windows.agg(n=hf.count(), bytes=hf.sum("bytes"))
        case "join":
            alerts = net.source("alerts", "ts timestamp, src string, level long", time="ts")
            result = flows.join(alerts, on=["src"], within=f"{WITHIN_MS}ms")
        case "stateless":
            large = flows.filter("bytes % 10 != 0")
            result = large.map("ts", "src", "bytes", kb="bytes / 1024.0D")
        case "count":
            result = flows.count_window(COUNT_SIZE, by="src").agg(bytes=hf.sum("bytes"))
    net.output("result", result)
    return net


class _Files:
    """The buckets of a query as inputs of the engine."""

    def __init__(self, query: Query, buckets: Buckets) -> None:
        from holdfast.engine.inputs import InputFile

        rows = {"flows": query.rows, "alerts": max(1, query.rows // 10)}
        self._files: dict[str, dict[int, InputFile]] = {"flows": {}, "alerts": {}}
        for bucket in range(query.start, query.start + query.buckets):
            paths = buckets.sides(query, bucket)
            for stream, path in zip(("flows", "alerts"), paths, strict=False):
                self._files[stream][FIRST + bucket] = InputFile(
                    FIRST + bucket, str(path), rows[stream], crc_of(str(path))
                )

    def files(self, stream: str, lo: int, hi: int) -> list[Any]:
        files = self._files[stream]
        return [files[bucket] for bucket in range(lo, hi + 1) if bucket in files]


class _Committed:
    """Writes and commits the results of a step, as a node does, before the step prepares its
    state for later steps."""

    def __init__(self, log: Log, upto: int) -> None:
        self._log, self._upto = log, upto
        self.rows = 0
        self.at_s = 0.0

    def __call__(self, results: Any) -> None:
        segments = [
            self._log.write(table, SegmentId("result", 0, bucket), Stability.STABLE)
            for bucket, table in results["result"]
        ]
        self._log.commit("result", segments, self._upto)
        self.rows = sum(segment.rows for segment in segments)
        self.at_s = time.perf_counter()


def profile_query(sessions: Any, query: Query, buckets: Buckets) -> dict[str, float]:
    """Where the time of the measured steps of an eager query goes, as shares by part."""
    with timed_parts() as timers:
        seconds = run_query(sessions, query, buckets, eager=True, on_measured=timers.seconds.clear)[
            "seconds"
        ]
    return timers.shares(seconds)


def run_query(
    sessions: Any,
    query: Query,
    buckets: Buckets,
    *,
    eager: bool,
    on_measured: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Run a query. `on_measured` is called before the first measured step."""
    from holdfast.engine.engine import Engine
    from holdfast.engine.step_inputs import PANE_BUCKETS

    inputs = _Files(query, buckets)
    net = network(query)
    with tempfile.TemporaryDirectory(prefix="holdfast-versus-") as folder:
        engine = Engine(
            net, sessions, os.path.join(folder, "state"), pane_buckets=1 if eager else PANE_BUCKETS
        )
        (path,) = fragments(net)[0].paths
        first = FIRST + query.start
        log = Log.open(Path(folder) / "log", "versus", fsync="never")
        log.open_stream("result", engine.compiled.schema["result"], engine.time("result"), first)
        version = engine.empty(path, first - 1)
        step_ms: list[float] = []
        due_ms: list[float] = []
        rows_out = 0
        ranges = query.ranges()
        measured_from = len(ranges) - query.steps
        began = 0.0
        for at, (lo, hi) in enumerate(ranges):
            if at == measured_from:
                if on_measured is not None:
                    on_measured()
                began = time.perf_counter()
            start, committed = time.perf_counter(), _Committed(log, FIRST + hi)
            result = engine.run(path, version, FIRST + lo, FIRST + hi, inputs, on_results=committed)
            version = result.version
            engine.release(path, [version])
            rows_out += committed.rows
            if at >= measured_from:
                step_ms.append(1_000 * (time.perf_counter() - start))
                if committed.rows:
                    due_ms.append(1_000 * (committed.at_s - start))
        seconds = time.perf_counter() - began
        log.close()
    return {
        "step_ms": step_ms,
        "due_ms": due_ms,
        "rows_per_s": query.rows * query.group * query.steps / seconds,
        "rows_out": rows_out,
        "seconds": seconds,
    }
