"""Feeds and clock threads wait while the disk is full or read-only; no row is lost or duplicated.

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
from holdfast.errors import InputError, StorageFull
from holdfast.model.operators import Source as SourceOperator
from holdfast.storage import Log
from holdfast.storage.disk import AppendFile, OsDisk
from holdfast.verify.sim.simulated_disk import MemoryDisk

WIDTH_US = 1_000
TIME = pa.timestamp("us", tz="UTC")


class Stop(threading.Event):
    """Waits normally, except for disk space: every third such wait returns with free space."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__()
        self.disk = disk
        self.waits = self.asked_for_space = 0
        #: Called with the number of every other wait.
        self.on_wait: Callable[[int], None] = lambda number: None
        #: Called when a feed waits for disk space.
        self.on_space: Callable[[], None] = lambda: None

    def wait(self, timeout: float | None = None) -> bool:
        if timeout == StorageFull.retry_us / 1e6:
            self.asked_for_space += 1
            self.on_space()
            if self.asked_for_space % 3 == 0:
                self.disk.full = False
            return self.is_set()
        self.waits += 1
        self.on_wait(self.waits)
        return super().wait(timeout)


class ReadOnly(OsDisk):
    """Refuses the next `denied` appends."""

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


def test_a_generator_waits_for_disk_space_and_generates_every_row_once(
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
    assert warning.startswith("source s is paused and retries until the rows are taken: /s/")


def test_a_replay_waits_for_disk_space_and_pushes_every_row_once(
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
    assert len(warnings(caplog)) == 2  # one for each time that the disk was full


def test_a_replay_that_stops_before_a_bucket_closes_pushes_the_rows_once(
    disk: MemoryDisk, stop: Stop, tmp_path: Path
) -> None:
    """A consumer is too far behind, so the bucket stays open; its rows are durable anyway."""
    times = pa.array([None, *(number * WIDTH_US // 2 for number in range(10))], TIME)
    pq.write_table(pa.table({"ts": times, "value": list(range(11))}), tmp_path / "rows.parquet")
    replay = Replay(str(tmp_path / "rows.parquet"))
    op = SourceOperator(name="s", schema="ts timestamp, value long", time="ts", clock="manual")
    log = Log.open("/s", "s", fsync="always", disk=disk)
    source = Source(op, log, WIDTH_US, buffer_buckets=2, received=lambda: 0)
    stop.on_wait = lambda number: stop.set()
    replay.run(source, stop)
    assert source.log.info("s").complete_upto == 2
    source.close()
    log.close()
    source = opened(disk, "manual")
    assert source.token == "replayed-3"
    replay.run(source, Stop(disk))
    assert values(source) == list(range(1, 11))
    assert source.dead_letters()["value"].to_pylist() == [0]


def test_a_clock_thread_waits_for_disk_space_and_continues(
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


def test_a_clock_thread_survives_storage_that_is_temporarily_read_only(
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


def test_a_clock_thread_can_be_stopped_while_it_waits_for_disk_space(
    disk: MemoryDisk, stop: Stop
) -> None:
    source = opened(disk, "wall")
    disk.full = True
    stop.set()
    run_clock(source, stop)
    assert disk.full and not source.opened


def test_a_push_refused_by_a_full_disk_is_repeated_with_its_token(
    disk: MemoryDisk, stop: Stop
) -> None:
    """`ReadStream` pushes a batch like this."""
    source = opened(disk, "manual")
    source.start(0)
    rows = pa.table({"ts": pa.array([5], TIME), "value": [7]})
    disk.full = True
    assert feeds._done(lambda: source.push(rows, token="1", flush=True), source, stop)
    assert values(source) == [7] and source.token == "1"
    assert stop.asked_for_space == 3


def test_a_generator_waits_for_a_consumer_that_falls_back_behind_the_buffer(
    disk: MemoryDisk, stop: Stop, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that restarts from its checkpoint reports an older position than before."""
    op = SourceOperator(name="s", schema="ts timestamp, value bigint", time="ts", clock="live")
    log = Log.open("/s", "s", fsync="always", disk=disk)
    received = [2**60]
    source = Source(op, log, WIDTH_US, buffer_buckets=3, received=lambda: received[0])
    waits_before = 0

    def on_wait(number: int) -> None:
        if received[0] < 0 and number > waits_before + 3:
            received[0] = 2**60

    stop.on_wait = on_wait

    def make(number: int, from_us: int, to_us: int) -> pa.Table:
        nonlocal waits_before
        if number == 3:
            received[0], waits_before = -(2**60), stop.waits
        if number == 6:
            stop.set()
        return pa.table({"ts": pa.array([from_us], TIME), "value": [number]})

    Generate(make, every_ms=5).run(source, stop)
    source.flush()
    assert values(source) == list(range(7))
    assert "buffer_buckets" in warnings(caplog)[0]


def test_a_clock_catches_up_after_a_stall_although_the_buffer_is_shorter_than_a_second(
    disk: MemoryDisk,
) -> None:
    stop = Set(20 * S)
    op = SourceOperator(name="s", schema="ts timestamp, value bigint", time="ts", clock="wall")
    log = Log.open("/s", "s", fsync="always", disk=disk)

    def received() -> int:
        """The consumer receives everything, except between 5 and 7 s."""
        info = log.info("s")
        return info.starts_at + 50 if 5 * S < stop.monotonic < 7 * S else info.complete_upto

    source = Source(
        op, log, 100_000, buffer_buckets=5, received=received,
        clock=lambda: stop.wall, monotonic=lambda: stop.monotonic,
    )  # fmt: skip
    run_clock(source, stop)
    assert stop.wall - (log.info("s").complete_upto + 1) * 100_000 < S


def test_a_replay_continues_at_once_after_a_restart(disk: MemoryDisk, tmp_path: Path) -> None:
    times = pa.array([number * S for number in range(20)], TIME)
    pq.write_table(pa.table({"ts": times, "value": list(range(20))}), tmp_path / "rows.parquet")
    source = opened(disk, "manual")
    source.start(0)
    source.advance(15 * S)
    stop, waited = Stop(disk), []

    def wait(timeout: float | None = None) -> bool:
        waited.append(timeout)
        return False

    stop.wait = wait  # type: ignore[method-assign]
    Replay(str(tmp_path / "rows.parquet"), speed=1.0).run(source, stop)
    assert len(waited) == 5 and waited[0] is not None and waited[0] < 1.0


@pytest.mark.parametrize(
    ("token", "batch", "new"),
    [(None, ("a", 0), True), ("a/3", ("a", 4), True), ("a/3", ("a", 3), False),
     ("a/3", ("b", 0), True), ("a/0", ("b", 0), True)],
)  # fmt: skip
def test_a_batch_of_spark_is_recognised_by_its_query_and_number(
    disk: MemoryDisk, token: str | None, batch: tuple[str, int], new: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    source = opened(disk, "data")
    source.start(0)
    if token is not None:
        source.push({"ts": [5], "value": [7]}, token=token, flush=True)
    assert feeds._is_new(*batch, source, "checkpoint") is new
    is_other = token is not None and not token.startswith(batch[0])
    assert [text for text in warnings(caplog) if "not the one of the last batch" in text] == (
        warnings(caplog) if is_other else []
    )
    assert bool(warnings(caplog)) is is_other


def test_an_older_copy_of_a_checkpoint_of_spark_is_refused(disk: MemoryDisk) -> None:
    source = opened(disk, "data")
    source.start(0)
    source.push({"ts": [5], "value": [7]}, token="a/3", flush=True)
    with pytest.raises(InputError, match=r"Spark repeats batch 2, .* is an older copy"):
        feeds._is_new("a", 2, source, "checkpoint")


class Set(threading.Event):
    """A stop event that never waits: it advances two simulated clocks and steps the wall clock."""

    def __init__(self, until_us: int) -> None:
        super().__init__()
        self.wall, self.monotonic, self._until_us = 1_700_000_000_000_000, 0, until_us
        #: By monotonic time: the step of the wall clock in microseconds.
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
def test_a_generator_continues_when_the_clock_is_stepped_back(
    disk: MemoryDisk, back_us: int
) -> None:
    stop = Set(20 * S)
    stop.steps = {5 * S: -back_us}
    source = stop.source(disk, "live")
    ticks: list[tuple[int, int]] = []

    def make(number: int, from_us: int, to_us: int) -> pa.Table:
        ticks.append((from_us, to_us))
        return pa.table({"ts": pa.array([from_us], TIME), "value": [number]})

    Generate(make).run(source, stop)
    info = source.log.info("s")
    assert info.complete_upto - info.starts_at >= 2 * (5 + 15 // 2) - 2
    assert all(since < until for since, until in ticks)
    assert [until for _, until in ticks[:-1]] == [since for since, _ in ticks[1:]]
    assert source.status()["late_rows"] == 0


def test_a_generator_generates_no_rows_for_a_clock_step_of_a_day(
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
    assert any("no rows were generated for this gap" in text for text in warnings(caplog))
    assert source.now_us() == stop.wall


@pytest.mark.parametrize(("at_us", "step_us"), [(5 * S, -HOUR), (5 * S, 24 * HOUR)])
def test_the_clock_thread_closes_buckets_despite_steps_of_the_wall_clock(
    disk: MemoryDisk, at_us: int, step_us: int
) -> None:
    stop = Set(20 * S)
    stop.steps = {at_us: step_us, at_us + S: -step_us}
    source = stop.source(disk, "wall")
    run_clock(source, stop)
    info = source.log.info("s")
    assert 30 <= info.complete_upto - info.starts_at <= 40


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_files_with_times_without_a_zone_are_replayed_in_the_declared_zone(
    disk: MemoryDisk, stop: Stop, tmp_path: Path, kind: str
) -> None:
    """Without a declared zone, `check` refuses them and names the remedy."""
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


def test_a_declared_zone_is_refused_for_times_that_have_an_offset(
    disk: MemoryDisk, stop: Stop, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("ts,value\n1970-01-01T00:00:00Z,1\n")
    source = opened(disk, "manual")
    assert Replay(str(path)).problem(source.op) is None
    problem = Replay(str(path), timezone="Europe/Berlin").problem(source.op)
    assert problem is not None and "already have an offset" in problem
