"""A query that was changed on old storage, and code that only Spark can see into."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import holdfast as hf
from holdfast.engine.compiled import compile_network
from holdfast.engine.session import Sessions
from holdfast.errors import IdentityMismatch
from holdfast.model.identity import identity_of, query_differences
from tests.spark.test_running import push, wait_for

SCHEMA = "ts timestamp, key string, x double"


def windows(size: str, factor: int = 2) -> hf.Network:
    net = hf.Network("windows", bucket="100ms")
    source = net.source("s", SCHEMA, time="ts", clock="manual")
    scaled = source.apply(lambda df: df.withColumn("x", F.col("x") * factor))
    net.output("out", scaled.window(size).group_by("key").agg(x=hf.sum("x")))
    return net


def test_a_changed_window_is_refused_and_the_old_one_goes_on(
    tmp_path: Path, sessions: Sessions
) -> None:
    """H4, as it was found: 2s to 4s and back."""
    storage, rows = str(tmp_path), 0

    def go_on(lo: int, hi: int) -> None:
        nonlocal rows
        with hf.run(windows("200ms"), storage=storage) as run:
            push(run, lo, hi)
            client = run.client("out")

            def take(table: Any, info: Any) -> None:
                nonlocal rows
                rows += table.num_rows

            reader = threading.Thread(target=client.foreach_bucket, args=(take,))
            reader.start()
            wait_for(lambda: (client.position or -1) >= hi - 1)
            client.close()
            reader.join()
            run.raise_failure()

    go_on(0, 4)
    before = rows
    with pytest.raises(IdentityMismatch, match=r"window-2: size 200ms -> 400ms"):
        hf.run(windows("400ms"), storage=storage).start()
    with pytest.raises(IdentityMismatch, match=r"apply-1: function's factor 2 -> 3"):
        hf.run(windows("200ms", 3), storage=storage).start()
    go_on(4, 8)
    assert rows == 2 * before > 0


def test_columns_and_udfs_are_part_of_the_query(sessions: Sessions) -> None:
    def made(limit: int, more: int, aggregate: Any) -> hf.Network:
        plus = F.udf(lambda x: x + more, "double")
        net = hf.Network("columns")
        source = net.source("s", SCHEMA, time="ts")
        kept = source.filter(F.col("x") > limit)
        kept = kept.apply(lambda df: df.withColumn("x", plus("x")), python_udfs=True)
        net.output("out", kept.window("1s").group_by("key").agg(x=aggregate("x")))
        return net

    one = made(1, 2, F.sum)
    before = identity_of(one)
    compile_network(one, sessions.small)  # which calls the udf: Spark makes handles for it
    again = made(1, 2, F.sum)
    compile_network(again, sessions.small)
    assert identity_of(again) == before == identity_of(made(1, 2, F.sum))
    assert query_differences(before, identity_of(made(5, 2, F.sum)))[0].startswith("filter-1: cond")
    assert query_differences(before, identity_of(made(1, 3, F.sum)))[0].startswith("apply-2: ")
    assert "aggregate x" in query_differences(before, identity_of(made(1, 2, F.max)))[0]
