"""A changed query on existing storage; Columns and UDFs as part of the identity."""

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


def test_a_changed_window_is_refused_and_the_original_query_continues(
    tmp_path: Path, sessions: Sessions
) -> None:
    """H4, as reported: the window changes from 2s to 4s and back."""
    storage, rows = str(tmp_path), 0

    def run_buckets(lo: int, hi: int) -> None:
        nonlocal rows
        with hf.run(windows("200ms"), storage=storage) as run:
            push(run, lo, hi)
            client = run.client("out")

            def take(table: Any, info: Any) -> None:
                nonlocal rows
                rows += table.num_rows

            consumer = threading.Thread(target=client.foreach_bucket, args=(take,))
            consumer.start()
            wait_for(lambda: (client.position or -1) >= hi - 1)
            client.close()
            consumer.join()
            run.raise_failure()

    run_buckets(0, 4)
    before = rows
    with pytest.raises(IdentityMismatch, match=r"window-2: size 200ms -> 400ms"):
        hf.run(windows("400ms"), storage=storage).start()
    with pytest.raises(IdentityMismatch, match=r"apply-1: function's factor 2 -> 3"):
        hf.run(windows("200ms", 3), storage=storage).start()
    run_buckets(4, 8)
    assert rows == 2 * before > 0


def test_columns_and_udfs_are_part_of_the_query(sessions: Sessions) -> None:
    def network(limit: int, addend: int, aggregate: Any) -> hf.Network:
        plus = F.udf(lambda x: x + addend, "double")
        net = hf.Network("columns")
        source = net.source("s", SCHEMA, time="ts")
        stream = source.filter(F.col("x") > limit)
        stream = stream.apply(lambda df: df.withColumn("x", plus("x")), python_udfs=True)
        net.output("out", stream.window("1s").group_by("key").agg(x=aggregate("x")))
        return net

    original = network(1, 2, F.sum)
    before = identity_of(original)
    compile_network(original, sessions.small)  # calls the UDF: Spark creates handles for it
    again = network(1, 2, F.sum)
    compile_network(again, sessions.small)
    assert identity_of(again) == before == identity_of(network(1, 2, F.sum))
    assert query_differences(before, identity_of(network(5, 2, F.sum)))[0].startswith(
        "filter-1: cond"
    )
    assert query_differences(before, identity_of(network(1, 3, F.sum)))[0].startswith("apply-2: ")
    assert "aggregate x" in query_differences(before, identity_of(network(1, 2, F.max)))[0]
