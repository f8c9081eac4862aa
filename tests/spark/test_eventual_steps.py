"""Steps of the engine with footprints, and many crashes (CEC). After a crash, a new engine has only
the files that the log names and the inputs that it asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.core.progress_events import Run
from holdfast.engine.compiled import compile_network
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import InputFile, Results
from holdfast.engine.session import Sessions
from holdfast.model.fragments import fragments
from holdfast.node.eventual_checkpoints import EventualCheckpoints
from holdfast.storage import Boundary, Log, Record
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
    """The stable line of a node, without its threads."""

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
        inputs: Any = self
        self.eventual = EventualCheckpoints(
            "node", self.log, self.engine, inputs, lambda: self.now_us, self.net.protection("main")
        )
        version = self.eventual.recover(self.path)
        self.version = self.engine.empty(self.path, -1) if version is None else version
        self.retained = Retained(self.segments, self.version.needs_from)
        self.engine.recovered([self.version])
        self.eventual.recovered()
        for output in self.path.outputs:
            if not self.log.has(output):
                self.log.open_stream(output, "ts timestamp", "ts", 0)

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        """Inputs that the node asked for when it started."""
        return self.retained.files(stream, lo, hi)

    def crash(self) -> None:
        self.log.close()
        self.start()

    def run(self, hi: int) -> None:
        self.now_us += 200_000

        def on_results(results: Results, *more: Record) -> None:
            self.log.append(*[Boundary(output, hi) for output in results], *more)
            self.results |= digests(results)

        work = Run(self.path.name, self.version.bucket + 1, hi)
        self.version = self.eventual.run(self.path, self.version, work, on_results).version
        self.engine.release(self.path, [self.version, self.eventual.durable(self.path)])

    def tentative(self, hi: int) -> dict[tuple[str, int], str]:
        """The results of a tentative step."""
        found: dict[tuple[str, int], str] = {}
        self.engine.run(
            self.path, self.version, self.version.bucket + 1, hi, self.retained, line="tentative",
            on_results=lambda results: found.update(digests(results)),
        )  # fmt: skip
        kept = [self.version, self.eventual.durable(self.path)]
        self.engine.release(self.path, kept, line="tentative")
        return found


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
        (mixed, "small", 14, {}),
        (stacked, "small", 20, {"recovery_entries": 8}),
        (stacked, "large", 10, {"recovery_rows": 60}),
    ],
)
def test_crashes_after_any_step_change_no_bit(
    build: Callable[[hf.Network, Any], None], jobs: Jobs, buckets: int, limits: dict[str, int],
    expected: dict[Any, dict[tuple[str, int], str]], sessions: Sessions, tmp_path: Path,
) -> None:  # fmt: skip
    rng = random.Random(5)
    node = CrashingNode(network(build, **limits), sessions, tmp_path, jobs)
    results = {at: rows for at, rows in expected[build].items() if at[1] < buckets}
    replays = 0
    while node.version.bucket < buckets - 1:
        node.run(min(buckets - 1, node.version.bucket + rng.choice((1, 2, 4))))
        if rng.random() < 0.4:
            node.crash()
            upto = node.version.replays_upto
            replays += upto is not None
            if upto is not None and replays == 1:  # a tentative step that also ends the replay
                new = (upto + 1, upto + 2)
                assert node.tentative(upto + 2) == {
                    at: rows for at, rows in expected[build].items() if at[1] in new
                }
    assert replays
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
