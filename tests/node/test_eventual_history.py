"""Recovery of a node with a sliding time window and keyed state behind it: real log, real state, no
Spark.

The state of the window is rows of the inputs, which recovery reads again, or files into which steps
have folded them. Upstream deletes inputs as soon as the node reports that it no longer needs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.config import Options
from holdfast.engine import engine, layers
from holdfast.engine.state import Version
from holdfast.errors import StorageLost
from holdfast.model.contract import Contract
from holdfast.model.network import Network
from holdfast.storage.rows import TIMESTAMP
from tests.node.damage import DAMAGE
from tests.node.small_engine import DDL, ROWS, ArrowStep, rows_of
from tests.node.small_node import SmallNode, Upstream, check_crashes, expected

BUCKETS = 24
LIMITS: list[dict[str, Any]] = [
    {},
    {"recovery_rows": 20},
    {"recovery_entries": 10, "recovery_rows": 50},
    {"recovery_time": "1s"},
]


def summed(rows: pa.Table) -> pa.Table:
    """The sum of each key. The engine sets the time."""
    sums = rows.group_by("k", use_threads=False).aggregate([("x", "sum")])
    times = pa.array([0] * sums.num_rows, TIMESTAMP)
    return pa.table([times, sums["k"], sums["x_sum"]], schema=ROWS)


def windowed(**protection: Any) -> Callable[[], Network]:
    """Each bucket gives the sums of the last five. A count window reads these."""

    def network() -> Network:
        net = Network("windowed", bucket="100ms")
        both = net.union(*(net.source(n, DDL, time="ts", clock="manual") for n in "ab"))
        function: Any = summed
        sums = both.window("500ms", slide="100ms", name="w").apply(function)
        aggregates: Any = {"x": None}
        behind = sums.count_window(4, by="k", name="totals").agg(**aggregates)
        net.output("sums", sums, contract=Contract(within="1min"))
        net.output("behind", behind, contract=Contract(within="1min"))
        net.protect("main", **{"recovery": "cec", **protection})
        return net

    return network


def given(seed: int) -> Upstream:
    rng = np.random.default_rng(seed)
    tables = {
        stream: {b: rows_of(rng, b, 6, 6) for b in range(BUCKETS) if rng.random() < 0.6}
        for stream in "ab"
    }
    return Upstream(tables, BUCKETS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in Arrow; many layers with little data."""
    monkeypatch.setattr(engine, "Step", ArrowStep)
    monkeypatch.setattr(layers, "FANOUT", 3)


def node_at(
    folder: Path, seed: int, upstream: Upstream, *, checkpoint_buckets: int = 0, **limits: Any
) -> SmallNode:
    options = Options(checkpoint_buckets=checkpoint_buckets, group_buckets_max=4)
    return SmallNode(folder, windowed(**limits), upstream, random.Random(seed), options)


def retained_rows(upstream: Upstream) -> int:
    """Rows that upstream has given and still has."""
    return sum(
        table.num_rows
        for stream, held in upstream.tables.items()
        for bucket, table in held.items()
        if upstream.trimmed[stream] < bucket <= upstream.produced[stream]
    )


@pytest.mark.parametrize("seed", range(12))
def test_crashes_and_failed_steps_change_no_result(seed: int, tmp_path: Path) -> None:
    upstream = given(seed)
    wanted = expected(windowed(), upstream, tmp_path / "expected")
    limits = LIMITS[seed % 4] if seed % 5 else {"recovery": "checkpoint"}
    interval = 4 if seed % 5 == 0 or seed % 4 == 3 else 0
    node = node_at(tmp_path / "node", seed, upstream, checkpoint_buckets=interval, **limits)
    check_crashes(node, wanted)


def test_a_node_without_a_checkpoint_computes_everything_again(tmp_path: Path) -> None:
    """Few rows, and no other limit: upstream retains everything."""
    upstream = given(1)
    wanted = expected(windowed(), upstream, tmp_path / "expected")
    node = node_at(tmp_path / "node", 1, upstream)
    while not node.is_complete:
        node.commits(3)
    assert node.record is None and set(upstream.trimmed.values()) == {-1}
    node.crash(power=True)
    assert node.state_files() == set()
    node.ends()
    assert node.results() == wanted


@pytest.mark.parametrize("folds", [True, False])
def test_rows_are_folded_when_recovery_would_read_too_many(folds: bool, tmp_path: Path) -> None:
    """The dial U, for operators that are not replayed. Upstream retains what recovery would read,
    and no more."""
    upstream = given(2)
    wanted = expected(windowed(), upstream, tmp_path / "expected")
    limits = {"recovery_rows": 1} if folds else {}
    node = node_at(tmp_path / "node", 2, upstream, checkpoint_buckets=1, **limits)
    to_read = []
    while not node.is_complete:
        node.commits(1)
        status = node.performer.checkpoints.eventual[node.path.name].status
        to_read.append(status["rows_to_replay"])
        assert node.record == node.version and to_read[-1] == retained_rows(upstream)
    assert (max(row or 0 for row in to_read) <= 1) == folds
    node.crash(power=True)
    assert node.results() == wanted


def with_folded_rows(folder: Path) -> tuple[SmallNode, Version]:
    node = node_at(folder, 3, given(3), recovery_rows=1)
    while node.record is None or len(node.record.edges.get("w:0", ())) < 2:
        node.commits(1)
    return node, node.record


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_folded_rows_is_noticed(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The inputs that it replaces were deleted."""
    node, record = with_folded_rows(tmp_path)
    file = tmp_path / "state" / record.edges["w:0"][0].file
    node.dies(power=False)
    DAMAGE[damage](file, node.rng)
    with pytest.raises(StorageLost, match="cannot start"):
        node.start()
    assert f"{file} is {'missing' if damage == 'deleted' else 'damaged'}" in caplog.text
    node.dies(power=False)


def test_windows_that_span_a_record_are_the_same_after_a_crash(tmp_path: Path) -> None:
    """At every bucket, the machine loses what is not durable."""
    upstream = given(4)
    wanted = expected(windowed(), upstream, tmp_path / "expected")
    node = node_at(tmp_path / "node", 4, upstream, checkpoint_buckets=2, recovery_rows=25)
    for bucket in range(BUCKETS):
        while node.version.bucket < bucket:
            node.commits(1)
        node.crash(power=True)
    node.ends()
    assert node.results() == wanted
