"""Sources log rows before consumers read them; clients deliver each bucket once. No JVM."""

from __future__ import annotations

import queue
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row

from holdfast.edge.client import Client
from holdfast.edge.feeds import Replay
from holdfast.edge.sinks import ParquetSink
from holdfast.edge.source import Source
from holdfast.errors import InputError, NodeFailed, RowsNotDurable, StorageFull, Trimmed
from holdfast.model.operators import Source as SourceOperator
from holdfast.storage import Log
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess
from holdfast.verify.sim.simulated_disk import MemoryDisk

WIDTH = 1_000
SCHEMA = "ts timestamp, key string, value double"


def make(log: Log, **options: object) -> Source:
    op = SourceOperator(name="s", schema=SCHEMA, time="ts", **{"clock": "manual", **options})
    return Source(op, log, WIDTH)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log.open(tmp_path / "s", "s", fsync="never")


def row(time_us: int, key: str = "a", value: float = 1.0) -> dict[str, object]:
    return {
        "ts": pa.scalar(time_us, pa.timestamp("us", tz="UTC")).as_py(),
        "key": key,
        "value": value,
    }


def logged(log: Log, stream: str = "s") -> dict[int, int]:
    rows_by_bucket: dict[int, int] = {}
    for segment in log.segments(stream, -(2**62), 2**62):
        rows_by_bucket[segment.id.bucket] = (
            rows_by_bucket.get(segment.id.bucket, 0) + log.read(segment).num_rows
        )
    return rows_by_bucket


def test_a_source_takes_rows_of_every_supported_type(log: Log) -> None:
    source = make(log)
    source.start(0)
    at = datetime(1970, 1, 1, tzinfo=UTC)
    source.push([row(1), row(2)])
    source.push({"ts": [at], "key": ["b"], "value": [2.0]})
    source.push(pd.DataFrame({"ts": [at], "key": ["c"], "value": [3.0]}))
    source.push(pa.table({"ts": pa.array([5], pa.int64()), "key": ["d"], "value": [4.0]}))
    source.push([(at, "e", 5.0), [at, "f", 6.0], Row(ts=at, value=7.0, key="g")])
    source.advance(WIDTH)
    assert logged(log) == {0: 8}


def test_an_idle_source_closes_empty_buckets(log: Log) -> None:
    source = make(log)
    source.start(0)
    source.advance(50 * WIDTH)
    assert log.info("s").complete_upto == 49
    assert logged(log) == {}


