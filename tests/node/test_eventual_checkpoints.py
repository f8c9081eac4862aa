"""Recovery of a node from its newest checkpoint: real log, real state of keys, no Spark.

A node with three keyed operators gets buckets with and without rows, several at once. Steps fail
and are repeated, layers are merged beside them, and checkpoints are written while later steps run.
The process or the machine dies at any moment, also while it starts again. The results must be the
same as those of a run without any of this.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config import Options
from holdfast.core.eventual_checkpoint import EventualCheckpoint, Recovered, Settings, Targets
from holdfast.core.recovery_costs import RecoveryCosts
from holdfast.engine import engine, layers
from holdfast.errors import LogCorrupted, LogError, StorageLost
from holdfast.model.contract import Contract
from holdfast.model.network import Network
from holdfast.node.checkpoints import Checkpoints
from holdfast.verify.sim.simulated_disk import Crashed
from tests.engine.test_layers import sessions
from tests.node.damage import DAMAGE
from tests.node.small_engine import DDL, ArrowStep, rows_of
from tests.node.small_node import OPENING_US, SmallNode, Upstream, check_crashes, expected

BUCKETS = 30
CEC: list[dict[str, Any]] = [
    {"recovery_rows": 15},
    {"recovery_rows": 40, "recovery_entries": 25},
    {"recovery_time": "1s"},
    {"recovery_rows": 25, "recovery_entries": 60},
]


def keyed(**protection: Any) -> Callable[[], Network]:
    """Count windows as totals and with their rows, and sessions, which end with a timer."""

    def network() -> Network:
        net = Network("keyed", bucket="100ms")
        a, b = (net.source(name, DDL, time="ts", clock="manual") for name in "ab")
        aggregates: Any = {"x": None}
        totals = a.count_window(4, by="k", name="totals").agg(**aggregates)
        sliding = b.count_window(5, by="k", slide=2, name="sliding").agg(**aggregates)
        ended = net.union(a, b).stateful(
            sessions, key="k", state="k bigint, n bigint, due timestamp",
            out="ts timestamp, k bigint, n bigint", timer="due", name="sessions",
        )  # fmt: skip
        net.output("windows", net.union(totals, sliding), contract=Contract(within="1min"))
        net.output("ended", ended, contract=Contract(within="1min"))
        net.protect("main", **{"recovery": "cec", **protection})
        return net

    return network


def given(seed: int, keys: int = 12, most: int = 12) -> Upstream:
    """Somewhat fewer than half of the buckets have rows."""
    rng = np.random.default_rng(seed)
    tables = {
        stream: {b: rows_of(rng, b, keys, most) for b in range(BUCKETS) if rng.random() < 0.45}
        for stream in "ab"
    }
    return Upstream(tables, BUCKETS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in Arrow; many blocks and layers with little data."""
    monkeypatch.setattr(engine, "Step", ArrowStep)
    monkeypatch.setattr(layers, "BLOCK_ROWS", 3)
    monkeypatch.setattr(layers, "FANOUT", 3)


def node_at(
    folder: Path, seed: int, upstream: Upstream, *, checkpoint_buckets: int = 0, **limits: Any
) -> SmallNode:
    options = Options(checkpoint_buckets=checkpoint_buckets, group_buckets_max=4)
    return SmallNode(folder, keyed(**limits), upstream, random.Random(seed), options)


# -- crashes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_crashes_and_failed_steps_change_no_result(seed: int, tmp_path: Path) -> None:
    upstream = given(seed)
    wanted = expected(keyed(), upstream, tmp_path / "expected")
    limits = CEC[seed % 4] if seed % 5 else {"recovery": "checkpoint"}
    interval = 4 if seed % 5 == 0 or seed % 4 == 2 else 0
    node = node_at(tmp_path / "node", seed, upstream, checkpoint_buckets=interval, **limits)
    check_crashes(node, wanted)


def test_the_machine_dies_in_each_change_of_a_checkpoint(tmp_path: Path) -> None:
    """Files are flushed, then a record names them, and only then files of the older one go."""
    upstream = given(1)
    wanted = expected(keyed(), upstream, tmp_path / "expected")
    node = node_at(tmp_path / "node", 1, upstream, recovery_rows=1)
    node.commits(3)
    assert node.record is not None
    records, crashes = [node.record.bucket], 0
    for changes in range(1, 20):
        while not node.flushes and not node.is_complete:
            node.commits(1, flushes=False)
        node.disk.crash_after = changes
        try:
            while node.flushes or node.ended:
                (node.hears if node.ended else node.writes)()
            node.disk.crash_after = None
        except Crashed:
            node.crash(power=True)
            crashes += 1
        assert node.record is not None
        records.append(node.record.bucket)
    assert crashes > 8
    assert records == sorted(records) and records[0] < records[-1]
    node.ends()
    assert node.results() == wanted


