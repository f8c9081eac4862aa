"""Long windows: panes are merged level by level, and windows read their totals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine import time_windows
from holdfast.engine.engine import Engine
from holdfast.engine.session import Sessions
from holdfast.engine.state import Version, files_below
from holdfast.engine.time_windows import to_merge
from holdfast.model.fragments import fragments
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import Files, Jobs, digests, run_network

BUCKETS = 110


def rows_of() -> pa.Table:
    """Rows in most buckets, with a long gap."""
    rng = np.random.default_rng(3)
    counts = np.where((np.arange(BUCKETS) > 70) & (np.arange(BUCKETS) < 80), 0, 4)
    total = int(counts.sum())
    times = np.repeat(np.arange(BUCKETS) * 100_000, counts) + rng.integers(0, 100_000, total)
    values = rng.random(total) * 10.0 ** rng.integers(-9, 9, total)
    keys = rng.integers(0, 3, total)
    return pa.table({"ts": pa.array(times, TIMESTAMP), "k": keys, "x": values})


def network() -> hf.Network:
    net = hf.Network("panes", bucket="100ms")
    rows = net.source("a", "ts timestamp, k long, x double", time="ts")
    long = rows.window("6400ms", slide="100ms").group_by("k")
    net.output(
        "long",
        long.agg(n=hf.count(), total=hf.sum("x"), low=hf.min("x"), mean=hf.avg("x"),
                 spread=hf.stddev("x"), first=hf.first("x"), last=hf.last("x"),
                 different=hf.approx_distinct("x"), middle=hf.quantile("x", 0.5),
                 often=hf.top_k("k", 2)),
    )  # fmt: skip
    uneven = rows.window("3500ms", slide="250ms").group_by("k")
    net.output("uneven", uneven.agg(n=hf.count(), total=hf.sum("x")))
    return net


@pytest.mark.parametrize(("jobs", "groups"), [("small", (1, 1, 3)), ("medium", (30, 1, 2))])
def test_totals_of_panes_give_the_same_results(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, jobs: Jobs, groups: tuple[int, ...]
) -> None:
    net, tables = network(), {"a": rows_of()}
    expected = digests(run_network(net, tables, sessions, jobs="large"))
    monkeypatch.setattr(time_windows, "PANE_FILES", 2)
    monkeypatch.setattr(time_windows, "TOTAL_PANES_MIN", 8)
    monkeypatch.setattr(time_windows, "CHUNKS_MIN", 3)
    found = run_network(net, tables, sessions, groups=groups, pane_buckets=1, jobs=jobs)
    assert digests(found) == expected


def test_a_long_window_reads_totals(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_windows, "PANE_FILES", 4)
    net = hf.Network("panes", bucket="100ms")
    rows = net.source("a", "ts timestamp, k long, x double", time="ts")
    net.output("long", rows.window("6400ms", slide="100ms").group_by("k").agg(n=hf.count()))
    files = Files(net, {"a": rows_of()}, str(tmp_path))
    engine = Engine(net, sessions, str(tmp_path / "state"), pane_buckets=1)
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    version = engine.empty(path, -1)
    for bucket in range(BUCKETS):
        version = engine.run(path, version, bucket, bucket, files).version
        engine.release(path, [version])
    (chunks,) = version.panes.values()
    assert sum(chunk.total is not None for chunk in chunks) >= 6
    assert version.rows_read((), ()) < sum(chunk.rows for chunk in chunks) / 2
    names = {file for file in files_below(engine.folder) if not file.startswith("job.")}
    assert names == set(version.files())
    assert Version.of(version.path, version.bucket, version.body()) == version
    assert to_merge(net.named(next(iter(version.panes))), chunks, 100_000) is None  # type: ignore[arg-type]


def test_many_rows_of_an_open_window_are_folded_at_once(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_windows, "FOLD_ROWS_MIN", 10)
    net = hf.Network("panes", bucket="100ms")
    rows = net.source("a", "ts timestamp, k long, x double", time="ts")
    net.output("sums", rows.window("1s").group_by("k").agg(n=hf.count()))
    files = Files(net, {"a": rows_of()}, str(tmp_path))
    engine = Engine(net, sessions, str(tmp_path / "state"))
    ((path,),) = [fragment.paths for fragment in fragments(net)]
    version = engine.empty(path, -1)
    folded = []
    for bucket in range(6):  # four rows each
        version = engine.run(path, version, bucket, bucket, files).version
        folded.append(sum(len(c.buckets) for chunks in version.panes.values() for c in chunks))
    assert folded == [0, 0, 3, 3, 3, 6]
