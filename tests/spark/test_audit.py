"""The audit of a run: the results of all buckets equal those of one batch job, and every row that
is removed, changed or duplicated after the run is detected."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

import holdfast as hf
from holdfast.config import Options
from holdfast.engine.session import Sessions
from holdfast.model.loading import load
from holdfast.runtime.folders import client_folder, source_folder
from holdfast.runtime.running import Run
from holdfast.storage import Ended, Log, canonical, read_only
from holdfast.types import SegmentId, Stability
from holdfast.verify.audit import Report, audit, compare
from holdfast.verify.audit.ideal import Batch, batch_session
from holdfast.verify.fuzz.engine_run import run_network

SECOND_US = 1_000_000
START_US = 1_700_000_000 * SECOND_US
SECONDS = 8
TAP = "ts timestamp, src string, x double, n long, d decimal(10,2)"
TIME = pa.timestamp("us", tz="UTC")


def network() -> hf.Network:
    """Every operator, and aggregates with and without partials."""
    from pyspark.sql import functions as F

    def sums(df: Any) -> Any:
        return df.groupBy("src").agg(F.sum("x").alias("s"), F.max("n").alias("m"))

    def sessions(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
        """Count the rows of a key until 200 ms pass without rows; the result has that time."""
        due = pc.add(rows["ts"], pa.scalar(200_000, pa.duration("us")))
        ones = pa.array([1] * rows.num_rows, pa.int64())
        counted = pa.table({"src": rows["src"], "n": ones, "due": due})
        both = pa.concat_tables([state, counted.cast(state.schema)])
        merged = both.group_by("src").aggregate([("n", "sum"), ("due", "max")])
        merged = merged.rename_columns(["src", "n", "due"]).cast(state.schema)
        expired = pc.less(merged["due"].cast(pa.int64()), info.end_us)
        closed = merged.filter(expired)
        return pa.table(
            {"ts": closed["due"], "src": closed["src"], "n": closed["n"]}
        ), merged.filter(pc.invert(expired))

    net = hf.Network("audited", bucket="500ms")
    one = net.source("one", TAP, time="ts", clock="manual")
    two = net.source("two", TAP, time="ts", clock="manual")
    both = one.union(two).filter("n >= 0")
    windows = both.window("2s", slide="700ms").group_by("src")
    net.output(
        "windows",
        windows.agg(
            rows=hf.count(), xs=hf.sum("x"), mean=hf.avg("x"), sd=hf.stddev("x"), ns=hf.sum("n"),
            low=hf.min("x"), high=hf.max("x"), first=hf.first("n"), last=hf.last("x"),
            mid=hf.quantile("x", 0.5), kinds=hf.approx_distinct("n"), top=hf.top_k("n", 3),
            money=hf.sum("d"), price=hf.avg("d"), navg=hf.avg("n"),
            plain=lambda: F.sum("n") / F.count("n"),
        ),
    )  # fmt: skip
    net.output("sums", both.window("1s").apply(sums))
    right = two.map("ts", "src", y="x * 2")
    net.output("pairs", one.join(right, on=["src"], within="300ms"))
    net.output("fives", both.count_window(5, by="src", slide=2).agg(xs=hf.sum("x"), n=hf.max("n")))
    net.output(
        "sessions",
        both.stateful(
            sessions, key="src", state="src string, n long, due timestamp",
            out="ts timestamp, src string, n long", timer="due",
        ),
    )  # fmt: skip
    return net


def rows(seed: int, second: int, count: int = 40) -> pa.Table:
    """Doubles of all sizes that partly cancel out, equal times, nulls; one second without rows."""
    rng = np.random.default_rng([seed, second])
    count = 0 if second == 5 else count
    x = rng.normal(size=count) * 10.0 ** rng.integers(-6, 9, count)
    x[: count // 2] = -x[count // 2 : count // 2 * 2]
    ts = START_US + second * SECOND_US + rng.integers(0, 40, count) * 25_000
    cents = rng.integers(0, 100_000, count)
    return pa.table(
        {
            "ts": pa.array(ts, TIME),
            "src": pa.array(rng.choice([*"abcdefgü"], count), pa.string()),
            "x": pa.array(x, mask=rng.random(count) < 0.05),
            "n": pa.array(rng.integers(-1, 6, count)),
            "d": pa.array(cents, pa.int64()).cast(pa.decimal128(19, 0)).cast(pa.decimal128(21, 2)),
        }
    )


@pytest.fixture(scope="module")
def storage(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The storage of a finished run whose clients received all rows."""
    folder = str(tmp_path_factory.mktemp("run") / "storage")
    net = network()
    with Run(net, storage=folder, options=Options(fsync="never")) as run:
        for second in range(SECONDS):
            for number, name in enumerate(("one", "two")):
                source = run.source(name)
                source.push(rows(number, second))
                source.advance(START_US + (second + 1) * SECOND_US)
        late = rows(7, SECONDS - 2, 3)
        run.source("one").push(late)
        run.source("one").end()
        run.source("two").end()
        assert run.wait_ended(120)
        for op in net.outputs:
            assert sum(table.num_rows for table, _ in run.client(op.name)) > 0
    yield folder
    shutil.rmtree(folder)


