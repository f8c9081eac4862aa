"""Rows of any age keep their times from a readStream to the results."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import holdfast as hf
from holdfast.clock import now_us
from holdfast.engine.session import Sessions
from holdfast.verify.audit import audit

S, DAY = 1_000_000, 86_400 * 1_000_000
TIME = pa.timestamp("us", tz="UTC")
PER_SECOND = 20


class Arriving:
    """A folder of Parquet files that Spark reads one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._files = 0

    def __call__(self, spark: Any) -> Any:
        read = spark.readStream.schema("ts timestamp, n long").option("maxFilesPerTrigger", 1)
        return read.parquet(str(self.folder))

    def add(self, from_us: int, seconds: int) -> None:
        times = [from_us + at * S // PER_SECOND for at in range(seconds * PER_SECOND)]
        self._files += 1
        path = self.folder / f"{self._files}.parquet"
        pq.write_table(pa.table({"ts": pa.array(times, TIME), "n": list(range(len(times)))}), path)
        os.utime(path, (self._files, self._files))  # Spark reads the oldest file first


def network(feed: Callable[[Any], Any], idle: str) -> hf.Network:
    net = hf.Network("backlog", bucket="500ms")
    rows = net.source("tap", "ts timestamp, n long", time="ts", feed=hf.ReadStream(feed), idle=idle)
    net.output("windows", rows.window("10s").agg(rows=hf.count()))
    return net


def windows(run: hf.Run, number: int) -> Counter[int]:
    """Number of rows of each window, by start, until `number` windows have arrived."""
    counts: Counter[int] = Counter()
    client = run.client("windows")
    for table, _ in client:
        run.raise_failure()
        for start, rows in zip(table["window_start"], table["rows"].to_pylist(), strict=True):
            counts[start.value] += rows
        if len(counts) >= number:
            client.close()
    return counts


def test_three_minutes_of_rows_from_yesterday_fill_eighteen_windows(
    tmp_path: Path, sessions: Sessions
) -> None:
    since = (now_us() - DAY) // (10 * S) * 10 * S
    arriving = Arriving(tmp_path / "in")
    for minute in range(3):
        arriving.add(since + 60 * minute * S, 60)
    net = network(arriving, idle="3s")
    with hf.run(net, storage=str(tmp_path / "data")) as run:
        counts = windows(run, 18)
        source = run.status()["sources"]["tap"]
    assert counts == {since + 10 * at * S: 10 * PER_SECOND for at in range(18)}
    assert (source["rows"], source["late_rows"]) == (180 * PER_SECOND, 0)
    report = audit(net, str(tmp_path / "data"), sessions.large)
    assert report.headline == "ok", report.text()


def test_after_a_restart_the_backlog_fills_its_own_windows(
    tmp_path: Path, sessions: Sessions
) -> None:
    since = (now_us() - 90 * S) // (10 * S) * 10 * S
    arriving = Arriving(tmp_path / "in")
    arriving.add(since, 30)
    net = network(arriving, idle="10s")
    with hf.run(net, storage=str(tmp_path / "data")) as run:
        first = windows(run, 2)
    arriving.add(since + 30 * S, 50)  # while the run is stopped
    with hf.run(net, storage=str(tmp_path / "data")) as run:
        rest = windows(run, 6)
        assert run.status()["sources"]["tap"]["late_rows"] == 0
    assert first + rest == {since + 10 * at * S: 10 * PER_SECOND for at in range(8)}


def test_late_rows_are_reported_by_status_metrics_and_audit(
    tmp_path: Path, sessions: Sessions
) -> None:
    since = (now_us() - DAY) // (10 * S) * 10 * S
    arriving = Arriving(tmp_path / "in")
    arriving.add(since + 10 * S, 30)
    arriving.add(since - 20 * S, 10)  # rows of windows that the first file has closed
    net = network(arriving, idle="3s")
    with hf.run(net, storage=str(tmp_path / "data")) as run:
        windows(run, 3)
        late = 10 * PER_SECOND
        assert run.status()["sources"]["tap"]["late_rows"] == late
        sample_of = run.metrics.registry.get_sample_value
        assert sample_of("holdfast_source_late_rows_total", {"source": "tap"}) == late
        dead_letters = run.source("tap").dead_letters()
        assert Counter(dead_letters["_reason"].to_pylist()) == {"late": late}
        assert min(time.value for time in dead_letters["ts"]) == since - 20 * S
    report = audit(net, str(tmp_path / "data"), sessions.large)
    assert report.ok
    assert report.headline.startswith(f"ok; source tap: {late} rows ({late} late) were moved to")
