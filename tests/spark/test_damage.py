"""Damaged and lost files: an error that names the file, never a wrong row (C3, E1, G2, G3)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine import keyed
from holdfast.engine.engine import Engine
from holdfast.engine.session import Sessions
from holdfast.engine.state import Version
from holdfast.errors import LogCorrupted
from holdfast.model import fragments
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import LIMITS, Files, Jobs

WIDTH_US = 100_000
SCHEMA = "ts timestamp, k long, n long"

Build = Callable[[hf.Stream], hf.Stream]


def counted(rows: hf.Stream) -> hf.Stream:
    return rows.count_window(3, by="k").agg(s=hf.sum("n"))


def sliding(rows: hf.Stream) -> hf.Stream:
    return rows.window("1s", slide="100ms").group_by("k").agg(s=hf.sum("n"))


def joined(rows: hf.Stream) -> hf.Stream:
    """The windows are retained as rows, because they cannot be read from the inputs again."""
    sums = rows.window("100ms").group_by("k").agg(s=hf.sum("n")).map("ts", "k", "s")
    return sums.join(rows.map("ts", "k", m="n"), on=["k"], within="500ms")


class Steps:
    """Steps of one bucket each."""

    def __init__(
        self, build: Build, sessions: Sessions, folder: Path, *, jobs: Jobs = "small"
    ) -> None:
        net = hf.Network("damaged", bucket="100ms", partitions=2)
        net.output("out", build(net.source("a", SCHEMA, time="ts")))
        (fragment,) = fragments.fragments(net)
        (self.path,) = fragment.paths
        self.engine = Engine(net, sessions, str(folder / "state"), pane_buckets=2)
        self.engine.job_rows = LIMITS[jobs]
        times = np.repeat(np.arange(8) * WIDTH_US, 4)
        rows = {"ts": pa.array(times, TIMESTAMP), "k": np.tile([1, 2], 16), "n": np.arange(32)}
        self.files = Files(net, {"a": pa.table(rows)}, str(folder))
        self.version: Version = self.engine.empty(self.path, -1)

    def step(self) -> None:
        at = self.version.bucket + 1
        self.version = self.engine.run(self.path, self.version, at, at, self.files).version


@pytest.mark.parametrize(("jobs", "lost"), [("small", 0), ("large", 1)])
def test_a_lost_note_is_not_taken_for_an_empty_state(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: Jobs, lost: int
) -> None:
    """G3: a file is deleted, or not visible yet, when the driver looks for it."""
    steps = Steps(counted, sessions, tmp_path, jobs=jobs)
    steps.step()
    before, real = steps.version, keyed.read_notes

    def late(folder: str, tasks: int) -> object:
        os.unlink(os.path.join(folder, f"task-{lost}.json"))
        return real(folder, tasks)

    with monkeypatch.context() as patched:
        patched.setattr(keyed, "read_notes", late)
        with pytest.raises(LogCorrupted, match=rf"task-{lost}\.json is missing, but the task"):
            steps.step()
    assert steps.version is before
    steps.step()
    assert {shard.rows for shard in steps.version.shards[steps.path.operators[0].name].values()}


def test_a_step_whose_results_are_never_read_keeps_its_state(
    sessions: Sessions, tmp_path: Path
) -> None:
    """Spark runs no task then."""
    steps = Steps(lambda rows: counted(rows).filter("false"), sessions, tmp_path)
    steps.step()
    assert steps.version.files() == []


def passed_on(rows: hf.Stream) -> hf.Stream:
    return rows.filter("n >= 0")


@pytest.mark.parametrize("build", [counted, sliding, joined, passed_on])
def test_a_damaged_file_stops_the_step(sessions: Sessions, tmp_path: Path, build: Build) -> None:
    """State files, and the segment of the next bucket."""
    steps = Steps(build, sessions, tmp_path)
    while not steps.version.files() and build is not passed_on:
        steps.step()
    rng = np.random.default_rng(3)
    before = steps.version
    (segment,) = steps.files.files("a", before.bucket + 1, before.bucket + 1)
    for name in (*before.files(), segment.path):
        file = tmp_path / "state" / name
        data = file.read_bytes()
        for bit in rng.integers(0, 8 * len(data), 3).tolist():
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(LogCorrupted, match=f"{file.name} is damaged: expected CRC-32"):
                steps.step()
        file.unlink()
        with pytest.raises(LogCorrupted, match=f"{file.name} is missing"):
            steps.step()
        file.parent.mkdir(exist_ok=True)  # the failed step has deleted the empty folder
        file.write_bytes(data)
    steps.step()
    assert steps.version.bucket == before.bucket + 1


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("build", [counted, sliding, joined, passed_on])
def test_ten_thousand_flipped_bits(sessions: Sessions, tmp_path: Path, build: Build) -> None:
    """2,500 flips per query, in the state files and in the segment of the next bucket: none gives a
    result."""
    steps = Steps(build, sessions, tmp_path)
    while not steps.version.files() and build is not passed_on:
        steps.step()
    rng = np.random.default_rng(4)
    (segment,) = steps.files.files("a", steps.version.bucket + 1, steps.version.bucket + 1)
    files = [tmp_path / "state" / name for name in (*steps.version.files(), segment.path)]
    content = {file: file.read_bytes() for file in files}
    for number in rng.integers(0, len(files), 2_500).tolist():
        file = files[number]
        damaged = bytearray(content[file])
        bit = int(rng.integers(0, 8 * len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(LogCorrupted, match=f"{file.name} is damaged"):
            steps.step()
        file.write_bytes(content[file])
    steps.step()
