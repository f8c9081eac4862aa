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
from holdfast.edge.feeds import Generate, Replay, tick_wall
from holdfast.edge.source import Source
from holdfast.model.operators import Source as SourceOperator
from holdfast.storage import Log
from holdfast.storage.disk import AppendFile, OsDisk
from holdfast.verify.sim.memory_disk import MemoryDisk

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

    def wait(self, timeout: float | None = None) -> bool:
        if timeout == feeds.FULL_S:
            self.asked_for_space += 1
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
    tick_wall(source, stop)
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
    tick_wall(source, stop)
    assert stop.asked_for_space == 2
    (warning,) = warnings(caplog)
    assert "Read-only file system" in warning


def test_who_waits_for_space_can_be_stopped(disk: MemoryDisk, stop: Stop) -> None:
    source = opened(disk, "wall")
    disk.full = True
    stop.set()
    tick_wall(source, stop)
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
