"""What a step does not do: plan again, compile Java classes, let results wait for the state."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import holdfast as hf
from holdfast.engine import prepared
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import Results
from holdfast.engine.session import Sessions
from holdfast.engine.state import files_below
from holdfast.model.fragments import fragments
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import Files

WIDTH_US = 100_000
BUCKETS = 12


def network(kind: str) -> hf.Network:
    net = hf.Network("cost", bucket="100ms")
    rows = net.source("a", "ts timestamp, k long, n long, x double", time="ts")
    if kind == "tumbling":
        out = rows.window("100ms").group_by("k").agg(n=hf.sum("n"), x=hf.sum("x"))
    elif kind == "stateless":
        out = rows.filter("n % 2 = 0").apply(lambda df: df.withColumn("m", F.expr("n + x")))
    elif kind == "join":
        other = rows.apply(lambda df: df.select("ts", "k", F.col("n").alias("m")))
        out = rows.join(other, on=["k"], within="200ms")
    elif kind == "function":
        out = rows.window("200ms", slide="100ms").apply(
            lambda df: df.groupBy("k").agg(F.max("n").alias("n"))
        )
    elif kind == "sliding":
        out = rows.window("500ms", slide="100ms").group_by("k").agg(n=hf.sum("n"))
    else:
        out = rows.count_window(3, by="k").agg(n=hf.sum("n"))
    net.output("out", out)
    return net


def rows_of_buckets() -> pa.Table:
    times = np.repeat(np.arange(BUCKETS) * WIDTH_US, 20)
    count = len(times)
    numbers = np.arange(count)
    x = np.random.default_rng(1).random(count)
    return pa.table({"ts": pa.array(times, TIMESTAMP), "k": numbers % 3, "n": numbers, "x": x})


def steps(net: hf.Network, sessions: Sessions, folder: Path) -> Iterator[None]:
    """Run one step per bucket."""
    files = Files(net, {"a": rows_of_buckets()}, str(folder))
    engine = Engine(net, sessions, str(folder / "state"))
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    version = engine.empty(path, -1)
    for bucket in range(BUCKETS):
        version = engine.run(path, version, bucket, bucket, files).version
        yield


@pytest.mark.parametrize("kind", ["tumbling", "sliding", "keyed"])
def test_no_class_is_compiled_after_the_first_steps(
    sessions: Sessions, tmp_path: Path, kind: str
) -> None:
    net = network(kind)
    metrics = sessions.small.sparkContext._jvm.org.apache.spark.metrics.source.CodegenMetrics
    compiled = []
    for _ in steps(net, sessions, tmp_path):
        compiled.append(metrics.METRIC_COMPILATION_TIME().getCount())
    assert compiled[-1] == compiled[3]


@pytest.mark.parametrize("kind", ["stateless", "tumbling", "sliding", "function", "join", "keyed"])
def test_no_small_job_is_planned_after_the_first_steps(
    sessions: Sessions, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[DataFrame] = []
    real = prepared.is_repeatable

    def is_repeatable(frame: DataFrame, files: Collection[str]) -> bool:
        planned.append(frame)
        assert real(frame, files)
        return True

    monkeypatch.setattr(prepared, "is_repeatable", is_repeatable)
    net = network(kind)
    so_far = []
    for _ in steps(net, sessions, tmp_path):
        so_far.append(len(planned))
    assert 0 < so_far[-1] == so_far[5] <= 3


def test_results_are_available_before_panes_are_written(sessions: Sessions, tmp_path: Path) -> None:
    net = network("sliding")
    files = Files(net, {"a": rows_of_buckets()}, str(tmp_path))
    engine = Engine(net, sessions, str(tmp_path / "state"), pane_buckets=1)
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    written: list[int] = []

    def on_results(results: Results) -> None:
        assert results["out"]
        written.append(len([f for f in files_below(engine.folder) if not f.startswith("job.")]))

    result = engine.run(path, engine.empty(path, -1), 0, 0, files, on_results=on_results)
    assert written == [0] and result.version.files() != []
