"""The central property of ARCHITECTURE.md: the same bits for any grouping of buckets into jobs.

Besides the grouping, everything that must not influence the results is varied: shards, panes, the
order of rows and files, code generation, the number of tasks, and a move of the state to another
engine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F

import holdfast as hf
from holdfast.engine import mergeable as aggregates
from holdfast.engine.compiled import compile_network
from holdfast.engine.engine import Engine
from holdfast.engine.inputs import InputFile
from holdfast.engine.session import Sessions
from holdfast.engine.state import export_version, import_version
from holdfast.model.fragments import fragments
from holdfast.storage.rows import canonical, times_us
from holdfast.storage.segment import write_segment
from holdfast.verify.fuzz.engine_run import LIMITS, Jobs, digests, wide_windows
from tests.spark import oracles

Digests = dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Trial:
    """One way to run the same network over the same rows."""

    #: Sizes of the groups of buckets, repeated.
    groups: tuple[int, ...] = (1_000,)
    partitions: int = 2
    pane_buckets: int = 16
    pane_files: int = 16
    #: `medium`: code generation; `large`: several tasks, too.
    jobs: Jobs = "small"
    #: Order of rows, of files, and how the rows of a bucket are spread over files.
    order: int = 0
    #: After this many steps the state moves to another engine, and the old engine is deleted.
    moved_after: int | None = None


class ShuffledFiles:
    """The rows of each bucket in one to three files; a seed determines the order of both."""

    def __init__(
        self, network: hf.Network, tables: Mapping[str, pa.Table], folder: str, order: int
    ) -> None:
        rng = np.random.default_rng(order)
        self.held: dict[str, list[InputFile]] = {}
        for op in network.sources:
            table = canonical(tables[op.name])
            table = table.take(pa.array(rng.permutation(table.num_rows)))
            buckets = times_us(table, op.time) // network.width_us
            spread = rng.integers(0, 3, table.num_rows) if order else np.zeros_like(buckets)
            files = self.held[op.name] = []
            for bucket, part in dict.fromkeys(zip(buckets, spread, strict=True)):
                rows = table.filter(pa.array((buckets == bucket) & (spread == part)))
                path = os.path.join(folder, f"{op.name}.{bucket}.{part}.parquet")
                file = write_segment(rows, path, time=op.time, fsync=False)
                files.append(InputFile(int(bucket), path, rows.num_rows, file.crc))

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        return [file for file in self.held[stream] if lo <= file.bucket <= hi]

    def span(self) -> tuple[int, int]:
        buckets = [file.bucket for files in self.held.values() for file in files]
        return min(buckets), max(buckets)


def run(
    network: hf.Network,
    compiled: Any,
    tables: Mapping[str, pa.Table],
    sessions: Sessions,
    trial: Trial,
) -> Digests:
    network.partitions = trial.partitions
    outputs: dict[str, list[pa.Table]] = {op.name: [] for op in network.outputs}
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for module in ("retained", "time_windows"):
            patch.setattr(f"holdfast.engine.{module}.PANE_FILES", trial.pane_files)
        files = ShuffledFiles(network, tables, folder, trial.order)
        first, last = files.span()
        (fragment,) = fragments(network)
        for path in fragment.paths:
            engine = _engine(network, compiled, sessions, folder, "here", trial)
            end = last + -(-path.extent_us() // network.width_us) + len(path.operators)
            version = engine.empty(path, first - 1)
            step, lo = 0, first
            while lo <= end:
                hi = min(end, lo + trial.groups[step % len(trial.groups)] - 1)
                if step == trial.moved_after:
                    target = _engine(network, compiled, sessions, folder, "there", trial)
                    version = _moved(version, engine, target, path, folder)
                    engine = target
                result = engine.run(path, version, lo, hi, files)
                for output, tables_of in result.outputs.items():
                    outputs[output] += [table for _, table in tables_of]
                version = result.version
                engine.release(path, [version])
                step, lo = step + 1, hi + 1
    empty = {
        name: pa.schema([]).empty_table() for name, tables_of in outputs.items() if not tables_of
    }
    return digests(
        empty
        | {name: pa.concat_tables(tables_of) for name, tables_of in outputs.items() if tables_of}
    )


def _engine(
    network: hf.Network, compiled: Any, sessions: Sessions, folder: str, name: str, trial: Trial
) -> Engine:
    engine = Engine(
        network, sessions, os.path.join(folder, name), pane_buckets=trial.pane_buckets,
        job_rows=LIMITS[trial.jobs], compiled=compiled,
    )  # fmt: skip
    engine.wide |= wide_windows(network, trial.jobs)
    return engine


def _moved(version: Any, source: Engine, target: Engine, path: Any, folder: str) -> Any:
    """Transfer the state as text and files only; delete the old engine."""
    parcel = os.path.join(folder, "parcel")
    text = json.dumps(export_version(version, source.folder, parcel))
    shutil.rmtree(source.folder)
    moved = import_version(json.loads(text), parcel, target.folder, target.plan_hash(path))
    shutil.rmtree(parcel, ignore_errors=True)
    target.recovered([moved])
    return moved


# -- a network with every operator -----------------------------------------------------------------


def largest_so_far(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """The greatest `i` of each key so far, computed by columns; a result after 700 ms."""
    new = pa.table({"k": rows["k"], "top": rows["i"], "due": rows["ts"]})
    due = pc.add(new["due"], pa.scalar(700_000, pa.duration("us")))
    merged = pa.concat_tables([state, new.set_column(2, "due", due).cast(state.schema)])
    merged = merged.group_by("k").aggregate([("top", "max"), ("due", "max")])
    merged = merged.rename_columns(["k", "top", "due"]).cast(state.schema)
    end = pa.scalar(info.end_us, pa.int64()).cast(state.schema.field("due").type)
    expired = pc.less(merged["due"], end)
    due_rows = merged.filter(expired)
    stamp = pa.array([info.end_us - 1] * due_rows.num_rows, pa.int64())
    out = pa.table(
        {"k": due_rows["k"], "top": due_rows["top"], "ts": stamp.cast(pa.timestamp("us", "UTC"))}
    )
    return out, merged.filter(pc.invert(expired))


def naive_sums(df: Any) -> Any:
    """Spark's own sum of doubles: correct only because window rows are in canonical order."""
    return df.groupBy("k").agg(F.sum("x").alias("s"), F.avg("y").alias("m"))


