"""Feeds and clocks wait while the disk is full or read-only, and no row is lost or taken twice.

No JVM."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.edge import feeds
from holdfast.edge.feeds import Generate, Replay, run_clock
from holdfast.edge.source import Source
from holdfast.errors import InputError
from holdfast.model.operators import Source as SourceOperator
from holdfast.storage import Log
from holdfast.storage.disk import AppendFile, OsDisk
from holdfast.verify.sim.simulated_disk import MemoryDisk

WIDTH_US = 1_000
TIME = pa.timestamp("us", tz="UTC")


class Stop(threading.Event):
    """Waits as told to, but for space not at all: the third time, somebody has freed some."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__()
        self.disk = disk
        self.waits = self.asked_for_space = 0
        #: Called with the number of every other wait.
        self.on_wait: Callable[[int], None] = lambda number: None
        #: Called when space is waited for.
        self.on_space: Callable[[], None] = lambda: None

    def wait(self, timeout: float | None = None) -> bool:
        if timeout == feeds.FULL_S:
            self.asked_for_space += 1
            self.on_space()
            if self.asked_for_space % 3 == 0:
                self.disk.full = False
            return self.is_set()
        self.waits += 1
        self.on_wait(self.waits)
        return super().wait(timeout)


class ReadOnly(OsDisk):
    """Refuses so many appends."""

    denied = 0

    def open_append(self, path: str, *, fsync: bool) -> AppendFile:
        file, disk = super().open_append(path, fsync=fsync), self

        class Refusing:
            def append(self, data: bytes) -> None:
                if disk.denied:
                    disk.denied -= 1
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                file.append(data)

            truncate, in_place, close = file.truncate, file.in_place, file.close

        return Refusing()


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk(random.Random(1))


@pytest.fixture
def stop(disk: MemoryDisk) -> Stop:
    return Stop(disk)


def opened(disk: MemoryDisk, clock: str) -> Source:
    op = SourceOperator(name="s", schema="ts timestamp, value bigint", time="ts", clock=clock)
    return Source(op, Log.open("/s", "s", fsync="always", disk=disk), WIDTH_US)


