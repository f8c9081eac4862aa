"""Recovery of a node from footprints: real log, real state of keys, no Spark.

Random runs with two operators, buckets without rows, failed steps and crashes must give the same
results as a run without any of them.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path as Folder
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.core.progress_events import Run
from holdfast.engine.count_windows import CountWindows
from holdfast.engine.engine import Engine
from holdfast.engine.footprints import Footprints, Marked
from holdfast.engine.inputs import InputFile, Leaving, OnResults, StepResult
from holdfast.engine.keyed import FOOTPRINTS, StepState, run_shard
from holdfast.engine.keyed_operators import KeyedOperator
from holdfast.engine.state import Version, files_below
from holdfast.engine.step import Step
from holdfast.errors import StorageFull, TooLarge
from holdfast.model.fragments import Path
from holdfast.model.protection import Protection
from holdfast.node.eventual_checkpoints import EventualCheckpoints
from holdfast.storage import Boundary, Log, Record
from tests.engine.test_footprints import ROWS, TOTALS, WIDTH_US, rows_of
from tests.engine.test_layers import function

BUCKETS = 30
PATH = Path("out", ("a", "b"), ("out",), ())


@dataclass
class Inputs:
    tables: dict[tuple[str, int], pa.Table] = field(default_factory=dict)

    def rows(self, stream: str, lo: int, hi: int) -> list[pa.Table]:
        return [self.tables[stream, b] for b in range(lo, hi + 1) if (stream, b) in self.tables]

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        held = [
            (b, self.tables[stream, b]) for b in range(lo, hi + 1) if (stream, b) in self.tables
        ]
        return [InputFile(b, "", table.num_rows, 0) for b, table in held]


class SmallEngine:
    """Runs operators without Spark, under the same conditions as `Step`."""

    keep_footprints, drop_footprints = Engine.keep_footprints, Engine.drop_footprints

    def __init__(self, folder: Folder, operators: dict[str, tuple[str, Marked]]) -> None:
        self.folder, self.operators = str(folder), operators
        self.network = SimpleNamespace(partitions=1)
        self.error: tuple[int, Exception] | None = None

    def plan_hash(self, path: Path) -> str:
        return "plan"

    def empty(self, path: Path, bucket: int) -> Version:
        return Version(path.name, bucket, needs_from=bucket + 1, plan="plan")

    def run(
        self, path: Path, version: Version, lo: int, hi: int, inputs: Any, *,
        on_results: OnResults, leaving: Leaving,
    ) -> StepResult:  # fmt: skip
        assert version.bucket + 1 == lo <= hi
        step: Any = SimpleNamespace(before=version, hi=hi, folders=[])
        shards, outputs = dict(version.shards), {}
        for name, (stream, operator) in self.operators.items():
            rows = inputs.rows(stream, lo, hi)
            timers = [s.timer for s in shards.get(name, {}).values() if s.timer is not None]
            due = any(us < (hi + 1) * WIDTH_US for us, _ in timers)
            if not rows and not due and name not in version.found:
                continue
            folder = f"{path.name}/{name}.{hi}.{uuid.uuid4().hex[:8]}"
            step.folders.append((name, folder, 1))
            found = {
                number: [(bucket, Footprints.of(body)) for bucket, body in held]
                for number, held in version.found.get(name, {}).items()
            }
            state = StepState(
                self.folder, folder, hi, shards.get(name, {}), {}, 1 << 18, leaving.wanted, found,
                version.replays_upto is not None,
            )  # fmt: skip
            table = pa.concat_tables([ROWS.empty_table(), *rows])
            outputs[name], shard, left = run_shard(operator, 0, table, StepState.of(state.text()))
            assert left is not None
            leaving.left[name], shards[name] = {0: left}, {0: shard}
        if self.error is not None and lo >= self.error[0]:
            (_, error), self.error = self.error, None
            raise error
        on_results(outputs)  # type: ignore[arg-type]
        after = Version(
            path.name, hi, {}, {}, shards, hi + 1, "plan", found=Step._still_found(step),
            replays_upto=Step._replays_upto(step),
        )  # fmt: skip
        return StepResult({}, after, 1)


class SmallNode:
    def __init__(
        self, root: Folder, inputs: Inputs, operators: dict[str, tuple[str, Marked]], **limits: Any
    ) -> None:
        self.root, self.inputs, self.operators, self.limits = root, inputs, operators, limits
        self.results: Counter[str] = Counter()
        self.now_us = 0
        self.start()

    def start(self) -> None:
        self.log = Log.open(self.root, "node", fsync="never")
        self.engine = self.make_engine()
        engine: Any = self.engine
        inputs: Any = self.inputs
        protection = Protection(recovery="cec", **self.limits)
        self.eventual = EventualCheckpoints(
            "node", self.log, engine, inputs, lambda: self.now_us, protection
        )
        version = self.eventual.recover(PATH)
        self.eventual.recovered()
        if not self.log.has("out"):
            self.log.open_stream("out", "ts timestamp", "ts", 0)
        self.version = version or engine.empty(PATH, -1)

    def make_engine(self) -> SmallEngine:
        return SmallEngine(self.root / "state", self.operators)

    def crash(self) -> None:
        self.log.close()
        shutil.rmtree(self.root / "state" / PATH.name, ignore_errors=True)
        self.start()

    def run(self, hi: int) -> None:
        self.now_us += 200_000

        def on_results(results: Any, *more: Record) -> None:
            is_new = hi > self.log.info("out").complete_upto
            self.log.append(*[Boundary("out", hi)] * is_new, *more)
            for name, table in results.items():
                rows = table.drop_columns(["__seq"]) if "__seq" in table.column_names else table
                self.results.update(f"{name} {sorted(row.items())}" for row in rows.to_pylist())

        work = Run(PATH.name, self.version.bucket + 1, hi)
        self.version = self.eventual.run(PATH, self.version, work, on_results).version

    def named(self) -> set[str]:
        """The files of footprints that the log names."""
        states = self.log.states(PATH.name)
        bodies = [body["footprints"] for at, body in states if at >= states[-1][1]["oldest"]]
        lefts = [left for body in bodies for shards in body.values() for left in shards.values()]
        return {file for left in lefts for file in Footprints.of(left).files()}

    def on_disk(self) -> set[str]:
        folder = self.root / "state" / FOOTPRINTS
        return {os.path.join(FOOTPRINTS, file) for file in files_below(str(folder))}


def with_timers() -> KeyedOperator:
    return function(by_key=True)


CASES: list[KeyedOperator] = [TOTALS, CountWindows(("k",), "ts", 5, 2, ROWS)]


def test_timers_of_restored_keys_fire(tmp_path: Folder) -> None:
    """Keys 2 and 4 have no rows after their footprints."""
    inputs = Inputs()
    for bucket in range(BUCKETS):
        keys = [2, 4] if bucket == 0 else [1, 3]
        times = [bucket * WIDTH_US, bucket * WIDTH_US + 1]
        inputs.tables["a", bucket] = pa.table([times, keys, [1, 1]], schema=ROWS)
    operators = {"one": ("a", Marked(with_timers(), WIDTH_US))}
    results = []
    for crashes in (False, True):
        node = SmallNode(tmp_path / str(crashes), inputs, operators, recovery_rows=1)
        for bucket in range(BUCKETS):
            node.run(bucket)
            if crashes and bucket == 3:
                assert node.eventual.oldest(PATH.name) >= 1
                node.limits = {}  # no further footprints
                node.crash()
        results.append(node.results)
    assert results[0] == results[1]
    assert sum(results[0].values()) == 2


@pytest.mark.parametrize("seed", range(24))
def test_crashes_and_failed_steps_change_no_result(seed: int, tmp_path: Folder) -> None:
    rng = np.random.default_rng(seed)
    inputs = Inputs()
    for bucket in range(BUCKETS):
        for stream in "ab":
            table = rows_of(rng, bucket, 8 if seed % 2 else 30)
            if rng.random() < 0.45 and table.num_rows:
                inputs.tables[stream, bucket] = table
    operators = {
        "one": ("a", Marked(CASES[seed % 2], WIDTH_US)),
        "two": ("b", Marked(with_timers() if seed % 3 else TOTALS, WIDTH_US)),
    }
    limits: list[dict[str, int]] = [
        {"recovery_rows": 60}, {"recovery_entries": 20}, {},
        {"recovery_rows": 30, "recovery_entries": 60},
    ]  # fmt: skip
    plain = SmallNode(tmp_path / "plain", inputs, operators)
    for bucket in range(BUCKETS):
        plain.run(bucket)
    node = SmallNode(tmp_path / "node", inputs, operators, **limits[seed % 4])
    most = BUCKETS
    while node.version.bucket < BUCKETS - 1:
        hi = node.version.bucket + min(most, int(rng.integers(1, 7)))
        replayed = node.version.replays_upto
        if rng.random() < 0.2:
            first = node.version.bucket + 1 if replayed is None else replayed + 1
            node.engine.error = first, [StorageFull("full"), TooLarge("large")][rng.integers(2)]
        most = BUCKETS
        try:
            node.run(min(hi, BUCKETS - 1))
        except TooLarge:
            most = max(1, (hi - node.version.bucket) // 2)
        except StorageFull:
            pass
        if node.log.states(PATH.name):
            assert node.eventual.oldest(PATH.name) == node.log.states(PATH.name)[-1][1]["oldest"]
        assert node.named() <= node.on_disk()
        if rng.random() < 0.2:
            node.crash()
            assert node.on_disk() == node.named()
    assert node.results == plain.results and plain.results
    assert node.eventual.controls[PATH.name].open == plain.eventual.controls[PATH.name].open