def outcomes(report: Report) -> dict[str, str]:
    return {output.name: output.verdict for output in report.outputs}


def test_an_intact_run_passes_the_audit(storage: str, sessions: Sessions) -> None:
    report = audit(network(), storage, sessions.large)
    assert report.ok, report.text()
    for output in report.outputs:
        assert output.found is not None
        assert output.found.correct == output.found.ideal_rows > 10, output.name
        assert output.levels[0] == "LOLE"
        assert output.levels[-1] == "IASO"
    assert {s.name: (s.late_rows, s.dead_letters) for s in report.sources} == {
        "one": (3, 3), "two": (0, 0),
    }  # fmt: skip
    # Never a plain ok: the ideal does not contain rows that no source accepted.
    message = "source one: 3 rows (3 late) were moved to the dead letters and are not part of the"
    assert report.text().startswith(f"audit of audited: ok; {message} ideal\n")
    assert report.json()["not_as_pushed"] == report.not_as_pushed != []
    assert any(message in note for note in report.outputs[0].notes)


def test_results_that_were_not_delivered_are_part_of_the_verdict(
    storage: str, sessions: Sessions, tmp_path: Path
) -> None:
    """As after a failure of the only node: the rows up to there are right, and no more came."""
    copied = str(tmp_path / "storage")
    shutil.copytree(storage, copied)
    folder = client_folder(copied, "sums")
    complete_upto = read_only(source_folder(copied, "one")).state.streams["one"].complete_upto
    rewrite(folder, "sums", lambda number, table: [table], upto=complete_upto - 8)
    report = audit(network(), copied, sessions.large)
    (sums,) = (output for output in report.outputs if output.name == "sums")
    assert sums.undelivered_us == 8 * network().width_us
    assert report.headline.startswith("ok; output sums: the results of the last 4s were not ")


def rewrite(folder: str, output: str, change: Any, upto: int | None = None) -> None:
    """Write the client's rows to a new log, each bucket as `change(number, table)` returns it.
    `upto`: the last bucket that is written; None: all buckets and the end of the stream."""
    before = read_only(folder)
    stream = before.state.streams[output]
    received = [
        (segment.id.bucket, before.read(segment))
        for segment in stream.segments
        if upto is None or segment.id.bucket <= upto
    ]
    shutil.rmtree(folder)
    log = Log.open(folder, before.state.owner, fsync="never")
    log.open_stream(output, stream.schema, stream.time, stream.starts_at)
    for number, (bucket, table) in enumerate(received):
        parts = [part for part in change(number, table) if part.num_rows]
        segments = [
            log.write(part, SegmentId(output, 0, bucket, part=number_of_part), Stability.STABLE)
            for number_of_part, part in enumerate(parts)
        ]
        log.commit(output, segments, bucket)
    if upto is None:
        log.commit(output, [], stream.complete_upto, Ended(output))
    else:
        log.commit(output, [], upto)
    log.close()


