"""Keyed state in layers, with Spark: merges beside the steps, and what becomes of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine.engine import Engine
from holdfast.engine.merging import Merging
from holdfast.engine.session import Sessions
from holdfast.engine.state import Shard, Version, files_below
from holdfast.errors import LogCorrupted
from holdfast.model import fragments
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import LIMITS, Files, Jobs

WIDTH_US = 100_000
KEYS = 400
BUCKETS = 40


def network() -> hf.Network:
    net = hf.Network("layers", bucket="100ms", partitions=2)
    rows = net.source("a", "ts timestamp, k long, n long", time="ts")
    net.output("pairs", rows.count_window(2, by="k").agg(s=hf.sum("n")))
    return net


def input_rows() -> pa.Table:
    """Every key in the first bucket, then twenty keys in each."""
    rng = np.random.default_rng(1)
    keys = [np.arange(KEYS), *(rng.permutation(KEYS)[:20] for _ in range(BUCKETS - 1))]
    times = np.repeat(np.arange(BUCKETS) * WIDTH_US, [len(part) for part in keys])
    numbers = np.arange(len(times))
    return pa.table({"ts": pa.array(times, TIMESTAMP), "k": np.concatenate(keys), "n": numbers})


class Steps:
    def __init__(self, sessions: Sessions, folder: Path, *, step_max: int, jobs: Jobs) -> None:
        net = network()
        ((self.path,),) = (fragment.paths for fragment in fragments.fragments(net))
        self.engine = Engine(net, sessions, str(folder / "state"), job_rows=LIMITS[jobs])
        self.engine.merging.step_max = step_max
        self.files = Files(net, {"a": input_rows()}, str(folder))
        self.version: Version = self.engine.empty(self.path, -1)

    def step(self) -> pa.Table | None:
        at = self.version.bucket + 1
        result = self.engine.run(self.path, self.version, at, at, self.files)
        self.version = result.version
        self.engine.release(self.path, [self.version])
        rows = result.outputs["pairs"]
        return rows[0][1] if rows else None

    def layers(self) -> list[Any]:
        (held,) = self.version.shards.values()
        return [layer for shard in held.values() for layer in shard.layers]


@pytest.mark.parametrize("jobs", ["small", "large"])
def test_merges_beside_the_steps_change_no_result(
    sessions: Sessions, tmp_path: Path, jobs: Jobs
) -> None:
    plain = Steps(sessions, tmp_path / "plain", step_max=1 << 18, jobs="small")
    beside = Steps(sessions, tmp_path / "beside", step_max=50, jobs=jobs)
    used = set()
    for _ in range(BUCKETS):
        expected, found = plain.step(), beside.step()
        assert (expected is None) == (found is None)
        assert expected is None or expected.equals(found)
        used |= {layer.file for layer in beside.layers() if ".merged." in layer.file}
        if beside.engine.merging.thread is not None:
            beside.engine.merging.thread.join(60)
    assert used
    assert beside.version.rows() == plain.version.rows()
    # Also a merge that no step has used yet.
    left = files_below(beside.engine.folder) - set(beside.version.files())
    assert len([file for file in left if file.endswith(".layer")]) <= 1
    assert not [file for file in left if "task-" in file]


def test_damage_that_a_merge_finds_stops_the_next_step(
    sessions: Sessions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(sessions, tmp_path, step_max=1 << 18, jobs="small")
    steps.step()
    (held,) = steps.version.shards.values()
    base = held[0].layers[0]
    lost = Shard((base, replace(base, file="lost.layer")), held[0].rows)
    merging = Merging(sessions, steps.engine.folder)
    merging.step_max = 1
    schema = pa.schema([("ts", TIMESTAMP), ("k", pa.int64()), ("n", pa.int64())])

    def merge() -> bool:
        """Whether an attempt was made."""
        before = merging.thread
        merging.start("op", {0: lost}, schema, None, "path", merging.step_max)
        if merging.thread is before:
            return False
        assert merging.thread is not None
        merging.thread.join(60)
        return True

    assert merge()
    assert "lost.layer is missing" in caplog.text and "Traceback" not in caplog.text
    with pytest.raises(LogCorrupted, match=r"lost\.layer is missing"):
        merging.begin("op", 0, lost)
    assert merging.begin("op", 0, lost) == (lost, 0)
    assert [merge() for _ in range(6)] == [False, True, False, False, True, False]
    assert not (Path(steps.engine.folder) / "path").exists()


def test_no_shard_waits_for_ever_for_its_merge(sessions: Sessions, tmp_path: Path) -> None:
    """Every step touches so many keys of every shard that a merge is always due."""
    steps = Steps(sessions, tmp_path, step_max=5, jobs="small")
    most = 0
    for _ in range(BUCKETS):
        steps.step()
        (held,) = steps.version.shards.values()
        most = max(most, *(len(shard.layers) for shard in held.values()))
        if steps.engine.merging.thread is not None:
            steps.engine.merging.thread.join(60)
    assert most < 25
