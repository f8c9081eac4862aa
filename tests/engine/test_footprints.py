"""Recovery from footprints gives the state before the crash (CEC section II.B). No JVM."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.core.eventual_checkpoint import (
    Committed,
    EventualCheckpoint,
    Pace,
    Settings,
    Targets,
)
from holdfast.engine.count_windows import CountTotals, CountWindows
from holdfast.engine.footprints import Footprints, Marked, Wanted
from holdfast.engine.keyed import StepState, run_shard
from holdfast.engine.keyed_operators import KeyedOperator
from holdfast.engine.layers import LayerFile
from holdfast.engine.state import Shard
from holdfast.storage.rows import TIMESTAMP
from tests.engine.test_layers import function

WIDTH_US = 100_000
ROWS = pa.schema([("ts", TIMESTAMP), ("k", pa.int64()), ("x", pa.int64())])
TOTALS = CountTotals(
    ("k",), "ts", 4, (), {"x": "sum"},
    pa.schema([("k", pa.int64()), ("x", pa.int64()), ("__n", pa.int64())]),
)  # fmt: skip
OPERATORS: dict[str, KeyedOperator] = {
    "totals": TOTALS,
    "rows": CountWindows(("k",), "ts", 4, 4, ROWS),
    "sliding": CountWindows(("k",), "ts", 5, 2, ROWS),
}


def rows_of(rng: np.random.Generator, bucket: int, keys: int) -> pa.Table:
    count = int(rng.integers(0, 30))
    times = bucket * WIDTH_US + rng.integers(0, WIDTH_US, count)
    skewed = (keys * rng.random(count) ** 3).astype(np.int64)  # fast and slow windows
    return pa.table([times, skewed, rng.integers(0, 100, count)], schema=ROWS)


class Operator:
    """Steps of one shard, with its log of footprints."""

    def __init__(
        self, operator: KeyedOperator, folder: Path, targets: Targets, pace: Any,
        literal: bool = False,
    ) -> None:  # fmt: skip
        self.literal = literal
        self.operator, self.folder = Marked(operator, WIDTH_US), folder
        self.log: list[tuple[int, int, Footprints]] = []
        self.results: dict[int, list[str]] = {}
        self.targets, self.pace = targets, pace
        self.begin(-1)

    def begin(self, bucket: int) -> None:
        self.shard, self.bucket = Shard(), bucket
        self.committed_upto = self.log[-1][0] if self.log else -1
        self.found = [(at, left) for at, _, left in self.log if at >= bucket]
        self.control = EventualCheckpoint(Settings(self.targets, self.pace), bucket)
        entries = {at: left.entries for at, left in self.found}
        self.control.recover(entries, self.committed_upto)

    def step(self, tables: list[pa.Table]) -> None:
        upto = self.bucket + len(tables)
        replays = self.control.replays
        assert upto == self.control.last(upto)
        checks = self.control.checks(upto * WIDTH_US)
        wanted = Wanted(
            self.control.oldest, checks.upto, checks.most, self.control.opened, self.literal,
            self.control.turn,
        )  # fmt: skip
        step = StepState(
            str(self.folder), f"p/op.{upto}.{len(self.log)}", upto, {0: self.shard}, {}, 1 << 18,
            wanted, {0: self.found} if self.found else {}, replays,
        )  # fmt: skip
        assert StepState.of(step.text()) == step
        rows = pa.concat_tables(tables)
        out, self.shard, left = run_shard(self.operator, 0, rows, StepState.of(step.text()))
        assert left is not None
        self.found = []
        counts = {self.bucket + 1 + at: table.num_rows for at, table in enumerate(tables)}
        entries = {} if replays else {upto: left.entries}
        self.control.committed(Committed(upto, counts, entries, left.windows, left.checks))
        if upto > self.committed_upto:
            self.log.append((upto, self.control.oldest, left))
            self._publish(out)
        self.bucket = upto

    def _publish(self, out: pa.Table) -> None:
        """Results of buckets that were already committed are dropped."""
        if "__seq" not in out.column_names:
            return
        last = out["__last"].to_numpy() if "__last" in out.column_names else np.array([])
        for row, at in zip(out.drop_columns(["__seq"]).to_pylist(), last, strict=True):
            bucket = int(at) // WIDTH_US
            if bucket > self.committed_upto:
                self.results.setdefault(bucket, []).append(repr(sorted(row.items(), key=str)))

    def crash(self) -> None:
        """Nothing is left but the log."""
        shutil.rmtree(self.folder / "p", ignore_errors=True)
        _, oldest, _ = self.log[-1]
        self.begin(oldest)

    def open_windows(self) -> int:
        return self.control.open


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("seed", range(12))
def test_ii_b_recovery_regains_the_state_before_the_crash(
    seed: int, kind: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    tables = [rows_of(rng, bucket, 60) for bucket in range(80)]
    targets = Targets(*[(None, 150), (40, None), (None, None), (80, 300)][seed % 4])
    pace = None if seed % 3 else Pace(10, 2 * WIDTH_US)
    plain = Operator(OPERATORS[kind], tmp_path / "plain", Targets(), None)
    crashing = Operator(OPERATORS[kind], tmp_path / "crashing", targets, pace, seed % 5 == 0)
    crashes = 0
    while crashing.bucket < 79:
        left = crashing.committed_upto - crashing.bucket
        group = int(rng.integers(1, 4 if left <= 0 else left + 1))
        crashing.step(tables[crashing.bucket + 1 : crashing.bucket + 1 + group])
        if rng.random() < 0.15 and crashing.log:
            crashing.crash()
            crashes += 1
    while plain.bucket < 79:
        plain.step(tables[plain.bucket + 1 : plain.bucket + 2])
    assert crashes
    found, wanted = ({b: Counter(r) for b, r in one.results.items()} for one in (crashing, plain))
    assert found == wanted
    if not crashing.found:  # otherwise the last crash was after the last step
        assert crashing.open_windows() == plain.open_windows()
    assert len(wanted) > 40


@pytest.mark.parametrize("rows", [60, 200])
def test_iii_a_recovery_stays_within_its_target(rows: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    checked = Operator(TOTALS, tmp_path / "checked", Targets(rows=rows), None)
    unchecked = Operator(TOTALS, tmp_path / "unchecked", Targets(), None)
    most = 0
    for bucket in range(60):
        table = rows_of(rng, bucket, 60)
        for operator in (checked, unchecked):
            operator.step([table])
        most = max(most, checked.control.replayed)
    # Beyond the target, the next step leaves the footprints.
    assert rows < most <= rows + 60
    assert unchecked.control.replayed > 3 * most


def test_state_without_key_columns_leaves_footprints(tmp_path: Path) -> None:
    """Each step replaces all layers, with the mark of the only unit."""
    whole = Operator(function(by_key=False), tmp_path, Targets(rows=50), None)
    for bucket in range(60):
        times = bucket * WIDTH_US + np.arange(10)
        whole.step([pa.table([times, np.ones(10, int), np.ones(10, int)], schema=ROWS)])
    assert whole.control.oldest > 50


def test_closed_keys_leave_no_marks_behind(tmp_path: Path) -> None:
    """Keys open, close three buckets later, and never return; others stay open."""
    operator = Operator(TOTALS, tmp_path, Targets(rows=3_000), None)
    for bucket in range(400):
        new = np.repeat(np.arange(50 * bucket, 50 * bucket + 50), 2)
        old = new - 150 if bucket >= 3 else new[:0]
        keys = np.r_[new, old, -np.arange(1, 300) if bucket == 0 else new[:0]]
        times = bucket * WIDTH_US + np.arange(len(keys))
        operator.step([pa.table([times, keys, np.ones(len(keys), int)], schema=ROWS)])
    records = 0
    for layer in operator.shard.layers:
        with LayerFile(str(operator.folder), layer, operator.operator.state) as file:
            records += len(file.marked())
    assert operator.control.open == 449
    assert records < 3 * operator.control.open


@pytest.mark.parametrize("width", [1, 2, 20])
def test_t_moves_if_many_windows_have_equally_old_footprints(width: int, tmp_path: Path) -> None:
    """Each check chooses other windows, however many buckets a step has. The oldest layer, which no
    merge replaces, still names the windows that have left a footprint meanwhile."""
    operator = Operator(TOTALS, tmp_path, Targets(rows=1_000), Pace(1, WIDTH_US))
    keys = np.arange(16_000)
    first = pa.table([np.arange(16_000), keys, np.ones(16_000, int)], schema=ROWS)
    operator.step([first, *[ROWS.empty_table()] * (width - 1)])
    steps = 0
    while operator.control.oldest == -1 and steps < 100:
        times = (operator.bucket + 1) * WIDTH_US + np.arange(20)
        few = pa.table([times, np.full(20, -1 - steps % 3), np.ones(20, int)], schema=ROWS)
        operator.step([few, *[ROWS.empty_table()] * (width - 1)])
        steps += 1
    assert 8 <= steps < 60, "at most 2,000 windows at a time"