def test_the_audit_detects_lost_duplicated_and_changed_rows(
    storage: str, sessions: Sessions, tmp_path: Path
) -> None:
    copy = str(tmp_path / "copy")
    shutil.copytree(storage, copy)

    def lose(number: int, table: pa.Table) -> list[pa.Table]:
        return [table.slice(1) if number == 3 else table]

    def double(number: int, table: pa.Table) -> list[pa.Table]:
        return [table, table] if number == 2 else [table]

    def bend(number: int, table: pa.Table) -> list[pa.Table]:
        at = table.schema.get_field_index("s")
        wrong = pc.multiply(table["s"], 1.000001)
        return [table.set_column(at, "s", wrong) if number == 1 else table]

    rewrite(client_folder(copy, "pairs"), "pairs", lose)
    rewrite(client_folder(copy, "fives"), "fives", double)
    rewrite(client_folder(copy, "sums"), "sums", bend)
    shutil.rmtree(client_folder(copy, "sessions"))
    report = audit(network(), copy, sessions.large)
    assert outcomes(report) == {
        "windows": "ok", "sums": "failed", "pairs": "failed", "fives": "failed",
        "sessions": "unknown",
    }  # fmt: skip
    assert report.verdict == "failed"
    comparisons = {output.name: output.found for output in report.outputs}
    faults = {
        name: (f.missing, f.wrong, f.duplicated) for name, f in comparisons.items() if f is not None
    }
    assert faults["pairs"] == (1, 0, 0)
    assert faults["fives"][:2] == (0, 0)
    assert faults["fives"][2] > 0
    assert faults["sums"][0] == faults["sums"][1] > 0


def test_trimmed_sources_shorten_or_prevent_the_audit(
    storage: str, sessions: Sessions, tmp_path: Path
) -> None:
    copy = str(tmp_path / "copy")
    shutil.copytree(storage, copy)
    log = Log.open(source_folder(copy, "one"), "one", fsync="never")
    starts = log.info("one").starts_at
    log.trim("one", starts + 3)
    log.close()
    report = audit(network(), copy, sessions.large)
    assert outcomes(report) == {
        "windows": "ok", "sums": "ok", "pairs": "ok", "fives": "unknown", "sessions": "unknown",
    }  # fmt: skip
    first = {output.name: output.from_bucket for output in report.outputs}
    # Windows of 2 s need four earlier buckets, windows of 1 s two, a join within 300 ms one.
    assert (first["windows"], first["sums"], first["pairs"]) == (
        starts + 8, starts + 6, starts + 5,
    )  # fmt: skip


