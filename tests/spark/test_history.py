"""The history of joins: many small files become one, and no bucket is lost."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine import key_index, retained
from holdfast.engine.session import JobRows, Sessions
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import LIMITS, Jobs, digests, run_network

BUCKETS = 40


def rows_of(seed: int) -> pa.Table:
    """Few rows in most buckets, but many in some, so that the history grows and shrinks."""
    rng = np.random.default_rng(seed)
    counts = np.where(np.arange(BUCKETS) % 13 < 4, 60, 5)
    times = np.repeat(np.arange(BUCKETS) * 100_000, counts) + rng.integers(0, 100_000, counts.sum())
    keys = rng.integers(0, 5, counts.sum())
    numbers = np.arange(counts.sum())
    return pa.table({"ts": pa.array(times, TIMESTAMP), "k": keys, "n": numbers, "x": numbers / 8})


@pytest.mark.parametrize("jobs", ["small", "large"])
def test_files_are_merged_also_when_new_rows_are_not_folded(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, jobs: Jobs
) -> None:
    net = hf.Network("history", bucket="100ms")
    left = net.source("a", "ts timestamp, k long, n long", time="ts")
    right = net.source("b", "ts timestamp, k int, x double", time="ts")
    net.output("out", left.join(right, on=["k"], within="1300ms"))
    tables = {"a": rows_of(1), "b": rows_of(2)}
    expected = digests(run_network(net, tables, sessions))
    monkeypatch.setattr(retained, "FOLD_ROWS_MAX", 300)
    monkeypatch.setattr(retained, "PANE_FILES", 2)
    found = run_network(net, tables, sessions, groups=(1,), pane_buckets=3, jobs=jobs)
    assert digests(found) == expected


def joins(net: hf.Network) -> None:
    """Joins of inputs, of functions of inputs, and of results of other operators, and with keys of
    different types."""
    left = net.source("a", "ts timestamp, k long, n long", time="ts")
    right = net.source("b", "ts timestamp, k int, x double", time="ts")
    net.output("plain", left.join(right, on=["k"], within="1300ms"))
    some = left.filter("n % 3 > 0")
    net.output("functions", some.join(right.filter("x > 1"), on=["k"], within="700ms"))
    sums = left.window("200ms").group_by("k").agg(n=hf.sum("n"))
    net.output("windows", sums.join(right, on=["k"], within="900ms"))
    doubles = right.map("ts", "CAST(k AS double) AS k", "x")
    net.output("types", left.join(doubles, on=["k"], within="500ms"))
    zeros = right.map("ts", "k", "if(x > 1, -0.0D, x) AS z").join(left, on=["k"], within="500ms")
    net.output("zeros", zeros.map("ts", "k", "n", z="CAST(z AS string)"))


@pytest.mark.parametrize("limits", [JobRows(selected=0), JobRows(60, 400, 0)])
def test_rows_selected_by_key_give_the_same_results(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, limits: JobRows
) -> None:
    net = hf.Network("history", bucket="100ms")
    joins(net)
    tables = {"a": rows_of(1), "b": rows_of(2)}
    expected = digests(run_network(net, tables, sessions, jobs="large"))
    monkeypatch.setitem(LIMITS, "small", limits)
    monkeypatch.setattr(retained, "PANE_FILES", 2)
    monkeypatch.setattr(retained, "KEYED_ROWS_MAX", 300)
    monkeypatch.setattr(key_index, "GROUP_ROWS", 16)
    monkeypatch.setattr(key_index, "BYTES_MAX", 50_000)
    found = run_network(net, tables, sessions, groups=(1, 2), pane_buckets=3)
    assert digests(found) == expected
