"""Steps of the engine with eventual checkpoints, and many crashes (CEC). After a crash, a new
engine has only the files that the log names and the inputs that it asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.core.eventual_checkpoint import Named, Settings, Stepped
from holdfast.engine.compiled import compile_network
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import Results
from holdfast.engine.session import Sessions
from holdfast.engine.state import Version
from holdfast.model.fragments import fragments
from holdfast.node.checkpoints import Checkpoints
from holdfast.storage import Boundary, Log
from holdfast.storage.rows import TIMESTAMP, digest, times_us
from holdfast.verify.fuzz.engine_run import LIMITS, Files, Jobs, Retained, run_network
from tests.spark.test_eventual_checkpoints import QUIET
from tests.spark.test_eventual_history import mixed, network, stacked
from tests.spark.test_running import WIDTH_US, rows

BUCKETS = 30


def table() -> pa.Table:
    parts = [rows(bucket) for bucket in range(BUCKETS) if bucket not in QUIET]
    schema = pa.schema([("ts", TIMESTAMP), ("key", pa.string()), ("x", pa.float64())])
    return pa.concat_tables([pa.table(part).cast(schema) for part in parts])


class CrashingNode:
    """The stable line of a node, without its threads. A checkpoint that is due is written when the
    next step has ended, as if it had taken as long."""

    def __init__(self, net: hf.Network, sessions: Sessions, root: Path, jobs: Jobs) -> None:
        self.net, self.sessions, self.root, self.jobs = net, sessions, root, jobs
        self.compiled = compile_network(net, sessions.small)
        (fragment,) = fragments(net)
        (self.path,) = fragment.paths
        self.segments = Files(net, {"s": table()}, str(root))
        self.results: dict[tuple[str, int], str] = {}
        self.now_us = 0
        self.start()

    def start(self) -> None:
        self.log = Log.open(self.root / "log", "node", fsync="never")
        self.engine = Engine(
            self.net, self.sessions, str(self.root / "log" / "state"), pane_buckets=4,
            job_rows=LIMITS[self.jobs], compiled=self.compiled,
        )  # fmt: skip
        for output in self.path.outputs:
            if not self.log.has(output):
                self.log.open_stream(output, "ts timestamp", "ts", 0)
        settings = Settings.of(self.net.protection("main"))
        self.checkpoints = Checkpoints("node", self.log, self.engine, lambda: self.now_us, settings)
        version = self.checkpoints.recover([self.path]).get(self.path.name)
        self.control = self.checkpoints.eventual[self.path.name]
        self.version = self.engine.empty(self.path, -1) if version is None else version
        self.flushing: Version | None = None
        self.retained = Retained(self.segments, self.version.needs_from)
        self.engine.recovered([self.version])

    def crash(self) -> None:
        self.log.close()
        self.start()

    def run(self, hi: int) -> None:
        self.now_us += 200_000
        lo, control = self.version.bucket + 1, self.control
        hi = control.last(self.version.bucket, hi)
        files = self.retained.files("s", lo, hi)
        rows = {file.bucket: file.rows for file in files}

        def on_results(results: Results) -> None:
            new = [out for out in results if hi > self.log.info(out).complete_upto]
            self.log.append(*[Boundary(output, hi) for output in new])
            for at, found in digests(results).items():
                assert self.results.setdefault(at, found) == found

        upkeep = control.upkeep(self.now_us, self.version.needs_from, sum(rows.values()))
        self.version = self.engine.run(
            self.path, self.version, lo, hi, self.retained, on_results=on_results, upkeep=upkeep
        ).version
        if self.flushing is not None:
            version, self.flushing = self.flushing, None
            entries = self.checkpoints.write(version, control.costs.body())
            control.named(self.now_us, Named(version.needs_from, version.entries(), entries, 0))
        version = self.version
        sizes = version.entries(), version.keys(), 1_000, version.layered()
        control.stepped(Stepped(hi, rows, *sizes))
        if control.is_due(self.now_us, self.version.needs_from):
            control.began(self.now_us)
            self.flushing = self.version
        used = [self.version, self.flushing, *self.checkpoints.newest.values()]
        self.engine.release(self.path, [one for one in used if one is not None])


def digests(results: Results) -> dict[tuple[str, int], str]:
    return {(name, at): digest(rows) for name, held in results.items() for at, rows in held}


@pytest.fixture(scope="module")
def expected(sessions: Sessions) -> dict[Any, dict[tuple[str, int], str]]:
    found: dict[Any, dict[tuple[str, int], str]] = {}
    for build in (mixed, stacked):
        outputs = run_network(network(build, "checkpoint"), {"s": table()}, sessions)
        found[build] = {}
        for name, results in outputs.items():
            at = times_us(results, "ts") // WIDTH_US
            for bucket in range(BUCKETS):
                if (at == bucket).any():
                    found[build][name, bucket] = digest(results.filter(pa.array(at == bucket)))
    return found


@pytest.mark.parametrize(
    ("build", "jobs", "buckets", "limits"),
    [
        (mixed, "small", 14, {"recovery_rows": 10}),
        (stacked, "small", 20, {"recovery_entries": 8}),
        (stacked, "large", 10, {"recovery_rows": 60}),
    ],
)
def test_crashes_after_any_step_change_no_bit(
    build: Callable[[hf.Network, Any], None], jobs: Jobs, buckets: int, limits: dict[str, int],
    expected: dict[Any, dict[tuple[str, int], str]], sessions: Sessions, tmp_path: Path,
) -> None:  # fmt: skip
    rng = random.Random(4)
    node = CrashingNode(network(build, **limits), sessions, tmp_path, jobs)
    results = {at: rows for at, rows in expected[build].items() if at[1] < buckets}
    recovered = []
    while node.version.bucket < buckets - 1:
        node.run(min(buckets - 1, node.version.bucket + rng.choice((1, 2, 4))))
        if rng.random() < 0.3:
            node.crash()
            recovered.append(node.version.bucket)
    assert max(recovered) > 0, "some recovery begins with a checkpoint"
    assert node.results == results


@pytest.mark.parametrize("jobs", ["small", "large"])
def test_a_filter_that_is_never_true_does_not_stop_keyed_state(
    jobs: Jobs, sessions: Sessions
) -> None:
    """Spark's optimizer proves that there are no rows, and would run no task."""
    net = hf.Network("never", bucket="100ms")
    source = net.source("s", "ts timestamp, key string, x double", time="ts", clock="manual")
    whole = source.map(ts="ts", key="key", n="cast(x as int)")
    never = whole.filter("cast(n as double) = cast('-inf' as double)")
    net.output("never", never.count_window(2, by="key").agg(n=hf.count()))
    net.output("all", whole.count_window(2, by="key").agg(n=hf.count()))
    outputs = run_network(net, {"s": table()}, sessions, jobs=jobs)
    assert outputs["never"].num_rows == 0 and outputs["all"].num_rows > 0
