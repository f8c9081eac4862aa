"""Event time at a source: rows keep their times, or are excluded and reported. No JVM."""

from __future__ import annotations

import logging
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.edge import dead_letters as kept
from holdfast.edge.dead_letters import read_dead_letters
from holdfast.edge.source import Source
from holdfast.errors import InputError, StorageFull
from holdfast.model.network import Network
from holdfast.model.operators import Source as SourceOperator
from holdfast.storage import Log, read_only
from holdfast.verify.sim.simulated_disk import MemoryDisk

S = 1_000_000
MIN, HOUR, DAY = 60 * S, 3_600 * S, 86_400 * S
WIDTH = S // 2
NOON = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * S
TIME = pa.timestamp("us", tz="UTC")


class Clocks:
    """A wall clock that can be stepped, and monotonic time that cannot."""

    def __init__(self) -> None:
        self.wall, self.monotonic = NOON, 0

    def passes(self, us: int) -> None:
        self.wall, self.monotonic = self.wall + us, self.monotonic + us


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log.open(tmp_path / "tap", "tap", fsync="never", archive=True)


def operator(**options: object) -> SourceOperator:
    """A source as an application declares it."""
    net = Network("net", bucket="500ms")
    net.source("tap", "ts timestamp, n long", time="ts", **options)  # type: ignore[arg-type]
    (op,) = net.sources
    return op


def make(log: Log, clocks: Clocks, **options: object) -> Source:
    return Source(
        operator(**options),
        log,
        WIDTH,
        clock=lambda: clocks.wall,
        monotonic=lambda: clocks.monotonic,
    )


def rows(*times: int, n: int = 0) -> pa.Table:
    return pa.table({"ts": pa.array(times, TIME), "n": pa.array([n] * len(times), pa.int64())})


def live(source: Source, clocks: Clocks, seconds: float) -> None:
    """Rows are stamped with the wall clock and pushed at once, and the source ticks."""
    for _ in range(int(seconds * 2)):
        clocks.passes(WIDTH)
        source.push(rows(clocks.wall))
        source.tick()


def logged(log: Log) -> list[int]:
    """Times in closed buckets."""
    upto = log.info("tap").complete_upto
    return [
        time.value
        for segment in log.segments("tap", -(2**62), upto)
        for time in log.read(segment)["ts"]
    ]


def closed_us(log: Log) -> int:
    return (log.info("tap").complete_upto + 1) * WIDTH


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# -- late rows ----------------------------------------------------------------------------------


def test_late_rows_are_dead_letters_with_their_own_times(log: Log, clocks: Clocks) -> None:
    source = make(log, clocks)
    source.tick()
    source.push(rows(NOON - HOUR, NOON - DAY, NOON), flush=True)
    clocks.passes(2 * S)
    source.tick()
    assert logged(log) == [NOON]
    dead = source.dead_letters()
    assert dead.column_names == ["_rejected_at", "_reason", "ts", "n"]
    assert dead["_reason"].to_pylist() == ["late", "late"]
    assert [time.value for time in dead["ts"]] == [NOON - HOUR, NOON - DAY]
    assert [time.value for time in dead["_rejected_at"]] == [NOON, NOON]
    status = source.status()
    assert (status["rows"], status["late_rows"], status["dead_letter_rows"]) == (1, 2, 2)