def test_times_before_1970_have_their_own_buckets(log: Log) -> None:
    source = make(log)
    source.start(-10 * WIDTH)
    source.push([row(-1), row(-WIDTH), row(-WIDTH - 1)])
    source.advance(0)
    assert logged(log) == {-2: 1, -1: 2}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"ts": datetime(2020, 1, 1, tzinfo=UTC), "key": "a"}], "missing column value"),
        ([{**row(0), "extra": 1}], "unknown column extra"),
        ({"ts": ["yesterday"], "key": ["a"], "value": [1.0]}, "cannot convert the rows"),
        ({"ts": [0], "key": ["a"], "value": ["x"]}, "cannot convert the rows"),
        (17, "expected an Arrow table, .* found int"),
        ([(0, "a")], r"tuples of 3 values \(ts, key, value\), found tuple"),
        (["a"], "expected rows as dicts, or as tuples"),
        ([row(0), 5], "found int 5"),
        ([row(0), {"ts": 0, "key": "a"}], "row 1 has no 'value', .* write None"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused_with_the_reason(
    log: Log, rows: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(log).push(rows)


def test_flushed_rows_survive_a_crash_and_the_token_covers_no_unflushed_row(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "s", "s", fsync="never")
    source = make(log)
    source.start(0)
    source.push([row(1), row(2)], token="batch-1", flush=True)
    source.push([row(3)], token="batch-2")
    log.close()  # a crash: rows that were not flushed are lost
    log = Log.open(tmp_path / "s", "s", fsync="never")
    source = make(log)
    assert source.token == "batch-1"
    source.push([row(4)])
    source.advance(WIDTH)
    assert logged(log) == {0: 3}
    assert [s.id.part for s in log.segments("s", 0, 0)] == [0, 1]
    log.close()


def test_stopping_a_run_makes_the_rows_of_open_buckets_durable(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "s", "s", fsync="never")
    source = make(log)
    source.push([row(1), row(2)], token="batch-1")
    source.close()
    log.close()
    log = Log.open(tmp_path / "s", "s", fsync="never")
    source = make(log)
    assert source.token == "batch-1"
    source.advance(WIDTH)
    assert logged(log) == {0: 2}


def test_stopping_a_run_on_a_full_disk_reports_the_number_of_rows_not_durable() -> None:
    disk = MemoryDisk(random.Random(1))
    source = make(Log.open("/s", "s", fsync="always", disk=disk))
    source.start(0)
    source.push([row(1), row(WIDTH), {**row(2), "ts": None}])
    disk.full = True
    with pytest.raises(RowsNotDurable, match=r"source 's': 3 pushed rows .* push them again"):
        source.close()


@pytest.mark.parametrize(
    "act",
    [lambda s: s.push([row(2)]), lambda s: s.flush(), lambda s: s.end(), lambda s: s.advance(5)],
    ids=["push", "flush", "end", "advance"],
)
def test_a_source_of_a_stopped_run_refuses_every_call(
    log: Log, act: Callable[[Source], object]
) -> None:
    source = make(log)
    source.push([row(1)])
    source.close()
    with pytest.raises(InputError, match=r"source 's': the run was stopped; .* hf\.run"):
        act(source)


def test_an_ended_source_takes_no_more_rows(log: Log) -> None:
    source = make(log)
    source.push([row(1)])
    source.end()
    assert log.info("s").ended
    with pytest.raises(InputError, match="has ended"):
        source.push([row(2)])


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_files_are_replayed_bucket_by_bucket(log: Log, tmp_path: Path, kind: str) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    times = [2_500, 100, 900, 7_000]
    table = pa.table(
        {"ts": pa.array(times, pa.timestamp("us", tz="UTC")), "key": list("abcd"),
         "value": [1.0, 2.0, 3.0, 4.0]}
    )  # fmt: skip
    path = str(tmp_path / f"rows.{kind}")
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        table.to_pandas().to_json(
            path, orient="records", lines=True, date_format="iso", date_unit="us"
        )
    source = make(log)
    Replay(path).run(source, threading.Event())
    assert logged(log) == {0: 2, 2: 1, 7: 1}
    assert log.info("s").ended


def test_a_client_delivers_each_bucket_once_and_continues_after_a_restart(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "s", "s", fsync="never")
    source = make(log)
    service = Service(logs={"s": log})
    for bucket in range(4):
        source.push([row(bucket * WIDTH + 1)])
        source.advance((bucket + 1) * WIDTH)

    def connect() -> InProcess:
        return InProcess(service)

    receipts = Log.open(tmp_path / "c", "client-s", fsync="never", archive=True)
    client = Client("s", {"s": connect}, WIDTH, log=receipts)
    seen = []
    for _, info in client:
        seen.append(info.bucket)
        if info.bucket == 1:
            break  # the application crashes while it processes bucket 1
    receipts.close()
    receipts = Log.open(tmp_path / "c", "client-s", fsync="never", archive=True)
    client = Client("s", {"s": connect}, WIDTH, log=receipts)
    source.end()
    client.foreach_bucket(lambda table, info: seen.append(info.bucket))
    # Bucket 1 was not confirmed, so the client delivers it again after the restart.
    assert seen == [0, 1, 1, 2, 3]
    assert logged(receipts) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert receipts.info("s").ended
    receipts.close()
    log.close()


def test_a_client_restored_from_an_older_copy_names_the_ways_to_continue(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "s", "s", fsync="never")
    source = make(log)
    service = Service(logs={"s": log})

    def receive(upto: int) -> list[int]:
        """Read up to a bucket with a client that has stored its position, and confirm it."""
        seen: list[int] = []
        with closing(Log.open(tmp_path / "c", "client-s", fsync="never")) as receipts:
            client = Client("s", {"s": lambda: InProcess(service)}, WIDTH, log=receipts)
            for _, info in client:
                if info.bucket > upto:
                    return seen
                seen.append(info.bucket)
        return seen

    for bucket in range(6):
        source.push([row(bucket * WIDTH + 1)])
        source.advance((bucket + 1) * WIDTH)
    assert receive(1) == [0, 1]
    shutil.copytree(tmp_path / "c", tmp_path / "backup")
    assert receive(4) == [2, 3, 4]
    log.trim("s", 4)
    shutil.rmtree(tmp_path / "c")
    shutil.copytree(tmp_path / "backup", tmp_path / "c")
    with pytest.raises(Trimmed, match=r"continues after bucket 1, .* older copy\. .* delete the f"):
        receive(5)
    shutil.rmtree(tmp_path / "c")
    source.end()
    assert receive(9) == [5]
    log.close()


def test_the_parquet_sink_keeps_one_file_for_a_bucket_that_is_delivered_repeatedly(
    tmp_path: Path,
) -> None:
    from holdfast.edge.client import BucketInfo
    from holdfast.types import Stability

    sink = ParquetSink(str(tmp_path / "table"))
    info = BucketInfo("s", 7, Stability.STABLE, 2, 0, 0)
    for _ in range(3):
        sink(pa.table({"x": [1, 2]}), info)
    files = list((tmp_path / "table").glob("*.parquet"))
    assert len(files) == 1
    assert pa.parquet.read_table(files[0]).num_rows == 2


def test_a_token_becomes_durable_together_with_all_its_rows(log: Log, tmp_path: Path) -> None:
    """Rows of a push may be in a bucket that is still open when the token is written."""
    source = make(log)
    source.push([row(500), row(1_500)], token="1")
    source.advance(WIDTH)
    log.close()
    log = Log.open(tmp_path / "s", "s", fsync="never")
    source = make(log)
    assert source.token == "1"
    source.advance(2 * WIDTH)
    assert logged(log) == {0: 1, 1: 1}


def test_a_push_repeated_with_the_same_token_is_taken_once(log: Log) -> None:
    source = make(log)
    source.push([row(10)], token="1")
    source.push([row(10)], token="1")  # the first push got no reply
    source.advance(WIDTH)
    source.push([row(10)], token="1")  # nor did the second
    source.push([row(1_010)], token="2")
    source.advance(2 * WIDTH)
    assert logged(log) == {0: 1, 1: 1}
    assert source.token == "2"


def test_a_push_repeated_before_the_stream_is_open_adds_no_dead_letter_twice(
    tmp_path: Path,
) -> None:
    for _ in range(2):  # the second time after a restart
        with closing(Log.open(tmp_path, "s", fsync="never")) as log:
            source = make(log)
            source.push({"ts": [None], "key": ["a"], "value": [1.0]}, token="1", flush=True)
            assert not source.opened and source.token == "1"
            assert source.dead_letters().num_rows == 1


def test_a_push_raises_the_failure_of_a_source_without_consumers(log: Log) -> None:
    source = make(log)
    source.push([row(1)])
    source.failure = NodeFailed("no consumer is left")
    for _ in range(2):
        with pytest.raises(NodeFailed, match="is left") as raised:
            source.push([row(2)])
        assert len(raised.traceback) < 10  # a retry does not extend the traceback
    source.failure = None
    source.push([row(3)])
    source.advance(WIDTH)
    assert logged(log) == {0: 2}


@pytest.mark.parametrize("upto", [2, 0, None])
def test_a_client_of_a_failed_output_raises_after_the_last_readable_bucket(
    log: Log, upto: int | None
) -> None:
    """Bucket 2 is complete and has no rows."""
    source, service = make(log), Service(logs={"s": log}, heartbeat_s=60.0)
    source.push([row(1)])
    source.advance(3 * WIDTH)
    client = Client("s", {"s": lambda: InProcess(service)}, WIDTH)
    client.fail(NodeFailed("node 'main' failed"), upto)
    seen: list[int] = []
    for _ in range(2):
        with pytest.raises(NodeFailed, match="node 'main' failed"):
            client.foreach_bucket(lambda table, info: seen.append(info.bucket))
    assert seen == ([] if upto is None else [0])
    assert client.closed


def test_a_client_that_has_caught_up_raises_a_failure_at_once(log: Log) -> None:
    """The client is waiting for a delivery of an idle stream."""
    source, service = make(log), Service(logs={"s": log}, heartbeat_s=0.01)
    source.push([row(1)])
    source.advance(WIDTH)
    client = Client("s", {"s": lambda: InProcess(service)}, WIDTH)
    assert next(client)[1].bucket == 0
    errors: queue.Queue[BaseException] = queue.Queue()

    def read() -> None:
        try:
            next(client)
        except NodeFailed as err:
            errors.put(err)

    threading.Thread(target=read, daemon=True).start()
    client.fail(NodeFailed("node 'main' failed"), 0)
    assert str(errors.get(timeout=10)) == "node 'main' failed"


def test_a_client_that_has_read_an_output_to_its_end_ignores_a_failure(log: Log) -> None:
    source = make(log)
    source.push([row(1)])
    source.end()
    client = Client("s", {"s": lambda: InProcess(Service(logs={"s": log}))}, WIDTH)
    client.fail(NodeFailed("node 'main' failed"), 0)
    assert [info.bucket for _, info in client] == [0]
    assert list(client) == []


def test_a_client_that_waits_for_a_node_that_never_started_raises_its_failure(log: Log) -> None:
    """The stream is not open, so nothing is delivered, not even a heartbeat."""
    service = Service(logs={"s": log}, heartbeat_s=0.01)
    waiting = threading.Event()

    def connect() -> InProcess:
        waiting.set()
        return InProcess(service)

    client = Client("s", {"s": connect}, WIDTH)
    errors: queue.Queue[BaseException] = queue.Queue()

    def read() -> None:
        try:
            list(client)
        except NodeFailed as err:
            errors.put(err)

    threading.Thread(target=read, daemon=True).start()
    assert waiting.wait(10)
    client.fail(NodeFailed("node 'main' failed"), None)
    assert str(errors.get(timeout=10)) == "node 'main' failed"


def test_iterating_again_continues_from_the_same_position(log: Log) -> None:
    """A bucket is delivered again only to a new process or after a function that raised."""
    source = make(log)
    source.push([row(bucket * WIDTH) for bucket in range(6)])
    source.end()
    client = Client("s", {"s": lambda: InProcess(Service(logs={"s": log}))}, WIDTH)
    assert [next(iter(client))[1].bucket, next(client)[1].bucket] == [0, 1]
    for _, info in client:
        if info.bucket == 3:
            break

    def refuse(table: pa.Table, info: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        client.foreach_bucket(refuse)
    assert client.position == 3
    assert [info.bucket for _, info in client] == [4, 5]
    assert list(client) == []
    assert repr(client) == "<Client of output 's', at bucket 5>"


def test_a_source_at_its_buffer_limit_takes_no_rows(log: Log) -> None:
    """docs/availability.md, Retention: memory stays bounded, and no row is dropped."""
    op = SourceOperator(name="s", schema=SCHEMA, time="ts", clock="manual")
    received_upto = -1
    source = Source(op, log, WIDTH, buffer_buckets=3, received=lambda: received_upto)
    source.start(0)
    for bucket in range(3):
        source.push([row(bucket * WIDTH)])
        source.advance((bucket + 1) * WIDTH)
    source.push([row(3 * WIDTH)], token="3")
    with pytest.raises(StorageFull, match="has not received the last 3 closed buckets"):
        source.advance(4 * WIDTH)
    for retry in range(3):
        with pytest.raises(StorageFull, match="accepts no more rows"):
            source.push([row(4 * WIDTH)], token=str(4 + retry))
    source.push([row(3 * WIDTH)], token="3")  # the source already has this row
    received_upto = 0
    source.push([row(4 * WIDTH)], token="4")
    source.advance(4 * WIDTH)
    assert logged(log) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}


def test_a_retired_source_ends_permanently(tmp_path: Path, log: Log) -> None:
    source = make(log)
    source.start(0)
    source.push([row(1)])
    source.advance(WIDTH)
    source.push([row(WIDTH + 1)])
    assert source.retire("sold") == 2, "pushed rows are retained"
    with pytest.raises(InputError, match=r"was retired \(sold\) and accepts no more rows"):
        source.push([row(2 * WIDTH)])
    log.close()
    log = Log.open(tmp_path / "s", "s", fsync="never")
    retired = log.retired("s")
    assert log.info("s").ended and retired is not None and retired.why == "sold"
    assert logged(log) == {0: 1, 1: 1}


def test_iterating_a_closed_client_raises(log: Log) -> None:
    source, service = make(log), Service()
    service.logs["s"] = log
    source.start(0)
    source.push([row(1)])
    source.advance(WIDTH)
    client = Client("s", {"s": lambda: InProcess(service)}, WIDTH)
    seen = []
    for _, info in client:
        seen.append(info.bucket)
        client.close()
    assert seen == [0]
    for iterate in (lambda: list(client), lambda: client.foreach_bucket(lambda *_: None)):
        with pytest.raises(InputError, match=r"client of 's' is closed; .* run\.client\('s'\)"):
            iterate()