def test_the_batch_and_the_engine_agree_on_difficult_rows(
    sessions: Sessions, tmp_path: Path
) -> None:
    """Sums that cancel out, NaN, nulls, lists in the canonical order, equal times, null keys."""
    from pyspark.sql import functions as F

    rng, count = np.random.default_rng(4), 1_200
    x = np.round(rng.normal(size=count), 1)
    x[: count // 3] = -x[count // 3 : 2 * (count // 3)]
    odd = np.where(rng.random(count) < 0.05, np.nan, x)
    lists = [[float(v)] if v > 3 else None for v in rng.integers(0, 10, count)]
    table = pa.table(
        {
            "ts": pa.array(START_US + rng.integers(0, 200, count) * 20_000, TIME),
            "k": pa.array(rng.choice(["a", "b", None], count)),
            "x": x,
            "odd": pa.array(odd, mask=rng.random(count) < 0.05, from_pandas=False),
            "l": pa.array(lists, pa.list_(pa.float64())),
            "f": pa.array(rng.random(count), pa.float32()),
            # G8: some sums do not fit 38 digits.
            "d": pa.array([Decimal(int(n)).scaleb(33) for n in rng.integers(-99, 100, count)],
                          pa.decimal128(38, 2)),
        }
    )  # fmt: skip
    ddl = "ts timestamp, k string, x double, odd double, l array<double>, f float, d decimal(38,2)"
    net = hf.Network("hard", bucket="100ms")
    rows_in = net.source("s", ddl, time="ts", clock="manual")
    by_key = rows_in.window("1s").group_by("k")
    net.output("exact", by_key.agg(s=hf.sum("x"), m=hf.avg("x"), fs=hf.sum("f"), lo=hf.min("f")))
    net.output("decimals", by_key.agg(s=hf.sum("d"), m=hf.avg("d"), sd=hf.stddev("d")))
    net.output(
        "special",
        by_key.agg(
            s=hf.sum("odd"), first=hf.first("l"), last=hf.last("odd"), top=hf.top_k("odd", 4),
            kinds=hf.approx_distinct("x"), few=hf.approx_distinct("odd", lg_k=4),
            q=hf.quantile("odd", 0.9), plain=lambda: F.max("x") - F.min("x"),
        ),
    )  # fmt: skip
    sevens = rows_in.count_window(7, by="k", slide=3)
    net.output("sevens", sevens.agg(v=hf.last("odd"), s=hf.stddev("f")))
    outputs = run_network(net, {"s": table}, sessions)
    session = batch_session(sessions.large)
    path = str(tmp_path / "rows.parquet")
    pq.write_table(canonical(table), path)
    rows_of = {"s": session.read.schema(ddl).parquet(path)}
    batch = Batch(net, rows_of, session, upto=2 * START_US // net.width_us, scratch=str(tmp_path))
    for name, received in outputs.items():
        result = batch.output(name)
        ideal = result.collect(received.schema, 0, 2 * START_US)
        comparison = compare(ideal, received, time="ts", width_us=net.width_us)
        assert comparison.lossless, (name, comparison.examples)
        assert comparison.correct > 10
        assert batch.accuracy(name) == []


def test_a_damaged_source_makes_every_verdict_unknown(
    storage: str, sessions: Sessions, tmp_path: Path
) -> None:
    copy = str(tmp_path / "copy")
    shutil.copytree(storage, copy)
    log = read_only(source_folder(copy, "one"))
    segment = log.state.streams["one"].segments[2]
    os.truncate(log.absolute(segment), segment.size_bytes - 5)
    report = audit(network(), copy, sessions.large)
    assert set(outcomes(report).values()) == {"unknown"}
    assert "not readable" in report.text()


APP = """
import pyarrow as pa

import holdfast as hf


def newest(state, rows, info):
    return rows.select(["ts", "n"]), state


net = hf.Network("app", bucket="1s")
source = net.source("s", "ts timestamp, n long", time="ts", clock="manual")
changed = source.stateful(newest, key="n", state="n long", out="ts timestamp, n long")
net.output("out", changed)
"""


def test_the_function_of_an_application_file_is_audited(sessions: Sessions, tmp_path: Path) -> None:
    """G10: executors cannot import the file."""
    (tmp_path / "stateful_app.py").write_text(APP)
    app, folder = str(tmp_path / "stateful_app.py"), str(tmp_path / "storage")
    with Run(load(app), storage=folder, options=Options(fsync="never")) as run:
        run.source("s").push({"ts": [5, 6], "n": [1, 2]})
        run.source("s").end()
        assert sum(table.num_rows for table, _ in run.client("out")) == 2
    # `holdfast audit` runs in a process that has not run the network.
    cloudpickle.unregister_pickle_by_value(sys.modules["holdfast_app_stateful_app"])
    assert outcomes(audit(load(app), folder, sessions.large)) == {"out": "ok"}
