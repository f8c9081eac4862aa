"""The history of joins: many small files become one, and no bucket is lost."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine import retained
from holdfast.engine.session import Sessions
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import Jobs, digests, run_network

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