def every_operator() -> hf.Network:
    net = hf.Network("every", bucket="250ms")
    a = net.source("a", oracles.SCHEMA, time="ts")
    b = net.source("b", oracles.SCHEMA, time="ts")
    long = a.apply(lambda df: df.withColumn("x", -F.col("x"))).window("2100ms", slide="300ms")
    net.output("sums", long.group_by("k").agg(s=hf.sum("x"), mn=hf.min("x"), n=hf.count()))
    net.output("spread", a.window("700ms", slide="300ms").group_by("k").agg(
        dev=hf.stddev("y"), d=hf.sum("d"), fx=hf.first("x"), lx=hf.last("x"),
    ))  # fmt: skip
    net.output("ranks", a.window("2s", slide="1s").agg(
        q=hf.quantile("x", 0.5), top=hf.top_k("w", 3), few=hf.approx_distinct("i", lg_k=4),
        p=lambda: F.sum("y") / F.count("y"),
    ))  # fmt: skip
    net.output("function", a.window("1s").apply(naive_sums))
    inner = a.window("100ms").group_by("k").agg(s=hf.sum("x"))
    net.output("outer", inner.window("1s", slide="500ms").group_by("k").agg(s=hf.sum("s")))
    net.output("threes", a.count_window(3, slide=2, by="k").agg(s=hf.sum("x"), l=hf.last("w")))
    net.output("fours", a.count_window(4, by="k").agg(s=hf.sum("x"), dev=hf.stddev("i")))
    quiet = [
        stream.stateful(
            largest_so_far, key="k", state="k string, top long, due timestamp",
            out="k string, top long, ts timestamp", timer="due",
        )
        for stream in (a, a.filter("i > 0"))
    ]  # fmt: skip
    net.output("quiet", quiet[0].filter("top is not null").union(quiet[1]))
    right = b.map("ts", "k", z="x")
    net.output("pairs", a.map("ts", "k", "x").join(right, on=["k"], within="60ms"))
    narrow = right.window("300ms").group_by("k").agg(z=hf.sum("z")).map("ts", "k", "z")
    both = inner.map("ts", "k", "s").join(narrow, on=["k"], within="200ms")
    net.output("of_windows", both)
    net.output("of_both", net.union(a, b).window("500ms").group_by("w").agg(s=hf.sum("x")))
    return net


