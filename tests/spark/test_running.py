"""Complete runs in one process: fragments, restarts, feeds and missing inputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.engine.session import Sessions
from holdfast.errors import InputError, NodeFailed, NotDeterministic
from holdfast.storage.rows import digest

WIDTH_US = 100_000
LIMIT_S = 60.0


def rows(bucket: int) -> dict[str, Any]:
    rng = np.random.default_rng(bucket)
    times = rng.integers(bucket * WIDTH_US, (bucket + 1) * WIDTH_US, 20)
    return {"ts": times, "key": np.char.add("k", rng.integers(0, 4, 20).astype(str)),
            "x": rng.random(20)}  # fmt: skip


def network(*, cut: bool = False) -> hf.Network:
    net = hf.Network("small", bucket="100ms")
    source = net.source("s", "ts timestamp, key string, x double", time="ts", clock="manual")
    sums = source.filter("x > 0.1").window("300ms").group_by("key").agg(x=hf.sum("x"))
    if cut:
        sums = sums.on("second")
    net.output("pairs", sums.count_window(2, by="key").agg(x=hf.sum("x")))
    return net


def push(run: hf.Run, lo: int, hi: int) -> None:
    for bucket in range(lo, hi):
        run.source("s").push(rows(bucket))
        run.source("s").advance((bucket + 1) * WIDTH_US)


def read_all(client: Any) -> tuple[int, str]:
    tables = [table for table, _ in client]
    table = pa.concat_tables(tables)
    return table.num_rows, digest(table)


def wait_for(test: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def expected(sessions: Sessions) -> tuple[int, str]:
    with hf.run(network()) as run:
        push(run, 0, 12)
        run.source("s").end()
        return read_all(run.client("pairs"))


def test_a_network_divided_into_fragments_gives_the_same_bits(expected: tuple[int, str]) -> None:
    with hf.run(network(cut=True)) as run:
        assert sorted(run.nodes) == ["main", "second"]
        push(run, 0, 12)
        run.source("s").end()
        assert read_all(run.client("pairs")) == expected


def test_a_stopped_run_continues_after_a_restart(
    expected: tuple[int, str], tmp_path: Path, sessions: Sessions
) -> None:
    options = hf.Options(checkpoint_buckets=2)
    tables: list[pa.Table] = []

    def take(table: pa.Table, info: Any) -> None:
        tables.append(table)

    for lo, hi in ((0, 5), (5, 6), (6, 12)):
        with hf.run(network(), storage=str(tmp_path), options=options) as run:
            push(run, lo, hi)
            client = run.client("pairs")
            if hi == 12:
                run.source("s").end()
                client.foreach_bucket(take)
            else:
                consumer = threading.Thread(target=client.foreach_bucket, args=(take,))
                consumer.start()
                wait_for(lambda client=client, hi=hi: (client.position or -1) >= hi - 1)
                client.close()
                consumer.join()
            assert run.nodes["main"].log.epoch >= 1
    table = pa.concat_tables(tables)
    assert (table.num_rows, digest(table)) == expected


def test_rows_pushed_before_a_clean_stop_are_present_in_the_next_run(
    tmp_path: Path, sessions: Sessions
) -> None:
    """The bucket of the rows is still open when the `with` block ends."""
    net, data = network(), rows(0)
    with hf.run(net, storage=str(tmp_path)) as run:
        assert [run.client("pairs").name, run.client("pairs", name="bob").name] == [
            "client-pairs", "client-pairs+bob"
        ]  # fmt: skip
        run.source("s").push(data)
        stopped_source = run.source("s")
    assert repr(run).endswith("stopped; start another one with hf.run(...) on the same storage>")
    assert run.status()["state"] == "stopped"
    for call in (
        lambda: run.source("s"), lambda: run.client("pairs"),
        lambda: stopped_source.push(data), stopped_source.flush,
    ):  # fmt: skip
        with pytest.raises(InputError, match="the run was stopped"):
            call()
    for restart in (run.start, run.__enter__):
        with pytest.raises(InputError, match=r"this run is stopped: call hf\.run"):
            restart()
    run.stop()  # a second call has no effect
    with hf.run(network(), storage=str(tmp_path)) as run:
        assert run.status()["state"] == "running"
        run.source("s").advance(WIDTH_US)
        source = run.source("s")
        segments = source.log.segments("s", 0, 0)
        assert sum(segment.rows for segment in segments) == len(data["ts"])
        with pytest.raises(InputError, match="started only once; this run is running"):
            run.start()
        assert run.status()["state"] == "running"


def test_nondeterministic_code_is_detected_after_a_restart(
    tmp_path: Path, sessions: Sessions
) -> None:
    factor = tmp_path / "factor"  # not part of the code, so that the identity does not change

    def make(value: int) -> hf.Network:
        factor.write_text(str(value))
        net = hf.Network("fickle", bucket="100ms")
        source = net.source("s", "ts timestamp, key string, x double", time="ts", clock="manual")
        scaled = source.apply(lambda df: df.selectExpr("ts", f"x * {factor.read_text()} as x"))
        net.output("out", scaled)
        return net

    options = hf.Options(checkpoint_buckets=0)
    storage = str(tmp_path / "storage")
    with hf.run(make(1), storage=storage, options=options) as run:
        push(run, 0, 3)
        wait_for(lambda: run.nodes["main"].performer.core.paths["out"].position == 2)
    with hf.run(make(2), storage=storage, options=options) as run:
        wait_for(run.nodes["main"].ended.is_set)
        with pytest.raises(NodeFailed, match="differs from the logged result") as raised:
            run.raise_failure()
        assert isinstance(raised.value.__cause__, NotDeterministic)


def test_a_missing_input_delays_only_the_outputs_that_depend_on_it(sessions: Sessions) -> None:
    net = hf.Network("two", bucket="100ms")
    present, missing = (
        net.source(name, "ts timestamp, key string, x double", time="ts", clock="manual")
        for name in ("here", "gone")
    )
    net.output("alone", present.filter("x > 0"))
    net.output("together", net.union(present, missing).filter("x > 0"))
    with hf.run(net) as run:
        run.source("gone").start(0)
        for bucket in range(3):
            run.source("here").push(rows(bucket))
            run.source("here").advance((bucket + 1) * WIDTH_US)
        paths = run.nodes["main"].performer.core.paths
        wait_for(lambda: paths["alone"].position == 2)
        wait_for(lambda: paths["together"].position == -1)
        assert run.nodes["main"].status()["paths"]["together"]["waiting_for"] == ["gone"]


def test_logs_are_trimmed_as_clients_acknowledge(sessions: Sessions) -> None:
    net = hf.Network("trim", bucket="100ms")
    source = net.source("s", "ts timestamp, key string, x double", time="ts", clock="manual")
    net.output("out", source.filter("x > 0"))
    options = hf.Options(archive=False, checkpoint_buckets=2)
    with hf.run(net, options=options) as run:
        run.service.trim_buckets = 1
        client = run.client("out")
        consumer = threading.Thread(target=client.foreach_bucket, args=(lambda table, info: None,))
        consumer.start()
        for bucket in range(10):
            push(run, bucket, bucket + 1)
            wait_for(lambda bucket=bucket: client.position == bucket)
        wait_for(lambda: run.source("s").log.info("s").trimmed_upto >= 6)
        wait_for(lambda: run.nodes["main"].log.info("out").trimmed_upto >= 8)
        folder = run.source("s").log.root / "segments"
        assert len(list(folder.rglob("*.parquet"))) <= 4
        client.close()
        consumer.join()


def test_any_read_stream_can_feed_a_source(tmp_path: Path, sessions: Sessions) -> None:
    arriving = tmp_path / "in"
    arriving.mkdir()
    for number in range(3):
        table = pa.table({"user": [f"u{number}"] * 5, "value": list(range(5))})
        pq.write_table(table, arriving / f"{number}.parquet")

    def stream(spark: Any) -> Any:
        read = spark.readStream.schema("user string, value long").option("maxFilesPerTrigger", 1)
        return read.parquet(str(arriving)).selectExpr("current_timestamp() as ts", "user", "value")

    net = hf.Network("fed", bucket="200ms")
    source = net.source(
        "s", "ts timestamp, user string, value long", time="ts", feed=hf.ReadStream(stream)
    )
    net.output("out", source.filter("value > 0"))
    users: list[str] = []
    with hf.run(net) as run:
        for table, _ in run.client("out"):
            users += table["user"].to_pylist()
            run.raise_failure()
            if len(users) == 12:
                break
        assert str(run.source("s").token).endswith("/2")  # query and batch
    assert sorted(users) == sorted(["u0", "u1", "u2"] * 4)
