"""A failed node is reported where results are read, where rows are pushed, and in `status`.

One process, real Spark, functions of this file that raise: no program waits for results that can
no longer arrive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

import holdfast as hf
from holdfast.engine.session import Sessions

WIDTH_US = 100_000
LIMIT_S = 60.0
SCHEMA = "ts timestamp, key string, x long"


def no_negatives(state: Any, rows: Any, info: Any) -> Any:
    if min(rows["x"].to_pylist()) < 0:
        raise ValueError("x: a negative\nnumber")  # THE STATEFUL LINE
    return rows.select(["ts", "x"]), state


@F.udf(LongType())  # type: ignore[untyped-decorator]
def no_negatives_udf(x: int) -> int:
    if x < 0:
        raise KeyError("negative")  # THE UDF LINE
    return x


class Fickle:
    """DataFrame code that works when the network is compiled and fails when it runs."""

    broken = False

    def __call__(self, df: Any) -> Any:
        if self.broken:
            raise LookupError("the table of pages is gone")  # THE DRIVER LINE
        return df.filter("x < 100")


def stateful(stream: hf.Stream) -> hf.Stream:
    return stream.stateful(no_negatives, key="key", state="n long", out="ts timestamp, x long")


def udf(stream: hf.Stream) -> hf.Stream:
    return stream.apply(lambda df: df.withColumn("x", no_negatives_udf("x")), python_udfs=True)


def cast(stream: hf.Stream) -> hf.Stream:
    return stream.apply(
        lambda df: df.withColumn("n", F.when(F.col("x") < 0, F.col("key").cast("int")))  # THE CAST
    )


def rows(bucket: int, x: int = 1) -> pa.Table:
    times = pa.array([bucket * WIDTH_US] * 3, pa.int64()).cast(pa.timestamp("us", "UTC"))
    return pa.table({"ts": times, "key": ["a", "b", "c"], "x": [x, 2, 3]})


def push(run: hf.Run, source: str, bucket: int, x: int = 1) -> None:
    run.source(source).push(rows(bucket, x))
    run.source(source).advance((bucket + 1) * WIDTH_US)


def line_of(mark: str) -> str:
    """File and number of the line of this file that ends with the comment `mark`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))
    return f"{Path(__file__).resolve()}:{number}"


def raised_by(act: Callable[[], Any]) -> BaseException:
    """The exception that `act` raises. Fails if `act` is still waiting after LIMIT_S."""
    outcome: queue.Queue[BaseException | None] = queue.Queue()

    def attempt() -> None:
        try:
            act()
            outcome.put(None)
        except BaseException as err:
            outcome.put(err)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        error = outcome.get(timeout=LIMIT_S)
    except queue.Empty:
        pytest.fail(f"still waiting after {LIMIT_S} s")
    assert error is not None, "expected an exception, found none"
    return error


def manual(net: hf.Network, name: str) -> hf.Stream:
    return net.source(name, SCHEMA, time="ts", clock="manual")


@pytest.mark.parametrize(
    ("build", "mark", "expected"),
    [
        (stateful, "THE STATEFUL LINE", "ValueError: x: a negative number"),
        (udf, "THE UDF LINE", "KeyError: 'negative'"),
        (cast, "THE CAST", "The value 'a' of the type"),
    ],
    ids=["stateful", "udf", "cast"],
)
def test_a_failing_function_is_reported_with_file_and_line(
    sessions: Sessions, build: Callable[[hf.Stream], hf.Stream], mark: str, expected: str
) -> None:
    net = hf.Network("failing", bucket="100ms")
    net.output("out", build(manual(net, "s")))
    with hf.run(net) as run:
        push(run, "s", 0)
        seen: list[int] = []
        client = run.client("out")

        def read() -> None:
            for _, info in client:
                seen.append(info.bucket)
                if info.bucket == 0:
                    push(run, "s", 1, x=-1)

        error = raised_by(read)
        assert isinstance(error, hf.HoldfastError), error
        message = str(error)
        assert seen == [0]  # earlier results were delivered
        for text in ("output 'out'", "node 'main'", expected, line_of(mark), "start the run again"):
            assert text in message, message
        assert "Traceback" not in message and "\n" not in message
        pushed = raised_by(lambda: push(run, "s", 2))
        assert isinstance(pushed, hf.HoldfastError)
        assert line_of(mark) in str(pushed)
        (failure,) = run.status()["failures"]
        assert failure["node"] == "main"
        assert failure["outputs"] == ["out"]
        assert failure["permanent"] is True
        assert failure["user_location"].startswith(line_of(mark))
        assert expected in failure["message"]
        assert isinstance(raised_by(lambda: list(run.client("out"))), type(error))


