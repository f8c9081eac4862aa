"""The log of one owner: after any crash it holds exactly the acknowledged records and rows."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import (
    InputError,
    LogCorrupted,
    LogError,
    ProtocolViolation,
    StaleEpoch,
    StorageDenied,
    StorageFull,
    Trimmed,
)
from holdfast.storage.log_state import LogState, fold, live_records, rehearse, snapshot
from holdfast.storage.records import (
    Ack,
    Added,
    Boundary,
    Counter,
    DropState,
    Ended,
    Epoch,
    Note,
    Open,
    Record,
    State,
    Tentative,
    Token,
    Trim,
    Undo,
)
from holdfast.storage.store import Log
from holdfast.types import Segment, SegmentId, Stability, StreamInfo

Rows = Callable[..., pa.Table]
STABLE = Stability.STABLE
SCHEMA = "ts timestamp, src string, bytes bigint"


def past(bucket: int) -> Callable[[StreamInfo], bool]:
    return lambda info: info.complete_upto > bucket or info.ended


def start(root: Path, **options: object) -> Log:
    log = Log.open(root, "a", fsync="always", **options)  # type: ignore[arg-type]
    log.open_stream("tap", SCHEMA, "ts", 0)
    return log


def put(log: Log, rows: Rows, bucket: int, *extra: Record, count: int = 5) -> Segment:
    segment = log.write(rows(bucket, count), SegmentId("tap", 0, bucket), STABLE)
    log.commit("tap", [segment], bucket, *extra)
    return segment


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in (root / "segments").rglob("*") if p.is_file())


def crash(log: Log) -> None:
    """Like the kernel after a kill: descriptors are closed, nothing is written."""
    log._manifest.close()
    assert log._lock is not None
    os.close(log._lock)


def test_committed_buckets_survive_and_are_read_back(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    written = [put(log, rows, bucket, Token("tap", f"offset {bucket}")) for bucket in (0, 3)]
    log.append(Counter("late", 7), Ended("tap"))
    before = log.info("tap")
    crash(log)
    log = start(tmp_path)
    assert log.epoch == before.epoch + 1 == 2
    assert log.info("tap").complete_upto == 3 and log.info("tap").ended
    assert log.segments("tap", 0, 9) == written
    assert log.segments("tap", 1, 3) == written[1:]
    assert log.segments("tap", 1, 2) == []
    assert log.read(written[1]).equals(rows(3))
    assert Path(log.absolute(written[1])).is_file()
    assert (log.token("tap"), log.counter("late"), log.streams()) == ("offset 3", 7, ["tap"])


def test_a_segment_file_without_a_record_is_an_orphan(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    put(log, rows, 0)
    log.write(rows(1), SegmentId("tap", 0, 1), STABLE)
    (tmp_path / "segments/tap/b2.parquet.tmp").write_bytes(b"torn")
    (tmp_path / "manifest.tmp").write_bytes(b"torn")
    assert log.segments("tap", 0, 9) == log.segments("tap", 0, 0)
    crash(log)
    log = start(tmp_path)
    assert files(tmp_path) == [log.segments("tap", 0, 9)[0].path]
    assert not (tmp_path / "manifest.tmp").exists()
    assert len(log.orphans) == 3


def test_a_crash_during_a_commit_leaves_no_part_of_it(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    put(log, rows, 0)
    good = (tmp_path / "manifest").stat().st_size
    pair = [log.write(rows(1), SegmentId("tap", part, 1), STABLE) for part in (0, 1)]
    log.commit("tap", pair, 1, Token("tap", "t"))
    crash(log)
    data = (tmp_path / "manifest").read_bytes()
    for length in range(good, len(data), 7):
        (tmp_path / "manifest").write_bytes(data[:length])
        for segment in pair:  # opening deletes them as orphans
            (tmp_path / segment.path).touch()
        log = start(tmp_path)
        assert log.info("tap").complete_upto == 0
        assert len(log.segments("tap", 0, 9)) == 1 and log.token("tap") is None
        assert log.cut_bytes == length - good
        crash(log)


def test_a_stable_bucket_cannot_be_logged_twice(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    put(log, rows, 5)
    size = (tmp_path / "manifest").stat().st_size
    duplicate = log.write(rows(5), SegmentId("tap", 0, 5), STABLE)
    other = log.write(rows(6), SegmentId("tap", 0, 6), STABLE)
    for attempt in (
        lambda: log.commit("tap", [duplicate], 6),
        lambda: log.commit("tap", [other, other], 6),
        lambda: log.commit("tap", [], 4),
        lambda: log.append(Boundary("tap", 4)),
        lambda: log.append(Boundary("nowhere", 4)),
        lambda: log.append(Trim("tap", 6)),
        lambda: log.append(Ended("tap"), Boundary("tap", 9)),
        lambda: log.commit("nowhere", [other], 6),
    ):
        with pytest.raises(ProtocolViolation):
            attempt()
    assert (tmp_path / "manifest").stat().st_size == size, "refused before anything was written"
    log.commit("tap", [other], 6)
    assert [s.id.bucket for s in log.segments("tap", 0, 9)] == [5, 6]


def test_a_stream_keeps_its_schema(tmp_path: Path) -> None:
    log = start(tmp_path)
    assert log.open_stream("tap", SCHEMA, "ts", 99).starts_at == 0
    with pytest.raises(InputError, match=r"logged as 'ts timestamp.*declared as 'ts date'"):
        log.open_stream("tap", "ts date", "ts", 0)
    with pytest.raises(InputError, match="no stream 'nowhere'; it has"):
        log.info("nowhere")
    log.open_stream("odd/../name=é", SCHEMA, "ts", 0)
    assert log.streams() == ["tap", "odd/../name=é"]
    with pytest.raises(InputError, match="cannot be the name"):
        log.open_stream("..", SCHEMA, "ts", 0)


def test_a_folder_cannot_be_opened_by_two_live_instances(tmp_path: Path) -> None:
    log = start(tmp_path)
    with pytest.raises(StorageDenied, match=f"process {os.getpid()};"):
        Log.open(tmp_path, "a", fsync="never")
    log.close()
    log.close()
    with pytest.raises(InputError, match="expected the log of 'b', found the log of 'a'"):
        Log.open(tmp_path, "b", fsync="never")
    assert start(tmp_path).epoch == 2
    with pytest.raises(LogError, match="closed"):
        log.append(Note("a zombie"))


def test_a_killed_process_releases_the_lock_of_its_folder(tmp_path: Path) -> None:
    script = (
        "import os, sys; from holdfast.storage.store import Log; "
        "log = Log.open(sys.argv[1], 'a', fsync='always'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    assert start(tmp_path).epoch == 2


def test_missing_or_truncated_files_are_detected_at_open(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    path = tmp_path / put(log, rows, 0).path
    log.close()
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(LogCorrupted, match=r"expected .* bytes, found"):
        start(tmp_path)
    path.unlink()
    with pytest.raises(LogCorrupted, match="missing"):
        start(tmp_path)
    path.write_bytes(data)
    (tmp_path / "manifest").unlink()
    with pytest.raises(LogCorrupted, match="missing or empty, but 1 segment files"):
        start(tmp_path)
    assert path.exists(), "without a manifest nothing is deleted"


def test_a_damaged_segment_is_detected_at_read(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    segment = put(log, rows, 0, count=500)
    data = bytearray((tmp_path / segment.path).read_bytes())
    data[len(data) // 3] ^= 4
    (tmp_path / segment.path).write_bytes(data)
    with pytest.raises(LogCorrupted, match="restore the folder of this log"):
        log.read(segment)


# Acknowledging and trimming


def test_only_buckets_that_all_consumers_released_are_trimmed(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    written = [put(log, rows, bucket) for bucket in range(6)]
    assert log.trimmable("tap") == -1
    log.acknowledge("tap", "r1", 5, 4, 1)
    log.acknowledge("tap", "r2", 5, 2, 1)
    assert log.trimmable("tap") == 2
    log.trim("tap", log.trimmable("tap"))
    assert log.info("tap").trimmed_upto == 2
    assert files(tmp_path) == [segment.path for segment in written[3:]]
    assert log.segments("tap", 3, 9) == written[3:]
    with pytest.raises(Trimmed, match=r"the buckets before 3 were .*; read from bucket 3 on"):
        log.segments("tap", 2, 9)
    with pytest.raises(Trimmed):
        log.read(written[0])
    crash(log)
    assert start(tmp_path).trimmable("tap") == 2


def test_a_consumer_ahead_of_a_slow_replica_trims_only_complete_buckets(
    tmp_path: Path, rows: Rows
) -> None:
    log = start(tmp_path)
    put(log, rows, 0)
    log.acknowledge("tap", "r", 9, 9, 1)
    assert log.trimmable("tap") == 0
    log.trim("tap", 9)
    assert log.info("tap").trimmed_upto == 0
    put(log, rows, 1)
    assert log.trimmable("tap") == 1


def test_files_are_deleted_only_after_the_trim_record(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    segment = put(log, rows, 0)
    os.close(log._manifest._file._fd)  # type: ignore[attr-defined]
    with pytest.raises(LogError):
        log.trim("tap", 0)
    assert files(tmp_path) == [segment.path], "without a record the file remains"
    log._manifest._file._fd = -1  # type: ignore[attr-defined]
    crash(log)
    log = start(tmp_path)
    assert log.segments("tap", 0, 0) == [segment]
    log.append(Trim("tap", 0))
    crash(log)  # between record and deletion
    log = start(tmp_path)
    assert files(tmp_path) == [] and log.orphans == [segment.path]


def test_an_archive_is_never_trimmed(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path, archive=True)
    segment = put(log, rows, 0)
    log.acknowledge("tap", "r", 0, 0, 1)
    log.trim("tap", 0)
    assert log.segments("tap", 0, 0) == [segment] and files(tmp_path) == [segment.path]


def test_a_replaced_consumer_is_refused_also_after_a_crash_of_the_log_owner(
    tmp_path: Path, rows: Rows
) -> None:
    log = start(tmp_path)
    put(log, rows, 5)
    log.acknowledge("tap", "r", 4, 3, 1)
    log.acknowledge("tap", "r", 2, 1, 1)
    assert log.trimmable("tap") == 3, "positions do not go back"
    log.acknowledge("tap", "r", 1, 0, 2)
    assert log.trimmable("tap") == 0, "a new instance may need more"
    for _ in range(2):
        with pytest.raises(StaleEpoch, match="epoch 1 was replaced by epoch 2"):
            log.acknowledge("tap", "r", 5, 5, 1)
        crash(log)
        log = start(tmp_path)


def test_acknowledgements_wait_for_the_next_append(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    log.acknowledge("tap", "r", 0, 0, 1)
    size = (tmp_path / "manifest").stat().st_size
    log.acknowledge("tap", "r", 4, 4, 1)
    assert (tmp_path / "manifest").stat().st_size == size
    put(log, rows, 5)
    crash(log)
    log = start(tmp_path)
    assert log.trimmable("tap") == 4
    log.acknowledge("tap", "r", 5, 5, 1)
    log.close()
    assert start(tmp_path).trimmable("tap") == 5


# Waiting


def test_wait_returns_on_a_new_bucket_the_end_close_or_timeout(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    assert log.wait("tap", past(-1), 0.01).complete_upto == -1
    for act, after in (
        (lambda: put(log, rows, 0), -1),
        (lambda: log.append(Ended("tap")), 0),
    ):
        thread = threading.Timer(0.05, act)
        thread.start()
        assert log.wait("tap", past(after), 10).complete_upto == 0
        thread.join()
    assert log.wait("tap", past(7), 10).ended
    log.open_stream("other", SCHEMA, "ts", 0)
    threading.Timer(0.05, log.close).start()
    began = time.monotonic()
    assert log.wait("other", past(0), 10).complete_upto == -1
    assert time.monotonic() - began < 5


def test_concurrent_appends_of_many_threads_are_all_durable(tmp_path: Path, rows: Rows) -> None:
    log = Log.open(tmp_path, "a", fsync="never")
    names = [f"s{number}" for number in range(4)]
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            log.open_stream(name, SCHEMA, "ts", 0)
            for bucket in range(30):
                segment = log.write(rows(bucket), SegmentId(name, 0, bucket), STABLE)
                log.commit(name, [segment], bucket)
                log.acknowledge(name, "r", bucket, bucket - 3, 1)
                log.trim(name, log.trimmable(name))
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    state = log._state
    log.close()
    log = Log.open(tmp_path, "a", fsync="never")
    assert log._state.streams == state.streams
    assert [log.info(name).complete_upto for name in names] == [29] * 4
    assert len(files(tmp_path)) == 4 * 3


# Storage that fails


def test_a_full_disk_loses_no_acknowledged_rows(tiny_disk: Path, rows: Rows) -> None:
    root = tiny_disk / "log"
    log = start(root)
    done = 0
    with pytest.raises(StorageFull):
        while True:
            put(log, rows, done, count=100)
            done += 1
    assert done > 3 and log.info("tap").complete_upto == done - 1
    crash(log)
    subprocess.run(["mount", "-o", "remount,size=1m", str(tiny_disk)], check=True)
    log = start(root)
    assert log.info("tap").complete_upto == done - 1
    for segment in log.segments("tap", 0, done):
        assert log.read(segment).equals(rows(segment.id.bucket, 100))
    put(log, rows, done)
    log.close()


def test_a_log_continues_after_space_is_freed(tiny_disk: Path, rows: Rows) -> None:
    log = start(tiny_disk / "log")
    put(log, rows, 0)
    filler = tiny_disk / "filler"
    with pytest.raises(OSError), filler.open("wb") as file:
        file.write(bytes(1 << 20))
    with pytest.raises(StorageFull):
        put(log, rows, 1, count=2_000)
    filler.unlink()
    put(log, rows, 1, count=100)
    assert log.read(log.segments("tap", 1, 1)[0]).equals(rows(1, 100))
    log.close()


def test_a_commit_whose_record_did_not_fit_can_be_repeated_unchanged(
    tiny_disk: Path, rows: Rows
) -> None:
    log = start(tiny_disk / "log")
    segment = log.write(rows(0), SegmentId("tap", 0, 0), STABLE)
    filler = tiny_disk / "filler"
    with pytest.raises(OSError), filler.open("wb") as file:
        file.write(bytes(1 << 20))
    big = Token("tap", "t" * 10_000)
    with pytest.raises(StorageFull):
        log.commit("tap", [segment], 0, big)
    assert log.info("tap").complete_upto == -1 and log.segments("tap", 0, 0) == []
    filler.unlink()
    log.commit("tap", [segment], 0, big)
    crash(log)
    log = start(tiny_disk / "log")
    assert log.read(log.segments("tap", 0, 0)[0]).equals(rows(0))
    log.close()


def test_read_only_storage_is_reported_as_denied(tiny_disk: Path, rows: Rows) -> None:
    log = start(tiny_disk / "log")
    put(log, rows, 0)
    log.close()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(StorageDenied, match="Read-only file system"):
        start(tiny_disk / "log")
    with pytest.raises(StorageDenied, match="Read-only file system"):
        start(tiny_disk / "another")


def test_a_log_folder_below_a_file_is_denied(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageDenied, match="file: File exists"):
        start(tmp_path / "file" / "log")
    with pytest.raises(StorageDenied):
        start(tmp_path / "file")


# State versions, the fold and compaction


def test_state_versions_survive_until_they_are_dropped(tmp_path: Path) -> None:
    log = start(tmp_path)
    (tmp_path / "state/v1").mkdir()
    (tmp_path / "state/v1/part-0.parquet").write_bytes(b"rows")
    log.save_state("top", 3, {"files": ("state/v1",), 1: 2}, ["state/v1"])
    (tmp_path / "state/v2").write_bytes(b"rows")
    log.save_state("top", 5, {"files": ["state/v2"]}, ["state/v2"])
    first = (3, {"files": ["state/v1"], "1": 2})
    assert log.states("top") == [first, (5, {"files": ["state/v2"]})]
    log.drop_states("top", 5)
    crash(log)
    log = start(tmp_path)
    assert log.states("top") == [(5, {"files": ["state/v2"]})]
    assert (tmp_path / "state/v1/part-0.parquet").exists(), "only the engine deletes state files"
    with pytest.raises(LogError, match="v3"):
        log.save_state("top", 6, {}, ["state/v3"])
    assert len(log.states("top")) == 1, "no record for a state version without files"


def test_a_compacted_manifest_folds_to_the_same_state(tmp_path: Path, rows: Rows) -> None:
    log = Log.open(tmp_path, "a", fsync="never")
    log.open_stream("tap", SCHEMA, "ts", 0)
    segment = put(log, rows, 0)
    sizes = []
    for value in range(2_500):
        log.append(Counter("late", value))
        sizes.append((tmp_path / "manifest").stat().st_size)
    shrunk = sum(after < before for before, after in itertools.pairwise(sizes))
    assert shrunk == 2
    state = log._state
    crash(log)
    log = Log.open(tmp_path, "a", fsync="never")
    assert (log.counter("late"), log.segments("tap", 0, 0)) == (2_499, [segment])
    state.epoch += 1
    assert log._state == state


def test_large_obsolete_state_versions_do_not_fill_the_manifest(tmp_path: Path) -> None:
    """A version may name thousands of files, and only the newest one counts."""
    log = Log.open(tmp_path, "a", fsync="never")
    log.open_stream("tap", SCHEMA, "ts", 0)
    body, sizes = {"files": [f"shard-{number}" for number in range(5_000)]}, []
    for bucket in range(200):
        log.save_state("top", bucket, body, [])
        log.drop_states("top", bucket)
        sizes.append((tmp_path / "manifest").stat().st_size)
    assert max(sizes) < 15 * sizes[0]
    assert sum(after < before for before, after in itertools.pairwise(sizes)) < 40, "not too often"
    crash(log)
    log = Log.open(tmp_path, "a", fsync="never")
    assert log.states("top") == [(199, body)]


def test_a_failed_compaction_does_not_fail_the_append(tmp_path: Path) -> None:
    log = Log.open(tmp_path, "a", fsync="never")
    (tmp_path / "manifest.tmp").mkdir()  # prevents the creation of the new file
    for value in range(1_500):
        log.append(Counter("late", value))
    grown = (tmp_path / "manifest").stat().st_size
    (tmp_path / "manifest.tmp").rmdir()
    for value in range(1_500, 2_500):
        log.append(Counter("late", value))
    assert (tmp_path / "manifest").stat().st_size < grown, "compaction is retried later"
    crash(log)
    assert Log.open(tmp_path, "a", fsync="never").counter("late") == 2_499


streams = st.sampled_from(["x", "y"])
numbers = st.integers(-3, 12)
stories = st.lists(
    st.one_of(
        st.builds(Open, streams, st.just("ts timestamp"), st.just("ts"), numbers),
        st.builds(Boundary, streams, numbers),
        st.builds(Ended, streams),
        st.builds(Trim, streams, numbers),
        st.builds(Ack, st.sampled_from("pq"), streams, numbers, numbers, st.integers(1, 3)),
        st.builds(Token, streams, st.text(max_size=3)),
        st.builds(Counter, st.sampled_from("mn"), numbers),
        st.builds(State, streams, numbers, st.just({"k": 1})),
        st.builds(DropState, streams, numbers),
        st.builds(Tentative, streams, numbers, numbers, st.just(("far",))),
        st.builds(Undo, streams, numbers, st.integers(1, 3)),
        st.tuples(streams, numbers, st.integers(0, 1), st.sampled_from(Stability)),
    ),
    max_size=40,
)


def legal(story: list[object]) -> tuple[LogState, list[Record]]:
    """The state after folding the legal ones among the records, and all records."""
    state, records = LogState(), []
    fold(state, Epoch(1, "a"))
    for item in story:
        if isinstance(item, tuple):
            name, bucket, part, stability = item
            identity = SegmentId(name, 0, bucket, 0, part)
            item = Added(Segment(identity, stability, str(identity), 1, "", 0, 1, 1))
        records.append(item)
        try:
            rehearse(state, [item])  # type: ignore[list-item]
        except ProtocolViolation:
            continue
        fold(state, item)  # type: ignore[arg-type]
    return state, records  # type: ignore[return-value]


@settings(deadline=None)
@given(stories, stories)
def test_rehearse_refuses_the_same_records_as_fold_and_changes_nothing(
    past: list[object], frame: list[object]
) -> None:
    state, _ = legal(past)
    _, records = legal(frame)
    for upto in range(1, len(records) + 1):
        before, folded = copy.deepcopy(state), copy.deepcopy(state)
        refusals = []
        for attempt in (
            lambda: rehearse(state, records[:upto]),  # noqa: B023
            lambda: [fold(folded, record) for record in records[:upto]],  # noqa: B023
        ):
            try:
                attempt()
            except ProtocolViolation as err:
                refusals.append(str(err))
        assert len(refusals) in (0, 2) and len(set(refusals)) <= 1
        assert state == before


@settings(deadline=None)
@given(stories)
def test_the_snapshot_of_any_record_sequence_folds_to_the_same_state(story: list[object]) -> None:
    state, _ = legal(story)
    rebuilt = LogState()
    for record in snapshot(state):
        fold(rebuilt, record)
    assert rebuilt == state
    assert abs(live_records(state) - len(snapshot(state))) <= 2 * len(state.streams)
    for stream in state.streams.values():
        assert stream.starts_at - 1 <= stream.trimmed_upto <= stream.complete_upto
        buckets = [segment.id.bucket for segment in stream.segments]
        assert buckets == sorted(buckets)
        assert all(bucket > stream.trimmed_upto for bucket in buckets)
        given = [stream.complete_upto]
        for span in stream.spans:
            assert given[-1] < span.since <= span.upto, "spans rise and start above the boundary"
            given.append(span.upto)


def test_a_stream_that_starts_with_a_gap_records_the_gap_when_it_is_opened(tmp_path: Path) -> None:
    """One append: a crash between two appends would turn the gap into empty buckets."""
    log = Log.open(tmp_path, "owner", fsync="never")
    info = log.open_stream("s", "ts timestamp", "ts", 3, gone_upto=7)
    assert (info.starts_at, info.complete_upto, info.trimmed_upto) == (3, 7, 7)
    with pytest.raises(Trimmed):
        log.segments("s", 5, 8)
    info = log.open_stream("s", "ts timestamp", "ts", 3, gone_upto=5)
    assert (info.complete_upto, info.trimmed_upto) == (7, 7)
    info = log.open_stream("s", "ts timestamp", "ts", 3, gone_upto=9)  # an older copy of the log
    assert (info.complete_upto, info.trimmed_upto) == (9, 9)
    log.close()
