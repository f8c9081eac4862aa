"""Partitioned fragments on Spark: the same bits as without partitions (Flux, section 4.1)."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine.compiled import compile_network
from holdfast.engine.session import Sessions
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import TIMESTAMP, digest
from holdfast.verify.audit import audit
from holdfast.verify.fuzz.engine_run import run_network

WIDTH_US = 100_000
BUCKETS = 16


def running(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """Running count of each changed pair: this state cannot be rebuilt from an empty start."""
    counted = rows.group_by(["src", "dst"]).aggregate([("bytes", "count"), ("ts", "max")])
    counted = counted.rename_columns(["src", "dst", "n", "ts"])
    both = pa.concat_tables([state, counted.select(["src", "dst", "n"]).cast(state.schema)])
    totals = both.group_by(["src", "dst"]).aggregate([("n", "sum")])
    totals = totals.rename_columns(["src", "dst", "n"]).cast(state.schema)
    changed = counted.select(["ts", "src", "dst"]).join(totals, keys=["src", "dst"])
    return changed.select(["ts", "src", "dst", "n"]), totals


def network(lower: int | None = None, upper: int | None = None) -> hf.Network:
    """The paper's example: state by (src, dst), statistics by src."""
    net = hf.Network("sessions", bucket="100ms")
    packets = net.source(
        "packets", "ts timestamp, src string, dst string, bytes long", time="ts", clock="manual"
    )
    if lower is not None:
        packets = packets.on("sessions", by=["src", "dst"], partitions=lower)
    counts = packets.stateful(
        running, key=["src", "dst"], state="src string, dst string, n long",
        out="ts timestamp, src string, dst string, n long",
    )  # fmt: skip
    if upper is not None:
        counts = counts.on("stats", by="src", partitions=upper)
    top = counts.window("400ms", slide="200ms").group_by("src")
    net.output("stats", top.agg(n=hf.sum("n"), pairs=hf.count()))
    return net


def rows(bucket: int) -> dict[str, Any]:
    rng = np.random.default_rng(bucket)
    times = rng.integers(bucket * WIDTH_US, (bucket + 1) * WIDTH_US, 60)
    return {
        "ts": times,
        "src": np.char.add("s", rng.integers(0, 9, 60).astype(str)),
        "dst": np.char.add("d", rng.integers(0, 5, 60).astype(str)),
        "bytes": rng.integers(1, 1_000, 60),
    }


def result(net: hf.Network, storage: str | None = None) -> tuple[int, str]:
    with hf.run(net, storage=storage) as run:
        source = run.source("packets")
        client = run.client("stats")
        for bucket in range(BUCKETS):
            source.push(rows(bucket))
            source.advance((bucket + 1) * WIDTH_US)
        source.end()
        table = pa.concat_tables([table for table, _ in client])
        return table.num_rows, digest(table)


@pytest.fixture(scope="module")
def expected(sessions: Sessions) -> tuple[int, str]:
    unpartitioned = result(network())
    assert unpartitioned[0] > 50
    return unpartitioned


@pytest.mark.parametrize(("lower", "upper"), [(2, 3), (1, 1), (None, 2), (3, None)])
def test_partitions_give_the_same_bits(
    expected: tuple[int, str], lower: int | None, upper: int | None
) -> None:
    net = network(lower, upper)
    if (lower, upper) == (3, None):
        # Windows by src over rows split by (src, dst) would miss rows, so they are refused.
        with pytest.raises(hf.NetworkError, match="different partitions"):
            net.check()
    else:
        assert result(net) == expected


def test_a_partitioned_run_passes_the_audit(
    sessions: Sessions, tmp_path: Path, expected: tuple[int, str]
) -> None:
    net = network(2, 2)
    assert result(net, str(tmp_path)) == expected
    report = audit(network(2, 2), str(tmp_path), sessions.large)
    assert report.ok, report


# -- equal keys meet in one partition (G1) --------------------------------------------------------