@dataclass(frozen=True)
class Rows:
    """The input rows of the network, generated from a seed."""

    seed: int
    buckets: tuple[int, ...]
    not_finite: float = 0.0

    def tables(self) -> dict[str, pa.Table]:
        rng = np.random.default_rng(self.seed)
        return {
            name: oracles.rows_of(
                rng, count, buckets=self.buckets, first_us=-1_000_000, wild=0.02,
                not_finite=self.not_finite,
            )
            for name, count in (("a", 240), ("b", 60))
        }  # fmt: skip


KNOWN = Rows(1, (0, 1, 2, 4, 5, 9))


class Every:
    """The network, compiled once for all trials."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.network = every_operator()
        self.compiled = compile_network(self.network, sessions.small)
        self._in_one_job: dict[Rows, Digests] = {}

    def in_one_job(self, rows: Rows) -> Digests:
        if rows not in self._in_one_job:
            self._in_one_job[rows] = self.run(rows.tables(), Trial())
        return self._in_one_job[rows]

    def run(self, tables: Mapping[str, pa.Table], trial: Trial) -> Digests:
        return run(self.network, self.compiled, tables, self.sessions, trial)


@pytest.fixture(scope="module")
def every(sessions: Sessions) -> Every:
    return Every(sessions)


trials = st.builds(
    Trial,
    groups=st.lists(st.integers(1, 7), min_size=2, max_size=4).map(lambda sizes: (*sizes, 12)),
    partitions=st.integers(1, 4),
    pane_buckets=st.sampled_from([1, 3, 16]),
    pane_files=st.sampled_from([2, 16]),
    jobs=st.sampled_from(get_args(Jobs)),
    order=st.integers(1, 1_000),
    moved_after=st.sampled_from([None, 1, 2]),
)
anything = st.builds(
    Rows,
    seed=st.integers(0, 10_000),
    buckets=st.lists(st.integers(0, 12), min_size=4, max_size=8, unique=True).map(tuple),
    not_finite=st.sampled_from([0.0, 0.02]),
)
one_by_one = (1,) * 11 + (40,)


@settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=3,
    suppress_health_check=list(HealthCheck),
)
@given(rows=anything, trial=trials)
@example(KNOWN, Trial(groups=one_by_one, partitions=3, pane_buckets=1, pane_files=2, order=5))
@example(KNOWN, Trial(jobs="large", order=9))
@example(KNOWN, Trial(jobs="wide", pane_buckets=1))
def test_any_grouping_gives_the_same_bits(every: Every, rows: Rows, trial: Trial) -> None:
    assert every.run(rows.tables(), trial) == every.in_one_job(rows)


def test_state_that_moves_to_another_engine_gives_the_same_bits(every: Every) -> None:
    """Open windows, half-full count windows and timers are transferred as files and text."""
    moving = Trial(groups=(3, 5, 40), pane_buckets=1, moved_after=1)
    assert every.run(KNOWN.tables(), moving) == every.in_one_job(KNOWN)


# -- sensitivity of the tests ----------------------------------------------------------------------


def test_the_rows_expose_differences_in_the_order_of_addition() -> None:
    """Sums of the same doubles in time order and in reverse differ in many windows."""
    rows = KNOWN.tables()["a"]
    values_of_windows = [
        [x for _, x in sorted(pairs, key=lambda pair: pair[0]) if x is not None]
        for pairs in oracles.groups(rows, 700_000, 300_000, ["k"], "x").values()
    ]
    differ = sum(sum(values) != sum(reversed(values)) for values in values_of_windows)
    assert differ > len(values_of_windows) // 3


def test_a_plain_sum_of_doubles_is_detected(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain_sum(part: Any, a: str, x: str, *_: Any) -> None:
        part.partials = {f"{a}_v": ("sum", "sum", x)}
        part.finish = f"{a}_v"

    monkeypatch.setattr(aggregates, "_sum", plain_sum)
    net = hf.Network("sabotaged", bucket="250ms")
    source = net.source("a", oracles.SCHEMA, time="ts")
    net.output("sums", source.window("700ms", slide="300ms").group_by("k").agg(s=hf.sum("x")))
    compiled = compile_network(net, sessions.small)
    tables = KNOWN.tables()
    one_job = run(net, compiled, tables, sessions, Trial())
    many_jobs = run(net, compiled, tables, sessions, Trial(groups=(2,), pane_buckets=1, order=5))
    assert one_job["sums"][0] == many_jobs["sums"][0]
    assert one_job["sums"][1] != many_jobs["sums"][1]
