"""Names and literals of the user never collide with names that the engine uses itself (G11)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import holdfast as hf
from holdfast.engine.compiled import compile_network
from holdfast.engine.session import Sessions
from holdfast.storage.rows import TIMESTAMP, digest
from holdfast.verify.fuzz.engine_run import run_network

PLAIN = ("k1", "k2", "x", "v")
#: Names that are special to SQL, or that the engine used or uses inside its queries.
ODD = [("A.b", "_p", "_end", "`q`"), ("_seq", "_last", "_a0_n", "select"), ("i", "n", "s", "e")]


def sql(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def network(names: tuple[str, ...], merged: bool) -> hf.Network:
    key, other, x, v = names
    columns = ", ".join(f"{sql(n)} {t}" for n, t in zip(names, ("long", "string", "double", "long"),
                                                        strict=True))  # fmt: skip
    net = hf.Network("named", bucket="100ms")
    rows = net.source("rows", f"ts timestamp, {columns}", time="ts")
    agg: dict[str, Any] = {"total": hf.sum(sql(x)), "spread": hf.stddev(sql(x)),
                           "newest": hf.last(sql(v)), "most": hf.top_k(sql(v), 2)}  # fmt: skip
    size = {"slide": "100ms"} if merged else {}
    net.output("windows", rows.window("300ms", **size).group_by(key, other).agg(**agg))
    net.output("counts", rows.count_window(3, by=[key]).agg(**agg))
    net.output("tops", rows.window("200ms").apply(lambda df: df.orderBy(sql(v)).limit(3)))
    right = rows.map("ts", sql(key), w=sql(v))
    net.output("pairs", rows.join(right, on=[key], within="100ms"))
    return net


def table(names: tuple[str, ...]) -> pa.Table:
    rng = np.random.default_rng(2)
    columns = [rng.integers(0, 3, 40), np.char.add("w", rng.integers(0, 2, 40).astype(str)),
               rng.normal(size=40), rng.integers(0, 9, 40)]  # fmt: skip
    times = pa.array(np.sort(rng.integers(0, 900_000, 40)), TIMESTAMP)
    return pa.table({"ts": times, **dict(zip(names, columns, strict=True))})


def results(names: tuple[str, ...], merged: bool, sessions: Sessions) -> dict[str, str]:
    outputs = run_network(
        network(names, merged), {"rows": table(names)}, sessions, groups=(3,), pane_buckets=2
    )
    plain = dict(zip(names, PLAIN, strict=True))
    return {
        name: digest(out.rename_columns([plain.get(c, c) for c in out.column_names]))
        for name, out in outputs.items()
    }


@pytest.mark.parametrize("merged", [False, True])
def test_columns_may_have_any_name(sessions: Sessions, merged: bool) -> None:
    expected = results(PLAIN, merged, sessions)
    for names in ODD if merged else ODD[:1]:
        assert results(names, merged, sessions) == expected, names


def test_names_with_two_underscores_are_refused(sessions: Sessions) -> None:
    net = hf.Network("reserved", bucket="100ms")
    rows = net.source("rows", "ts timestamp, x long", time="ts")
    net.output("out", rows.map("ts", __end="x"))
    with pytest.raises(hf.NetworkError, match="'__end': this name is reserved"):
        compile_network(net, sessions.small)


def test_a_literal_may_look_like_an_aggregate(sessions: Sessions) -> None:
    net = hf.Network("literal", bucket="100ms")
    rows = net.source("rows", "ts timestamp, n long", time="ts")
    window = rows.window("100ms")

    def text() -> Any:
        return F.concat(F.lit("max(n)="), F.max("n").cast("string"), F.lit(" __a0 it's max(n)"))

    odd = hf.sum("if('{rows}' = '{' || 'rows}', n, 0)")
    net.output("out", window.agg(x=text, y=lambda: F.max("n") + F.max(F.col("n") + 1), z=odd))
    data = pa.table({"ts": pa.array([10, 20], TIMESTAMP), "n": [1, 7]})
    (row,) = run_network(net, {"rows": data}, sessions)["out"].to_pylist()
    assert (row["x"], row["y"], row["z"]) == ("max(n)=7 __a0 it's max(n)", 15, 8)