def test_failing_dataframe_code_on_the_driver_is_reported_with_its_line(sessions: Sessions) -> None:
    fickle = Fickle()
    net = hf.Network("failing", bucket="100ms")
    net.output("out", manual(net, "s").apply(fickle))
    with hf.run(net) as run:
        fickle.broken = True
        push(run, "s", 0)
        error = raised_by(lambda: list(run.client("out")))
        assert isinstance(error, hf.HoldfastError), error
        assert "LookupError: the table of pages is gone" in str(error)
        assert line_of("THE DRIVER LINE") in str(error)


def test_outputs_that_do_not_depend_on_the_failed_node_continue(sessions: Sessions) -> None:
    net = hf.Network("two", bucket="100ms")
    shared, own = manual(net, "shared"), manual(net, "own")
    net.output("bad", stateful(shared.union(own)))
    net.output("after-bad", stateful(shared.union(own)).on("third").filter("x > 0"))
    net.output("good", shared.on("second").filter("x > 0"))
    with hf.run(net) as run:
        for source in ("shared", "own"):
            push(run, source, 0, x=-1)
        for output in ("bad", "after-bad"):
            error = raised_by(lambda output=output: list(run.client(output)))
            assert f"output '{output}'" in str(error) and "node 'main'" in str(error)
        # All consumers of `own` have failed; `shared` still has a consumer that runs.
        assert "source 'own'" in str(raised_by(lambda: push(run, "own", 1)))
        push(run, "shared", 1)
        run.source("shared").end()
        assert [info.bucket for _, info in run.client("good")] == [0, 1]
        status = run.status()
        assert status["failures"][0]["outputs"] == ["bad", "after-bad"]
        assert list(status["stopped"]) == ["bad", "after-bad"]
        assert line_of("THE STATEFUL LINE") in status["stopped"]["bad"]
        (node,) = status["unhealthy"]
        assert (node["what"], node["part"], node["host"]) == ("node", "main", "local")
        assert node["out"] and node["final"] and "Correct the function" in node["remedy"]
        assert "2 of 3 outputs stopped (bad, after-bad; see status())" in repr(run)


def test_a_damaged_segment_of_a_source_gives_an_error_and_no_rows(
    sessions: Sessions, tmp_path: Path
) -> None:
    """G2: the file changes after it was announced to the node and before the node reads it."""
    net = hf.Network("flipped", bucket="100ms")
    first, second = manual(net, "first"), manual(net, "second")
    net.output("out", first.union(second).window("100ms").group_by("key").agg(x=hf.sum("x")))
    with hf.run(net, storage=str(tmp_path)) as run:
        run.source("second").start(0)
        push(run, "first", 0, x=7)
        until = time.monotonic() + LIMIT_S
        while not (files := list((tmp_path / "sources" / "first").rglob("*.parquet"))):
            assert time.monotonic() < until
        data = bytearray(files[0].read_bytes())
        data[20] ^= 8
        files[0].write_bytes(data)
        push(run, "second", 0)
        error = raised_by(lambda: list(run.client("out")))
        assert isinstance(error, hf.NodeFailed), error
        assert "source 'first'" in str(error) and files[0].name in str(error)


def test_a_failing_feed_is_reported_where_its_rows_are_missing(sessions: Sessions) -> None:
    def make(number: int, from_us: int, to_us: int) -> dict[str, Any]:
        if number > 2:
            raise RuntimeError("the tap is broken")  # THE FEED LINE
        return {"ts": [from_us], "key": ["a"], "x": [1]}

    net = hf.Network("fed", bucket="100ms")
    source = net.source("tap", SCHEMA, time="ts", feed=hf.Generate(make))
    net.output("out", source.filter("x > 0"))
    with hf.run(net) as run:
        error = raised_by(lambda: list(run.client("out")))
        for text in ("source 'tap'", "RuntimeError: the tap is broken", line_of("THE FEED LINE")):
            assert text in str(error)
