"""Results that are too large for the driver: the step is split, and a single bucket is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import holdfast as hf
from holdfast.engine.engine import Engine
from holdfast.engine.session import JobRows, Sessions
from holdfast.engine.spark_errors import is_too_large
from holdfast.model.fragments import fragments
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import Files

WIDTH_US = 100_000
#: Bytes of a row: random digits, which compression does not shrink much.
ROW_BYTES = 1_000


@pytest.fixture
def one_megabyte(sessions: Sessions) -> Iterator[None]:
    """Spark refuses results of a job above 1 MB; usually the limit is a share of the heap."""
    name = "spark.driver.maxResultSize"
    conf = sessions.small.sparkContext._jsc.sc().conf()
    before = conf.get(name)
    conf.set(name, "1m")
    yield
    conf.set(name, before)


def network() -> hf.Network:
    net = hf.Network("large", bucket="100ms")
    source = net.source("s", "ts timestamp, n long, text string", time="ts", clock="manual")
    net.output("all", source.filter("n >= 0"))
    return net


def push(run: hf.Run, rows_per_bucket: list[int]) -> int:
    """Push all buckets at once, so that many wait together. Returns the number of rows."""
    rng, n = np.random.default_rng(1), 0
    for bucket, rows in enumerate(rows_per_bucket):
        texts = [rng.bytes(ROW_BYTES // 2).hex() for _ in range(rows)]
        times = np.full(rows, bucket * WIDTH_US)
        run.source("s").push({"ts": times, "n": np.arange(n, n + rows), "text": texts})
        n += rows
    run.source("s").advance(len(rows_per_bucket) * WIDTH_US)
    return n


def test_a_backlog_whose_results_do_not_fit_is_computed_in_smaller_steps(
    one_megabyte: None,
) -> None:
    with hf.run(network()) as run:
        expected = push(run, [300] * 30)  # nine times the limit
        run.source("s").end()
        received = [n for rows, _ in run.client("all") for n in rows["n"].to_pylist()]
    assert received == list(range(expected))


def test_a_single_bucket_that_does_not_fit_is_an_error(one_megabyte: None) -> None:
    with (
        pytest.raises(hf.NodeFailed, match=r"do not fit the memory of the driver; .* more memory"),
        hf.run(network()) as run,
    ):
        push(run, [300, 3_000, 300])
        run.source("s").end()
        for _ in run.client("all"):
            pass


def test_new_rows_of_a_join_that_do_not_fit_are_not_sent_to_all_tasks(
    one_megabyte: None, sessions: Sessions, tmp_path: Path
) -> None:
    net = hf.Network("large", bucket="100ms")
    rows = net.source("s", "ts timestamp, n long, text string", time="ts")
    other = net.source("t", "ts timestamp, n long", time="ts")
    joined = rows.join(other, on=["n"], within="100ms").map("ts", "n", first="left(text, 1)")
    net.output("out", joined)
    texts = [np.random.default_rng(n).bytes(ROW_BYTES // 2).hex() for n in range(3_000)]
    times = pa.array(np.zeros(3_000, np.int64), TIMESTAMP)
    few = pa.table({"ts": times[:9], "n": np.arange(9) * 300})
    files = Files(net, {"s": pa.table({"ts": times, "n": np.arange(3_000), "text": texts}),
                        "t": few}, str(tmp_path))  # fmt: skip
    engine = Engine(net, sessions, str(tmp_path / "state"), job_rows=JobRows(0, 0))
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    ((_, result),) = engine.run(path, engine.empty(path, -1), 0, 0, files).outputs["out"]
    assert result["n"].to_pylist() == few["n"].to_pylist()
    assert engine.no_broadcast == engine.broadcast != set()


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("Job aborted: Total size of serialized results of 3 tasks is bigger than", True),
        ("Lost task 0.0 (TID 1) (host): java.lang.OutOfMemoryError: Java heap space", True),
        ("Caused by: org.apache.spark.memory.SparkOutOfMemoryError: no memory", True),
        ("The value 'java.lang.OutOfMemoryError' of the type STRING cannot be cast", False),
    ],
)
def test_what_counts_as_too_large(text: str, is_one: bool) -> None:
    assert is_too_large(PySparkException(text), can_be_split=True) == is_one


def test_lack_of_memory_in_a_single_bucket_may_have_other_causes() -> None:
    error = PySparkException("Caused by: java.lang.OutOfMemoryError: Java heap space")
    assert not is_too_large(error, can_be_split=False)
    assert not is_too_large(ValueError("java.lang.OutOfMemoryError"), can_be_split=True)