def test_a_checkpoint_is_written_after_its_layers_were_merged(tmp_path: Path) -> None:
    """Its files stay until then, and so do those of the newest version."""
    upstream = given(2)
    wanted = expected(keyed(), upstream, tmp_path / "expected")
    node = node_at(tmp_path / "node", 2, upstream, recovery_rows=20, recovery_entries=10)
    while not node.flushes:
        node.commits(1, flushes=False)
    ((old, _),) = node.flushes
    while set(old.files()) & set(node.version.files()):
        node.commits(1, flushes=False)
    assert node.record is None and set(old.files()) <= node.state_files()
    node.writes()
    assert set(node.version.files()) <= node.state_files()
    node.crash(power=True)
    assert node.record == old and node.state_files() == set(old.files())
    node.ends()
    assert node.results() == wanted


def test_timers_of_keys_without_further_rows_are_due_after_a_crash(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tables = {"a": {0: rows_of(rng, 0, 9, 30)}, "b": {12: rows_of(rng, 12, 9, 3)}}
    upstream = Upstream(tables, BUCKETS)
    wanted = expected(keyed(), upstream, tmp_path / "expected")
    node = node_at(tmp_path / "node", 3, upstream, recovery_rows=1)
    node.commits(1)
    assert node.record is not None and node.record.bucket == 0
    node.crash(power=True)
    node.ends()
    assert node.results() == wanted and len(wanted["ended"]) > 1


@pytest.mark.parametrize("seed", range(3))
def test_recovery_replays_few_rows(seed: int, tmp_path: Path) -> None:
    """U, and a step that exceeds it; and what was computed while the record was being written."""
    upstream, limit = given(seed), 30
    node = node_at(tmp_path, seed, upstream, recovery_rows=limit)
    rng, replays = node.rng, []
    while not node.is_complete:
        before = node.version.bucket
        node.commits(rng.choice([1, 2, 3]))
        step_rows = upstream.rows(before + 1, node.version.bucket)
        durable = -1 if node.record is None else node.record.bucket
        replays.append(upstream.rows(durable + 1, node.version.bucket))
        assert replays[-1] <= limit + step_rows
        if rng.random() < 0.3:
            node.crash(power=True)
            assert node.version.bucket == durable
            while node.version.bucket < max(upstream.produced.values()):
                node.commits(1)
    assert limit / 2 < max(replays)


# -- damage ---------------------------------------------------------------------------------------


def with_checkpoint(folder: Path) -> SmallNode:
    """A checkpoint is under way that shares some files with the newest one."""
    node = node_at(folder, 4, given(4), recovery_rows=20)
    while node.record is None or not node.flushes:
        node.commits(1, flushes=node.record is None)
    ((version, _),) = node.flushes
    assert set(version.files()) & set(node.record.files())
    return node


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_not_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inputs before it were deleted, and there is no older one: the node cannot start."""
    node = with_checkpoint(tmp_path)
    assert node.record is not None
    file = tmp_path / "state" / node.rng.choice(node.record.files())
    node.dies(power=False)
    DAMAGE[damage](file, node.rng)
    with pytest.raises(StorageLost, match="cannot start"):
        node.start()
    assert f"{file} is {'missing' if damage == 'deleted' else 'damaged'}" in caplog.text
    node.dies(power=False)


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_older_checkpoint_is_used_if_there_is_one(damage: str, tmp_path: Path) -> None:
    """The machine has died between a record and the end of the one before it."""
    wanted = expected(keyed(), given(4), tmp_path / "expected")
    node = with_checkpoint(tmp_path / "node")
    assert node.record is not None
    old, ((new, _),) = node.record, node.flushes
    only_new = sorted(set(new.files()) - set(old.files()))
    node.disk.crash_after = len(only_new) + 2
    with pytest.raises(Crashed):
        node.writes()
    node.dies(power=True)
    DAMAGE[damage](node.root / "state" / node.rng.choice(only_new), node.rng)
    node.start()
    assert [bucket for bucket, _ in node.log.states(node.path.name)] == [old.bucket, new.bucket]
    assert node.version == old
    node.commits(2)
    node.crash(power=True)
    node.ends()
    assert node.results() == wanted


@pytest.mark.parametrize("seed", range(4))
def test_damage_while_the_node_runs_gives_no_wrong_result(seed: int, tmp_path: Path) -> None:
    upstream = given(seed)
    wanted = expected(keyed(), upstream, tmp_path / "expected")
    noticed = 0
    for attempt in range(6):
        node = node_at(tmp_path / str(attempt), seed, given(seed), recovery_rows=20)
        rng = node.rng = random.Random(100 * seed + attempt)
        while not (files := sorted(node.version.files())) or rng.random() < 0.8:
            node.commits(1)
        DAMAGE[rng.choice(list(DAMAGE))](node.root / "state" / rng.choice(files), rng)
        try:
            node.ends()
        except LogCorrupted:
            noticed += 1
        found = node.results()
        for output, buckets in found.items():
            upto = node.logged_upto(output)
            assert buckets == {b: rows for b, rows in wanted[output].items() if b <= upto}
        node.dies(power=False)
    assert noticed >= 2


# -- a finished node ------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"recovery_rows": 15}, {"recovery_time": "1s"}])
def test_a_node_whose_inputs_have_ended_can_be_started_any_number_of_times(
    limits: dict[str, Any], tmp_path: Path
) -> None:
    """Each start computes a bucket after the end, in case a timer is left; no results are logged
    for it, and its record is later than the results."""
    upstream = given(3)
    upstream.has_ended = True
    node = node_at(tmp_path, 1, upstream, checkpoint_buckets=5, **limits)
    for _ in range(5):
        while node.possible():
            node.move()
        assert node.performer.ended
        logged_upto = node.logged_upto("ended")
        assert logged_upto >= BUCKETS - 1
        node.crash(power=False)
    assert node.record is not None and node.record.bucket > logged_upto


# -- the time of a recovery ------------------------------------------------------------------------


def test_opening_the_log_is_a_part_of_the_recovery(tmp_path: Path) -> None:
    """It takes long if the log has many records, and users wait for it."""
    node = node_at(tmp_path, 1, given(1), recovery_rows=1)
    node.commits(3)
    node.crash(power=True)
    control = node.performer.checkpoints.eventual[node.path.name]
    assert control.recovery is not None and control.recovery.opening_us == OPENING_US
    node.commits(1)
    assert control.recovery_us is not None and control.recovery_us >= OPENING_US


# -- a full disk ----------------------------------------------------------------------------------


class Full:
    """A disk without space for the content of state files: the file system notices it when they
    are flushed, forgets what it could not write, and says so once."""

    def __init__(self, node: SmallNode) -> None:
        self._node, self._sync_tree = node, node.disk.sync_tree
        self.lost: set[str] = set()
        self.is_full = True
        node.disk.sync_tree = self  # type: ignore[method-assign]

    def __call__(self, path: str, root: str) -> None:
        if self.is_full and path not in self.lost:
            self.lost.add(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self._sync_tree(path, root)
        if path in self.lost:
            self._node.disk.lose(path)


def test_no_record_names_a_file_whose_flush_has_failed(tmp_path: Path) -> None:
    upstream = given(3)
    wanted = expected(keyed(), upstream, tmp_path / "expected")
    node = node_at(tmp_path / "node", 3, upstream, recovery_rows=20, recovery_entries=10)
    while not node.flushes:
        node.commits(1, flushes=False)
    disk, before = Full(node), node.record
    with pytest.raises(LogError, match="No space left on device"):
        node.writes()
        node.hears()
    assert node.record == before
    disk.is_full = False
    node.crash(power=True)
    node.ends()
    assert node.results() == wanted
    assert node.record is not None and disk.lost


def test_a_checkpoint_that_waits_for_space_is_reported_once_and_shown_until_it_is_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = node_at(tmp_path, 3, given(3), recovery_rows=1)
    while not node.flushes:
        node.commits(1, flushes=False)
    for _ in range(5):
        node.disk.full = True
        node.writes()
        node.disk.full = False
        node.hears()
        node.passes(1_000_000)
        node.commits(1, flushes=False)  # steps succeed meanwhile
        assert "waits for disk space" in (node.performer.checkpoints.trouble or "")
    assert caplog.text.count("waits for disk space") == 1
    node.commits(1)
    assert node.performer.checkpoints.trouble is None


def test_reading_the_state_of_other_paths_is_a_part_of_the_recovery() -> None:
    """A node reads all paths before any of them continues."""
    unused: Any = None
    checkpoints = Checkpoints("main", unused, unused, lambda: 0)
    for name, load_us in (("first", 300_000), ("second", 500_000)):
        read = Recovered(9, 1_000, load_us, 20_000, RecoveryCosts())
        checkpoints.eventual[name] = EventualCheckpoint(Settings(Targets(rows=10)), read)
    checkpoints.add_other_paths()
    for control in checkpoints.eventual.values():
        assert control.recovery is not None
        assert control.recovery.finished({10: 5}, 100_000, control.costs) == 920_000
