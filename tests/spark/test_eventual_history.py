"""Runs that recover time windows, joins, and stateful operators behind others, with CEC.

Sources delete what the node has released, so a node that needs more than it reported would fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import holdfast as hf
from holdfast.engine.session import Sessions
from tests.processes.kill_app import totals
from tests.spark.test_eventual_checkpoints import results

#: Small steps, so that there are many.
OPTIONS = hf.Options(archive=False, group_buckets_max=2)


def busiest(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").agg(F.count(F.lit(1)).alias("n")).orderBy("n", "key").limit(2)


def histories(net: hf.Network, source: Any) -> None:
    """Operators without keyed state."""
    some, x = source.filter("x > 0.1"), hf.sum("x")
    net.output("tumbling", some.window("700ms").group_by("key").agg(x=x, n=hf.count()))
    net.output("sliding", some.window("2s", slide="300ms").group_by("key").agg(x=x))
    net.output("function", some.window("600ms", slide="200ms").apply(busiest))
    late = source.filter("x > 0.8").map("ts", "key", "x AS y")
    net.output("by_key", some.filter("x < 0.4").join(late, on=["key"], within="900ms"))
    other = late.map("ts", "key AS k", "y")
    net.output("by_condition", late.join(other.map("ts", "k", "y AS z"), on="l.y < r.z",
                                         within="250ms"))  # fmt: skip


def keyed(net: hf.Network, source: Any) -> None:
    net.output("counts", source.filter("x > 0.1").count_window(7, by="key").agg(x=hf.sum("x")))
    net.output("totals", total(source))


def total(stream: Any) -> Any:
    return stream.stateful(
        totals, key="key", state="key string, total long",
        out="key string, total long, ts timestamp",
    )  # fmt: skip


def mixed(net: hf.Network, source: Any) -> None:
    histories(net, source)
    keyed(net, source)


def stacked(net: hf.Network, source: Any) -> None:
    """Every kind of stateful operator behind every other one."""
    pairs = source.count_window(2, by="key").agg(x=hf.sum("x"))
    sums = source.window("300ms").group_by("key").agg(y=hf.sum("x"))
    net.output("counts_of_counts", pairs.filter("x > 0.5").count_window(3, by="key").agg(
        x=hf.sum("x")))  # fmt: skip
    net.output("windows_of_counts", pairs.window("900ms", slide="300ms").group_by("key").agg(
        x=hf.max("x")))  # fmt: skip
    net.output("counts_of_windows", sums.count_window(3, by="key").agg(y=hf.max("y")))
    joined = pairs.join(sums, on=["key"], within="400ms")
    net.output("joined", joined.filter("x > y"))
    net.output(
        "totals_of_joins", total(net.union(joined.map("ts", "key"), source.map("ts", "key")))
    )


def network(build: Any, recovery: Any = "cec", **limits: int) -> hf.Network:
    net = hf.Network("histories", bucket="100ms")
    build(net, net.source("s", "ts timestamp, key string, x double", time="ts", clock="manual"))
    net.protect("main", recovery=recovery, **limits)
    return net


@pytest.fixture(scope="module")
def expected(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return {
        build: results(network(build, "checkpoint"), tmp_path_factory.mktemp("expected"))[0]
        for build in (mixed, stacked)
    }


@pytest.mark.parametrize(
    ("build", "limits"),
    [
        (histories, {"recovery_rows": 60}),
        (mixed, {"recovery_rows": 60, "recovery_entries": 8}),
        (stacked, {}),
    ],
)
def test_restarts_from_eventual_checkpoints_give_the_same_bits(
    build: Any, limits: dict[str, int], expected: dict[Any, Any], tmp_path: Path
) -> None:
    found, _ = results(network(build, **limits), tmp_path, OPTIONS)
    of_all = expected[stacked if build is stacked else mixed]
    assert found == {name: of_all[name] for name in found}
    assert all(rows for rows, _ in found.values())