def test_the_first_late_row_is_reported_at_once_and_the_rest_in_summaries(
    log: Log, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(log, clocks)
    source.tick()
    source.push(rows(NOON - HOUR))
    (first,) = warnings(caplog)
    assert "source tap: 1 late row was rejected and written to the dead letters" in first
    assert "ts=2026-03-01T11:00:00+00:00" in first
    assert "closed up to 2026-03-01T11:59:59.500000+00:00" in first
    for _ in range(100):
        clocks.passes(WIDTH)
        source.push(rows(NOON - HOUR, NOON - HOUR))
        source.tick()
    assert len(warnings(caplog)) == 1
    clocks.passes(MIN)
    source.tick()
    assert "200 late rows were rejected" in warnings(caplog)[1]
    assert "(201 so far)" in warnings(caplog)[1]


def test_restamped_rows_are_counted_and_reported(
    log: Log, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(log, clocks, late="restamp")
    source.tick()
    source.push(rows(NOON - HOUR, NOON + HOUR))
    clocks.passes(2 * S)
    source.tick()
    assert logged(log) == [NOON - WIDTH, NOON]  # the open bucket, and now
    status = source.status()
    assert (status["late_rows"], status["future_rows"], status["restamped_rows"]) == (1, 1, 2)
    assert status["dead_letter_rows"] == source.dead_letters().num_rows == 0
    assert "given a new time (late='restamp')" in warnings(caplog)[0]


def test_live_rows_pushed_shortly_after_their_stamp_are_not_late(log: Log, clocks: Clocks) -> None:
    """The default grace: a bucket may end between the stamp and the push."""
    source = make(log, clocks)
    source.tick()
    for _ in range(20):
        stamp = clocks.wall + WIDTH - 1
        clocks.passes(WIDTH + 100_000)
        source.tick()
        source.push(rows(stamp))
        clocks.passes(WIDTH - 100_000)
    assert source.status()["late_rows"] == 0
    assert source.status()["rows"] == 20


@pytest.mark.parametrize("clock", ["wall", "data"])
def test_rows_out_of_order_within_grace_keep_their_times(
    log: Log, clocks: Clocks, clock: str
) -> None:
    source = make(log, clocks, clock=clock, grace="4s")
    source.tick()
    chance = random.Random(1)
    arrivals = sorted(
        (at + chance.randrange(int(3.9 * S)), at) for at in range(NOON, NOON + 50 * S, 50_000)
    )
    for arrives, time in arrivals:
        clocks.passes(max(0, arrives - clocks.wall))
        source.tick()
        source.push(rows(time))
    source.end()
    assert source.status()["late_rows"] == 0
    assert sorted(logged(log)) == list(range(NOON, NOON + 50 * S, 50_000))
    for segment in log.segments("tap", -(2**62), 2**62):
        assert {time.value // WIDTH for time in log.read(segment)["ts"]} == {segment.id.bucket}


def test_rows_without_a_time_become_dead_letters_also_with_restamp(
    log: Log, clocks: Clocks
) -> None:
    source = make(log, clocks, late="restamp")
    source.push({"ts": [None], "n": [7]}, flush=True)
    assert source.dead_letters()["_reason"].to_pylist() == ["null time"]
    assert source.status()["null_time_rows"] == source.status()["dead_letter_rows"] == 1


# -- future rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["wall", "data", "live"])
def test_a_row_in_the_far_future_closes_no_bucket(log: Log, clocks: Clocks, clock: str) -> None:
    source = make(log, clocks, clock=clock)
    source.push(rows(NOON + 1_000 * 365 * DAY, NOON))
    clocks.passes(S)
    source.tick()
    source.push(rows(NOON + S))
    source.tick()
    source.end()
    assert logged(log) == [NOON, NOON + S]
    assert closed_us(log) == NOON + S + WIDTH
    assert source.dead_letters()["_reason"].to_pylist() == ["future"]
    assert source.status()["future_rows"] == 1


def test_rows_within_ahead_are_taken(log: Log, clocks: Clocks) -> None:
    source = make(log, clocks, ahead="1min")
    source.push(rows(NOON + MIN))
    source.push(rows(NOON + MIN + 1))
    assert (source.status()["rows"], source.status()["future_rows"]) == (1, 1)


# -- dead letters are durable -------------------------------------------------------------------


def test_dead_letters_survive_a_restart_and_can_be_read_while_the_source_runs(
    tmp_path: Path, log: Log, clocks: Clocks
) -> None:
    source = make(log, clocks)
    source.tick()
    for n in range(3):
        source.push(rows(NOON - HOUR, n=n), token=str(n), flush=True)
    letters = read_dead_letters(read_only(tmp_path / "tap"), "tap", last=2)
    assert letters is not None and letters["n"].to_pylist() == [1, 2]
    log.close()
    log = Log.open(tmp_path / "tap", "tap", fsync="never", archive=True)
    source = make(log, clocks)
    source.push(rows(NOON - HOUR, n=2), token="2", flush=True)  # the first push got no reply
    assert source.dead_letters()["n"].to_pylist() == [0, 1, 2]
    assert source.status()["late_rows"] == 3
    assert source.dead_letters(last=1)["n"].to_pylist() == [2]


def test_dead_letters_are_durable_before_the_stream_is_open(log: Log, clocks: Clocks) -> None:
    """With clock="data", only rows determine where the stream starts."""
    source = make(log, clocks, clock="data")
    source.push(rows(NOON + DAY), token="1", flush=True)
    assert not source.opened
    assert source.dead_letters().num_rows == 1
    source.push(rows(NOON - DAY), token="2", flush=True)
    assert source.token == "2" and source.status()["rows"] == 1


def test_dead_letters_support_columns_named_like_their_metadata(log: Log, clocks: Clocks) -> None:
    net = Network("net")
    net.source("tap", "reason timestamp, rejected_at string", time="reason")
    source = Source(net.sources[0], log, WIDTH, clock=lambda: clocks.wall)
    source.start(NOON)
    source.push([{"reason": datetime(2020, 1, 1, tzinfo=UTC), "rejected_at": "x"}], flush=True)
    assert source.dead_letters()["rejected_at"].to_pylist() == ["x"]


def test_a_full_disk_loses_no_dead_letter(clocks: Clocks) -> None:
    disk = MemoryDisk(random.Random(1))
    source = make(Log.open("/tap", "tap", fsync="always", disk=disk), clocks)
    source.tick()
    disk.full = True
    source.push(rows(NOON - HOUR, NOON), token="1")
    clocks.passes(2 * S)
    for _ in range(3):
        with pytest.raises(StorageFull):
            source.tick()
    disk.full = False
    source.tick()
    assert source.dead_letters().num_rows == 1
    assert logged(source.log) == [NOON]
    assert source.token == "1"


@pytest.mark.parametrize("archive", [True, False])
def test_without_an_archive_only_the_newest_dead_letters_are_retained(
    tmp_path: Path, clocks: Clocks, archive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "KEPT_BYTES", 10_000)
    log = Log.open(tmp_path / "tap", "tap", fsync="never", archive=archive)
    source = make(log, clocks)
    source.tick()
    for n in range(50):
        source.push(rows(NOON - HOUR, n=n), flush=True)
    numbers = source.dead_letters()["n"].to_pylist()
    size = sum(f.stat().st_size for f in (tmp_path / "tap").rglob("*dead-letters/*.parquet"))
    assert numbers[-1] == 49 and source.status()["late_rows"] == 50
    assert (numbers == list(range(50))) is archive
    assert (size <= 10_000) is not archive


# -- a backlog is not late ----------------------------------------------------------------------


def test_an_old_backlog_keeps_its_times(log: Log, clocks: Clocks) -> None:
    source = make(log, clocks, clock="data")
    yesterday = list(range(NOON - DAY, NOON - DAY + 180 * S, S))
    for number in range(0, 180, 60):  # three batches
        source.tick()
        source.push(rows(*yesterday[number : number + 60]), token=str(number), flush=True)
        clocks.passes(S)
    source.tick()
    assert source.status()["late_rows"] == 0
    assert logged(log) == yesterday[:-2]  # up to the newest row minus grace
    clocks.passes(10 * S)
    source.tick()  # idle: the clock closes the rest
    assert logged(log) == yesterday
    assert closed_us(log) == NOON + 12 * S


def test_a_restart_after_a_pause_puts_the_backlog_into_its_own_buckets(
    tmp_path: Path, log: Log, clocks: Clocks
) -> None:
    source = make(log, clocks, clock="data")
    for _ in range(20):
        clocks.passes(WIDTH)
        source.push(rows(clocks.wall), flush=True)
        source.tick()
    log.close()
    since = clocks.wall
    clocks.passes(50 * S)
    log = Log.open(tmp_path / "tap", "tap", fsync="never")
    source = make(log, clocks, clock="data")
    for _ in range(10):  # 5 s until the first rows arrive
        clocks.passes(WIDTH)
        source.tick()
    backlog = range(since + WIDTH, clocks.wall + 1, WIDTH)
    source.push(rows(*backlog), flush=True)
    source.end()
    assert source.status()["late_rows"] == 0
    per_bucket = Counter(time // WIDTH for time in logged(log))
    assert set(per_bucket.values()) == {1} and len(per_bucket) == 130


# -- a clock that is stepped --------------------------------------------------------------------


def test_a_clock_a_day_ahead_for_one_tick_does_not_stop_the_source(
    log: Log, clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(log, clocks)
    live(source, clocks, 5)
    clocks.wall += DAY
    live(source, clocks, 0.5)
    clocks.wall -= DAY
    live(source, clocks, 10)
    assert 0 <= clocks.wall - closed_us(log) <= S
    status = source.status()
    # The row that was stamped during the step is a future row.
    assert (status["future_rows"], status["late_rows"], status["clock_steps"]) == (1, 0, 2)
    assert any("stepped ahead by 86400.0 s" in text for text in warnings(caplog))


def test_a_clock_stepped_ahead_and_back_does_not_stop_the_source(log: Log, clocks: Clocks) -> None:
    source = make(log, clocks)
    live(source, clocks, 5)
    clocks.wall += 10 * MIN
    live(source, clocks, 6)
    clocks.wall -= 10 * MIN
    live(source, clocks, 6)
    assert 0 <= clocks.wall - closed_us(log) <= S
    assert source.status()["late_rows"] == 0


@pytest.mark.parametrize("ahead_us", [30 * S, HOUR])
def test_a_clock_stepped_ahead_permanently_is_followed(
    log: Log, clocks: Clocks, ahead_us: int
) -> None:
    """As after the suspension of a virtual machine. Until then, only rows beyond `ahead` are
    excluded."""
    source = make(log, clocks)
    live(source, clocks, 5)
    clocks.wall += ahead_us
    live(source, clocks, 30)
    assert 0 <= clocks.wall - closed_us(log) <= S
    status = source.status()
    assert status["late_rows"] == 0
    assert status["future_rows"] == (0 if ahead_us < MIN else 20)


@pytest.mark.parametrize("back_us", [10 * MIN, HOUR])
def test_a_clock_stepped_back_does_not_stop_buckets_from_closing(
    log: Log, clocks: Clocks, back_us: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(log, clocks)
    live(source, clocks, 5)
    clocks.wall -= back_us
    before = closed_us(log)
    for seconds in range(0, 60, 2):
        live(source, clocks, 2)
        assert closed_us(log) - before >= seconds * S // 2
    status = source.status()
    assert status["clock_steps"] == 1 and status["clock_apart_ms"] > 0
    assert status["late_rows"] == status["dead_letter_rows"] == 120
    assert any(f"stepped back by {back_us / S:.1f} s" in text for text in warnings(caplog))
    while source.status()["clock_apart_ms"]:
        clocks.passes(MIN)
        source.tick()
    assert clocks.monotonic <= 5 * S + 2 * back_us + 2 * MIN
    late = source.status()["late_rows"]
    live(source, clocks, 10)
    assert source.status()["late_rows"] == late


def test_a_source_restarted_with_a_clock_behind_the_log_continues_to_close_buckets(
    tmp_path: Path, log: Log, clocks: Clocks
) -> None:
    source = make(log, clocks)
    live(source, clocks, 5)
    log.close()
    clocks.wall -= DAY
    log = Log.open(tmp_path / "tap", "tap", fsync="never")
    source, before = make(log, clocks), closed_us(log)
    live(source, clocks, 10)
    assert closed_us(log) - before >= 4 * S


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"late": "reject"}, "late='reject' is not one of 'dead-letter', 'restamp'"),
        ({"clock": "manual", "grace": "1s"}, "grace='1s' has no effect with clock='manual'"),
        ({"idle": "1s"}, "idle='1s' has no effect with clock='wall'"),
        ({"grace": "soon"}, "grace: 'soon' is not a duration"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        operator(**options)


def test_grace_and_idle_have_defaults_and_can_be_disabled() -> None:
    assert (operator().grace_us, operator(clock="manual").grace_us) == (S // 5, 0)
    assert (operator(clock="data").grace_us, operator(clock="data").idle_us) == (S, 10 * S)
    assert operator(grace="0s").grace_us == 0
    assert operator(clock="data", idle="never").idle_us is None
