"""Plans that run again: what they read, and which plans may not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import holdfast as hf
from holdfast.engine.engine import Engine
from holdfast.engine.prepared import Prepared, is_repeatable
from holdfast.engine.session import Sessions
from holdfast.engine.state import files_below
from holdfast.engine.step import Step
from holdfast.engine.step_inputs import PANE_FILES
from holdfast.errors import HoldfastError
from holdfast.model.fragments import fragments
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import Files, Jobs, digests, run_network


def table(rows: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    return pa.table({"n": np.arange(rows), "x": random.random(rows)})


def prepared(tmp_path: Path) -> Prepared:
    return Prepared(str(tmp_path / "main"), reuse=True)


def test_a_file_has_the_same_length_for_any_number_of_rows(tmp_path: Path) -> None:
    plans, paths = prepared(tmp_path), set()
    for rows in (3_000, 0, 1, 3_500):
        path = plans.write(table(rows), "a")
        plans.end()
        paths.add(path)
        assert pq.read_table(path).equals(table(rows)) and Path(path).stat().st_size == 1 << 16
    longer = plans.write(table(20_000), "a")
    assert len(paths) == 1 and longer not in paths and Path(longer).stat().st_size == 1 << 20


def test_very_long_files_are_deleted_after_the_step(tmp_path: Path) -> None:
    plans = prepared(tmp_path)
    assert pq.read_table(plans.write(table(2_000_000), "a")).num_rows == 2_000_000
    plans.end()
    assert list(tmp_path.iterdir()) == []


def test_files_of_one_step_are_different(tmp_path: Path) -> None:
    plans = prepared(tmp_path)
    paths = [plans.write(table(1), "a"), plans.write(table(2), "a")]
    assert [pq.read_table(path).num_rows for path in paths] == [1, 2]


def test_a_frame_reads_what_the_file_contains_now(sessions: Sessions, tmp_path: Path) -> None:
    plans = prepared(tmp_path)
    path = plans.write(table(100), "a")
    rows = sessions.small.read.parquet(path).coalesce(1)
    frame = rows.groupBy((F.col("n") % 7).alias("k")).agg(F.sum("x").alias("x"))
    frame.toArrow()
    assert is_repeatable(frame, [path])
    for seed, count in enumerate((50, 2_000, 0, 100)):
        plans.end()
        plans.write(table(count, seed), "a")
        assert frame.toArrow().num_rows == min(7, count)
        total = sum(row["x"] for row in frame.toArrow().to_pylist())
        assert total == pytest.approx(float(table(count, seed)["x"].to_numpy().sum()))


def shuffled(rows: DataFrame) -> DataFrame:
    return rows.repartition(2, "n")


def broadcast(rows: DataFrame) -> DataFrame:
    return rows.join(F.broadcast(rows.select(F.col("n").alias("m"))), F.expr("n = m"))


def subquery(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("remembered")
    return rows.filter("x < (SELECT avg(x) FROM remembered)")


def cached(rows: DataFrame) -> DataFrame:
    return rows.filter("n >= 0").persist()


@pytest.mark.parametrize("remembering", [shuffled, broadcast, subquery, cached])
def test_a_plan_that_remembers_rows_is_not_repeatable(
    sessions: Sessions, tmp_path: Path, remembering: Callable[[DataFrame], DataFrame]
) -> None:
    file = prepared(tmp_path).write(table(10), "a")
    rows = sessions.small.read.parquet(file).coalesce(1)
    assert is_repeatable(rows, [file])
    frame = remembering(rows)
    try:
        frame.toArrow()
        assert not is_repeatable(frame, [file])
    finally:
        frame.unpersist()


def test_a_plan_that_reads_other_files_is_not_repeatable(
    sessions: Sessions, tmp_path: Path
) -> None:
    plans = prepared(tmp_path)
    files = [plans.write(table(1), "a"), plans.write(table(2), "b c%20")]
    frame = sessions.small.read.parquet(*files).coalesce(1)
    assert is_repeatable(frame, files) and not is_repeatable(frame, files[:1])


def test_after_a_failed_step_other_files_are_used(sessions: Sessions, tmp_path: Path) -> None:
    net = hf.Network("fails", bucket="100ms")
    rows = net.source("a", "ts timestamp, n long", time="ts")
    net.output("out", rows.apply(lambda df: df.withColumn("q", F.expr("10 / n"))))
    times = pa.array([0, 100_000, 200_000], TIMESTAMP)
    files = Files(net, {"a": pa.table({"ts": times, "n": [1, 0, 2]})}, str(tmp_path))
    engine = Engine(net, sessions, str(tmp_path / "state"))
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    first = engine.run(path, engine.empty(path, -1), 0, 0, files)
    before = set(Path(engine.folder).iterdir())
    with pytest.raises(HoldfastError):
        engine.run(path, first.version, 1, 1, files)
    assert set(Path(engine.folder).iterdir()) == set()
    skipped = engine.empty(path, 1)
    last = engine.run(path, skipped, 2, 2, files)
    ((_, result),) = last.outputs["out"]
    assert result["q"].to_pylist() == [5.0]
    assert not before & set(Path(engine.folder).iterdir())


def rows_of(buckets: int, per_bucket: int = 40) -> pa.Table:
    random = np.random.default_rng(3)
    count = buckets * per_bucket
    times = np.repeat(np.arange(buckets) * 100_000, per_bucket) + random.integers(0, 100_000, count)
    return pa.table({
        "ts": pa.array(times, TIMESTAMP),
        "k": random.integers(0, 5, count),
        "n": random.integers(-9, 9, count),
        "x": random.random(count),
    })  # fmt: skip


def source(name: str = "prepared") -> tuple[hf.Network, hf.Stream]:
    net = hf.Network(name, bucket="100ms")
    return net, net.source("a", "ts timestamp, k long, n long, x double", time="ts")


def sliding() -> hf.Network:
    net, rows = source()
    window = rows.window("730ms", slide="130ms").group_by("k")
    last = hf.last("coalesce(n, 0)")  # never null, unless panes are merged
    net.output("out", window.agg(n=hf.sum("n"), last=last, top=hf.top_k("n", k=2)))
    return net


def self_join() -> hf.Network:
    net, rows = source()
    other = rows.filter("n > 0").map("ts", "k", m="n")
    net.output("out", rows.join(other, on=["k"], within="150ms"))
    return net


def joining_function() -> hf.Network:
    """Its sums of doubles depend on the order of the rows."""
    net, rows = source()

    def far_from_mean(df: DataFrame) -> DataFrame:
        means = df.groupBy("k").agg(F.avg("x").alias("mean"))
        return df.join(means, "k").groupBy("k").agg(F.sum(F.expr("x - mean")).alias("d"))

    net.output("out", rows.window("300ms").apply(far_from_mean))
    return net


def hidden_name() -> hf.Network:
    """Spark takes files whose names begin with an underscore for hidden ones."""
    net, rows = source()
    window = rows.filter("n > 0", name="_op").window("730ms", slide="130ms", name="_w")
    net.output("_out", window.agg(n=hf.sum("n")))
    return net


def keyed() -> hf.Network:
    net, rows = source()
    net.output("out", rows.count_window(7, slide=3, by=["k", "n"]).agg(x=hf.sum("x")))
    return net


def behind_functions() -> hf.Network:
    """Rows between stateful operators are stored, and merged when there are many files."""
    net, rows = source()
    sums = rows.window("100ms").apply(lambda df: df.groupBy("k").agg(F.sum("x").alias("x")))
    other = rows.filter("n > 5").map("ts", "k", "n")
    net.output("joined", sums.join(other, on=["k"], within="900ms"))
    net.output("longer", sums.window("600ms", slide="200ms").apply(
        lambda df: df.orderBy("k").agg(F.sum("x").alias("x"))
    ))  # fmt: skip
    return net


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        *((make, "none") for make in (sliding, self_join, joining_function, behind_functions,
                                      hidden_name, keyed)),
        (sliding, "due bytes"), (sliding, "panes"), (self_join, "broadcast"),
        (behind_functions, "broadcast"),
    ],
)  # fmt: skip
def test_jobs_of_all_sizes_have_the_same_results(
    sessions: Sessions, make: Callable[[], hf.Network], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "due bytes":
        monkeypatch.setattr("holdfast.engine.time_windows.DUE_BYTES_MAX", 0)
    if limit == "panes":
        monkeypatch.setattr(Step, "_if_it_fits", lambda self, collect: None)
    if limit == "broadcast":
        monkeypatch.setattr("holdfast.engine.joins.BROADCAST_BYTES_MAX", 0)
    net, tables = make(), {"a": rows_of(25)}
    large = run_network(net, tables, sessions, jobs="large")
    for module in ("time_windows", "retained"):
        monkeypatch.setattr(f"holdfast.engine.{module}.PANE_FILES", 2)
    for jobs in get_args(Jobs):
        grouped = run_network(net, tables, sessions, groups=(1, 3), pane_buckets=4, jobs=jobs)
        assert digests(grouped) == digests(large)
    assert all(table.num_rows for table in large.values())


def test_the_panes_of_a_sliding_window_do_not_accumulate(
    sessions: Sessions, tmp_path: Path
) -> None:
    net, rows = source()
    window = rows.window("2s", slide="100ms").group_by("k")
    net.output("out", window.agg(n=hf.sum("n")))
    files = Files(net, {"a": rows_of(120, 10)}, str(tmp_path))
    engine = Engine(net, sessions, str(tmp_path / "state"))
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    version = engine.empty(path, -1)
    sizes = []
    for bucket in range(120):
        version = engine.run(path, version, bucket, bucket, files).version
        engine.release(path, [version])
        sizes.append(version.rows())
    assert max(sizes[60:]) <= 5 * (20 + 2 * PANE_FILES)
    names = {file for file in files_below(engine.folder) if not file.startswith("job.")}
    assert names == set(version.files())


def test_two_steps_of_a_line_at_the_same_time(sessions: Sessions, tmp_path: Path) -> None:
    """An abandoned tentative step may still be running when the next one begins."""
    net, rows = source()
    net.output("out", rows.map("ts", "n", both="n + k"))
    files = Files(net, {"a": rows_of(40, 200)}, str(tmp_path))
    engine = Engine(net, sessions, str(tmp_path / "state"))
    ((path,),) = [fragment.paths for fragment in fragments(net)]

    def run(first: int) -> list[str]:
        results = []
        for bucket in range(first, first + 20):
            version = engine.empty(path, bucket - 1)
            result = engine.run(path, version, bucket, bucket, files, line="tentative")
            ((found, table),) = result.outputs["out"]
            assert found == bucket
            results.append(engine.digest(table))
        return results

    alone = [run(0), run(20)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, (0, 20))) == alone
