"""A log can be read while its owner runs, without side effects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.errors import InputError, LogCorrupted
from holdfast.storage import Counter, Log, digest, read_only
from holdfast.types import SegmentId, Stability

SCHEMA = "ts timestamp, src string, bytes bigint"
Rows = Callable[..., pa.Table]


def fill(log: Log, rows: Rows, buckets: range) -> None:
    log.open_stream("tap", SCHEMA, "ts", 0)
    for bucket in buckets:
        segment = log.write(rows(bucket), SegmentId("tap", 0, bucket), Stability.STABLE)
        log.commit("tap", [segment], bucket, Counter("tap.rows", 5 * (bucket + 1)))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_read_only_access_sees_durable_records_and_changes_nothing(
    tmp_path: Path, rows: Rows
) -> None:
    log = Log.open(tmp_path / "log", "tap", fsync="never")
    fill(log, rows, range(3))
    log.trim("tap", 0)
    before = contents(tmp_path)
    read_log = read_only(tmp_path / "log")
    assert contents(tmp_path) == before
    stream = read_log.state.streams["tap"]
    assert (stream.starts_at, stream.trimmed_upto, stream.complete_upto) == (0, 0, 2)
    assert [digest(read_log.read(segment)) for segment in stream.between(1, 2)] == [
        digest(rows(1)),
        digest(rows(2)),
    ]
    assert (read_log.state.owner, read_log.state.counters) == ("tap", {"tap.rows": 15})
    fill(log, rows, range(3, 5))
    assert stream.complete_upto == 2
    assert read_only(tmp_path / "log").state.streams["tap"].complete_upto == 4
    log.close()


def test_read_only_access_ignores_an_unfinished_append_and_does_not_cut_it(
    tmp_path: Path, rows: Rows
) -> None:
    log = Log.open(tmp_path / "log", "tap", fsync="never")
    fill(log, rows, range(2))
    manifest = tmp_path / "log" / "manifest"
    complete = manifest.read_bytes()
    fill(log, rows, range(2, 3))
    log.close()
    torn = manifest.read_bytes()[: len(complete) + 11]
    manifest.write_bytes(torn)
    assert read_only(tmp_path / "log").state.streams["tap"].complete_upto == 1
    assert manifest.read_bytes() == torn


def test_read_only_access_refuses_missing_logs_and_damaged_segments(
    tmp_path: Path, rows: Rows
) -> None:
    with pytest.raises(InputError, match="expected a log, found no manifest"):
        read_only(tmp_path / "nowhere")
    log = Log.open(tmp_path / "log", "tap", fsync="never")
    fill(log, rows, range(1))
    log.close()
    read_log = read_only(tmp_path / "log")
    (segment,) = read_log.state.streams["tap"].segments
    os.truncate(read_log.absolute(segment), segment.size_bytes - 1)
    with pytest.raises(LogCorrupted):
        read_log.read(segment)