def values(source: Source) -> list[int]:
    segments = source.log.segments("s", -(2**62), 2**62)
    return [value for s in segments for value in source.log.read(s)["value"].to_pylist()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_generator_waits_and_makes_every_row_once(
    disk: MemoryDisk, stop: Stop, caplog: pytest.LogCaptureFixture
) -> None:
    source = opened(disk, "live")

    def make(number: int, from_us: int, to_us: int) -> pa.Table:
        disk.full = number == 3
        if number == 8:
            stop.set()
        return pa.table({"ts": pa.array([from_us], TIME), "value": [number]})

    Generate(make, every_ms=5).run(source, stop)
    source.flush()
    assert values(source) == list(range(9))
    assert stop.asked_for_space == 3
    (warning,) = warnings(caplog)
    assert warning.startswith("source s waits for its storage: /s/")


def test_a_replay_waits_and_gives_every_row_once(
    disk: MemoryDisk, stop: Stop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = opened(disk, "manual")
    times = pa.array([number * WIDTH_US // 2 for number in range(20)], TIME)
    pq.write_table(pa.table({"ts": times, "value": list(range(20))}), tmp_path / "rows.parquet")
    disk.full = True  # when the stream is opened
    stop.on_wait = lambda number: setattr(disk, "full", number == 4)
    Replay(str(tmp_path / "rows.parquet"), speed=1_000.0).run(source, stop)
    assert values(source) == list(range(20))
    assert source.log.info("s").ended
    assert stop.asked_for_space == 6
    assert len(warnings(caplog)) == 2  # one for each time


def test_a_replay_that_is_stopped_before_a_bucket_closes_gives_its_rows_once(
    disk: MemoryDisk, stop: Stop, tmp_path: Path
) -> None:
    """A reader is too far behind, so the bucket stays open; its rows are durable all the same."""
    times = pa.array([None, *(number * WIDTH_US // 2 for number in range(10))], TIME)
    pq.write_table(pa.table({"ts": times, "value": list(range(11))}), tmp_path / "rows.parquet")
    replay = Replay(str(tmp_path / "rows.parquet"))
    op = SourceOperator(name="s", schema="ts timestamp, value long", time="ts", clock="manual")
    log = Log.open("/s", "s", fsync="always", disk=disk)
    source = Source(op, log, WIDTH_US, buffer_buckets=2, received=lambda: 0)
    stop.on_space = stop.set
    replay.run(source, stop)
    assert source.log.info("s").complete_upto == 2
    source.close()
    log.close()
    source = opened(disk, "manual")
    assert source.token == "replayed-3"
    replay.run(source, Stop(disk))
    assert values(source) == list(range(1, 11))
    assert source.dead_letters()["value"].to_pylist() == [0]


def test_a_clock_waits_and_goes_on(
    disk: MemoryDisk, stop: Stop, caplog: pytest.LogCaptureFixture
) -> None:
    source = opened(disk, "wall")
    closed: list[int] = []

    def on_wait(number: int) -> None:
        closed.append(source.log.info("s").complete_upto)
        disk.full = number == 4
        if number == 8:
            stop.set()

    stop.on_wait = on_wait
    disk.full = True
    run_clock(source, stop)
    assert closed == sorted(set(closed)) and len(closed) == 8
    assert stop.asked_for_space == 6
    assert len(warnings(caplog)) == 2


def test_a_clock_outlives_storage_that_is_read_only_for_a_while(
    stop: Stop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    op = SourceOperator(name="s", schema="ts timestamp, value bigint", time="ts", clock="wall")
    disk = ReadOnly()
    source = Source(op, Log.open(tmp_path, "s", fsync="never", disk=disk), WIDTH_US)

    def on_wait(number: int) -> None:
        disk.denied = 2 if number == 2 else 0
        if number == 4:
            stop.set()

    stop.on_wait = on_wait
    run_clock(source, stop)
    assert stop.asked_for_space == 2
    (warning,) = warnings(caplog)
    assert "Read-only file system" in warning


def test_who_waits_for_space_can_be_stopped(disk: MemoryDisk, stop: Stop) -> None:
    source = opened(disk, "wall")
    disk.full = True
    stop.set()
    run_clock(source, stop)
    assert disk.full and not source.opened


def test_a_push_that_found_no_space_is_repeated_with_its_token(
    disk: MemoryDisk, stop: Stop
) -> None:
    """What `ReadStream` does with a batch."""
    source = opened(disk, "manual")
    source.start(0)
    rows = pa.table({"ts": pa.array([5], TIME), "value": [7]})
    disk.full = True
    assert feeds._done(lambda: source.push(rows, token="1", flush=True), source, stop)
    assert values(source) == [7] and source.token == "1"
    assert stop.asked_for_space == 3


class Set(threading.Event):
    """A stop that never waits: time is two clocks, and the wall clock is set now and then."""

    def __init__(self, until_us: int) -> None:
        super().__init__()
        self.wall, self.monotonic, self._until_us = 1_700_000_000_000_000, 0, until_us
        #: By how much the wall clock is set, at which monotonic time.
        self.steps: dict[int, int] = {}

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.monotonic += int(timeout * 1e6)
        self.wall += int(timeout * 1e6)
        for at in [at for at in self.steps if at <= self.monotonic]:
            self.wall += self.steps.pop(at)
        return self.monotonic >= self._until_us

    def source(self, disk: MemoryDisk, clock: str) -> Source:
        op = SourceOperator(name="s", schema="ts timestamp, value bigint", time="ts", clock=clock)
        return Source(
            op, Log.open("/s", "s", fsync="always", disk=disk), 500_000,
            clock=lambda: self.wall, monotonic=lambda: self.monotonic,
        )  # fmt: skip


S, HOUR = 1_000_000, 3_600_000_000


@pytest.mark.parametrize("back_us", [HOUR, 600 * S])
def test_a_generator_goes_on_when_the_clock_is_set_back(disk: MemoryDisk, back_us: int) -> None:
    stop = Set(20 * S)
    stop.steps = {5 * S: -back_us}
    source = stop.source(disk, "live")
    asked: list[tuple[int, int]] = []

    def make(number: int, from_us: int, to_us: int) -> pa.Table:
        asked.append((from_us, to_us))
        return pa.table({"ts": pa.array([from_us], TIME), "value": [number]})

    Generate(make).run(source, stop)
    info = source.log.info("s")
    assert info.complete_upto - info.starts_at >= 2 * (5 + 15 // 2) - 2
    assert all(since < until for since, until in asked)
    assert [until for _, until in asked[:-1]] == [since for since, _ in asked[1:]]
    assert source.status()["late_rows"] == 0


def test_a_generator_makes_up_no_rows_for_a_day_that_the_clock_jumped(
    disk: MemoryDisk, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Set(20 * S)
    stop.steps = {5 * S: 24 * HOUR}
    source = stop.source(disk, "live")
    spans: list[int] = []

    def make(number: int, from_us: int, to_us: int) -> pa.Table:
        spans.append(to_us - from_us)
        return pa.table({"ts": pa.array([from_us], TIME), "value": [number]})

    Generate(make).run(source, stop)
    assert max(spans) < S
    assert any("no rows are made up for a gap" in text for text in warnings(caplog))
    assert source.now_us() == stop.wall


@pytest.mark.parametrize(("at_us", "step_us"), [(5 * S, -HOUR), (5 * S, 24 * HOUR)])
def test_the_clock_thread_closes_buckets_whatever_the_wall_clock_does(
    disk: MemoryDisk, at_us: int, step_us: int
) -> None:
    stop = Set(20 * S)
    stop.steps = {at_us: step_us, at_us + S: -step_us}
    source = stop.source(disk, "wall")
    run_clock(source, stop)
    info = source.log.info("s")
    assert 30 <= info.complete_upto - info.starts_at <= 40


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_files_with_times_without_a_zone_are_replayed_in_the_zone_that_is_named(
    disk: MemoryDisk, stop: Stop, tmp_path: Path, kind: str
) -> None:
    """Refused by `check` already, with advice that can be followed."""
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"ts": pa.array([0], pa.timestamp("us")), "value": [1]}), path)
    elif kind == "csv":
        path.write_text("ts,value\n1970-01-01 00:00:00,1\n")
    else:
        path.write_text('{"ts": "1970-01-01T00:00:00", "value": 1}\n')
    source = opened(disk, "manual")
    problem = Replay(str(path)).problem(source.op)
    assert problem is not None and "hf.Replay(path, timezone='UTC')" in problem
    with pytest.raises(InputError, match="without a zone"):
        Replay(str(path)).run(source, stop)
    replay = Replay(str(path), timezone="Europe/Berlin")
    assert replay.problem(source.op) is None
    replay.run(source, stop)
    (segment,) = source.log.segments("s", -(2**62), 2**62)
    assert [time.value for time in source.log.read(segment)["ts"]] == [-HOUR]


def test_a_zone_for_times_that_have_one_is_refused(
    disk: MemoryDisk, stop: Stop, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("ts,value\n1970-01-01T00:00:00Z,1\n")
    source = opened(disk, "manual")
    assert Replay(str(path)).problem(source.op) is None
    problem = Replay(str(path), timezone="Europe/Berlin").problem(source.op)
    assert problem is not None and "carry their own offset" in problem