KEYS: dict[str, tuple[str, str, list[Any]]] = {
    "int and bigint": ("int", "bigint", [-4, -3, -2, -1, 0, 1, 2, 3]),
    "tinyint and smallint": ("tinyint", "smallint", [-4, -3, -2, -1, 0, 1, 2, 3]),
    "float and double": ("float", "double", [0.0, 0.5, -1.5, math.nan, math.inf, 2.0, 3.0, 4.0]),
    "decimals": ("decimal(9,2)", "decimal(30,5)", [Decimal(n) / 4 for n in range(-4, 4)]),
}


def joined(left: str, right: str, partitions: int | None, *, cast: str = "") -> hf.Network:
    net = hf.Network("joined", bucket="100ms")
    a = net.source("a", f"ts timestamp, k {left}, x long", time="ts")
    b = net.source("b", f"ts timestamp, k {right}, y long", time="ts")
    if partitions is not None:
        a, b = (side.on("f", by="k", partitions=partitions) for side in (a, b))
    if cast:
        a = a.map("ts", "x", k=f"cast(k as {cast})")
    net.output("out", a.join(b, on=["k"], within="1s"))
    return net


def two_sides(left: str, right: str, keys: list[Any]) -> dict[str, pa.Table]:
    times = pa.array(range(len(keys)), TIMESTAMP)
    numbers = pa.array(range(len(keys)))
    kinds = [arrow_schema(f"k {kind}").field("k").type for kind in (left, right)]
    return {
        "a": pa.table({"ts": times, "k": pa.array(keys, kinds[0]), "x": numbers}),
        "b": pa.table({"ts": times, "k": pa.array(keys, kinds[1]), "y": numbers}),
    }


@pytest.mark.parametrize("types", KEYS)
def test_equal_keys_of_other_types_meet_in_one_partition(sessions: Sessions, types: str) -> None:
    left, right, keys = KEYS[types]
    rows = two_sides(left, right, keys)
    whole = run_network(joined(left, right, None), rows, sessions)["out"]
    assert whole.num_rows == len(keys)
    split = run_network(joined(left, right, 3), rows, sessions)["out"]
    assert digest(split) == digest(whole)


@pytest.mark.parametrize(
    ("left", "right"), [("bigint", "double"), ("decimal(9,2)", "int"), ("string", "int")]
)
def test_keys_of_types_that_are_not_routed_alike_are_refused(
    sessions: Sessions, left: str, right: str
) -> None:
    compile_network(joined(left, right, None), sessions.small)
    with pytest.raises(hf.NetworkError, match=r"different partitions: cast one of them with .map"):
        compile_network(joined(left, right, 2), sessions.small)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("nope", "by names the column 'nope', which is not among ts, k, m"),
        ("K", "by names the column 'K'"),
        ("m", "cannot be routed by 'm', because equal maps"),
    ],
)
def test_columns_that_cannot_route_rows_are_refused(
    sessions: Sessions, by: str, message: str
) -> None:
    net = hf.Network("by", bucket="100ms")
    rows = net.source("a", "ts timestamp, k int, m map<string,int>", time="ts")
    net.output("out", rows.on("f", by=by, partitions=2).filter("k > 0"))
    with pytest.raises(hf.NetworkError, match=message):
        compile_network(net, sessions.small)


def test_a_join_that_changes_a_routing_column_is_refused(sessions: Sessions) -> None:
    net = hf.Network("time", bucket="100ms")
    left = net.source("a", "ts timestamp, x int", time="ts").on("f", by="ts", partitions=2)
    right = net.source("b", "tr timestamp, ts timestamp", time="tr").on("f", by="ts", partitions=2)
    net.output("out", left.join(right, on=["ts"], within="1s"))
    with pytest.raises(hf.NetworkError, match="'ts', the time column of the left side"):
        compile_network(net, sessions.small)


def test_a_function_that_changes_a_routing_column_is_refused(sessions: Sessions) -> None:
    with pytest.raises(hf.NetworkError, match="changes the column 'k', by which fragment 'f'"):
        compile_network(joined("int", "bigint", 2, cast="bigint"), sessions.small)
    compile_network(joined("int", "bigint", None, cast="bigint"), sessions.small)
