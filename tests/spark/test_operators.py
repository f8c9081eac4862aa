"""Every operator against an independent oracle (`oracles.py`).

Two networks contain nearly all operators. Each runs once over rows before 1970, around 1970 and in
the year 2200; every test checks one of their outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import holdfast as hf
from holdfast.engine.session import Sessions
from holdfast.verify.fuzz.engine_run import run_network
from tests.spark import oracles

MS = 1_000
YEAR_2200_US = 7_258_118_400_000_000
#: Name of the output: size, slide and keys of its windows. Buckets last 250 ms.
WINDOWS = {
    "tumbling": (500 * MS, 500 * MS, ("k",)),
    "odd": (700 * MS, 300 * MS, ("k",)),
    "short": (90 * MS, 40 * MS, ("k", "w")),
    "everything": (1_000 * MS, 250 * MS, ()),
}
Found = dict[str, pa.Table]


def keyed_total(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """Running count and sum of `i` per key; one result per bucket and key with rows."""
    new = (
        rows.to_pandas()
        .groupby("k", dropna=False, as_index=False)
        .agg(n=("i", "size"), total=("i", lambda values: int(values.dropna().sum())))
    )
    totals = pd.concat([state.to_pandas(), new]).groupby("k", dropna=False, as_index=False).sum()
    totals = totals.astype({"n": "int64", "total": "int64"})
    touched = totals[totals["k"].isin(new["k"])]
    stamped = touched.assign(ts=pd.Timestamp(info.end_us - 1, unit="us", tz="UTC"))
    return (
        pa.Table.from_pandas(stamped, preserve_index=False),
        pa.Table.from_pandas(totals, schema=state.schema, preserve_index=False),
    )


QUIET_US = 600 * MS


def sessions_by_timer(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """After 600 ms without rows a timer in the state gives the result of a key."""
    open_sessions = {row["k"]: [row["n"], row["due"]] for row in state.to_pylist()}
    quiet, results = pd.Timedelta(QUIET_US, "us"), []
    for row in rows.select(["k", "ts"]).to_pylist():
        if row["k"] in open_sessions and open_sessions[row["k"]][1] <= row["ts"]:
            n, due = open_sessions.pop(row["k"])
            results.append({"k": row["k"], "n": n, "ts": due})
        n, _ = open_sessions.get(row["k"], (0, None))
        open_sessions[row["k"]] = [n + 1, row["ts"] + quiet]
    end = pd.Timestamp(info.end_us, unit="us", tz="UTC")
    for key in [key for key, (_, due) in open_sessions.items() if due < end]:
        n, due = open_sessions.pop(key)
        results.append({"k": key, "n": n, "ts": due})
    state_rows = [{"k": key, "n": n, "due": due} for key, (n, due) in open_sessions.items()]
    out = pa.schema([("k", pa.string()), ("n", pa.int64()), ("ts", state.schema.field("due").type)])
    return pa.Table.from_pylist(results, out), pa.Table.from_pylist(state_rows, state.schema)


def doubled(df: Any) -> Any:
    return df.select("ts", "k", F.explode(F.array("i", F.col("i") + 1)).alias("i"))


def busiest(df: Any) -> Any:
    """A DataFrame function over one window: rows and distinct words of each key."""
    return df.groupBy("k").agg(F.count("*").alias("n"), F.count_distinct("w").alias("words"))


AGGREGATES: dict[str, Any] = {
    "n": hf.count(), "nx": hf.count("x"), "si": hf.sum("i"), "sd": hf.sum("d"), "sx": hf.sum("x"),
    "mn": hf.min("x"), "mx": hf.max("x"), "mw": hf.max("w"), "av": hf.avg("x"), "ai": hf.avg("i"),
    "sy": hf.stddev("y"), "fx": hf.first("x"), "lx": hf.last("x"), "fw": hf.first("w"),
    "lw": hf.last("w"), "words": hf.approx_distinct("w"),
}  # fmt: skip
RANKS: dict[str, Any] = {
    "median": hf.quantile("x", 0.5), "high": hf.quantile("y", 0.9, error=0.001),
    "top": hf.top_k("w", 2), "sx": hf.sum("x"), "n": hf.count(),
    "plain": lambda: F.sum("y") / F.count("y"), "span": lambda: F.max("i") - F.min("i"),
    "ratio": lambda: F.sum(F.when(F.col("i") > 0, F.col("i")).otherwise(0)) / F.count("*"),
    "dev": lambda: F.stddev("y"), "var": lambda: F.var_pop("y"),
}  # fmt: skip


def one_stream() -> hf.Network:
    net = hf.Network("one", bucket="250ms", partitions=3)
    a = net.source("a", oracles.SCHEMA, time="ts")
    net.output("applied", a.apply(doubled))
    positive = a.filter("i > 0 and k is not null")
    net.output("filtered", positive)
    net.output("mapped", a.map("ts", "k", half="i / 2", word="upper(w)"))
    net.output("united", a.filter("i > 0").union(a.filter("i < 0"), positive))
    for name, (size, slide, keys) in WINDOWS.items():
        chosen = RANKS if name in ("odd", "everything") else AGGREGATES
        windowed = a.window(f"{size}us", slide=f"{slide}us")
        net.output(name, (windowed.group_by(*keys) if keys else windowed).agg(**chosen))
    net.output("function", a.window("700ms", slide="300ms").apply(busiest))
    inner = a.window("100ms").group_by("k").agg(s=hf.sum("i"), n=hf.count())
    net.output("inner", inner.filter("n > 1"))  # read twice: the results fan out
    net.output("outer", inner.window("600ms", slide="200ms").group_by("k").agg(top=hf.max("s")))
    net.output(
        "threes", a.count_window(3, by="k").agg(n=hf.count(), s=hf.sum("i"), lw=hf.last("w"))
    )
    net.output("fours", a.count_window(4, by="k").agg(s=hf.sum("i"), mw=hf.min("w")))
    net.output("fives", a.count_window(5, slide=2, by=["k"]).agg(s=hf.sum("i"), mx=hf.max("x")))
    total = a.stateful(
        keyed_total, key="k", state="k string, n long, total long",
        out="k string, n long, total long, ts timestamp",
    )  # fmt: skip
    net.output("totals", total)
    net.output("sessions", a.stateful(
        sessions_by_timer, key="k", state="k string, n long, due timestamp",
        out="k string, n long, ts timestamp", timer="due",
    ))  # fmt: skip
    return net


def two_streams() -> hf.Network:
    net = hf.Network("two", bucket="250ms", partitions=2)
    a = net.source("a", oracles.SCHEMA, time="ts")
    b = net.source("b", "seen timestamp, k string, z long", time="seen")
    left = a.map("ts", "k", "i")
    net.output("on_columns", left.join(b, on=["k"], within="300ms"))
    right = b.map("seen", "z", key="k")
    net.output(
        "on_sql",
        left.join(right, on="l.i > r.z and (l.k = r.key or r.key is null)", within="40ms"),
    )
    wide = left.window("500ms", slide="250ms").group_by("k").agg(s=hf.sum("i"))
    narrow = b.window("200ms").group_by("k").agg(z=hf.max("z")).map("seen", "k", "z")
    net.output("of_windows", wide.map("ts", "k", "s").join(narrow, on=["k"], within="260ms"))
    return net


@pytest.fixture(scope="module")
def a() -> pa.Table:
    rng = np.random.default_rng(20)
    return pa.concat_tables(
        [
            oracles.rows_of(rng, 260, first_us=-6 * oracles.WIDTH_US),
            oracles.rows_of(rng, 120, first_us=YEAR_2200_US, not_finite=0.2),
            oracles.rows_of(rng, 90, first_us=-3_000_000_000_000_000, keys=["only"]),
        ]
    )


@pytest.fixture(scope="module")
def b(a: pa.Table) -> pa.Table:
    rng = np.random.default_rng(21)
    near = a["ts"].cast(pa.int64()).to_numpy()[rng.integers(0, a.num_rows, 150)]
    at = near + rng.choice([-300_000, -40_000, 0, 0, 39_999, 40_001, 300_001], 150)
    return pa.table(
        {
            "seen": pa.array(at, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            "k": pa.array([oracles.KEYS[n] for n in rng.integers(0, 7, 150)], pa.string()),
            "z": pa.array(rng.integers(-(10**6), 10**6, 150)),
        }
    )


@pytest.fixture(scope="module")
def one(sessions: Sessions, a: pa.Table) -> Found:
    return run_network(one_stream(), {"a": a}, sessions, groups=(10**15,))


@pytest.fixture(scope="module")
def two(sessions: Sessions, a: pa.Table, b: pa.Table) -> Found:
    return run_network(two_streams(), {"a": a, "b": b}, sessions, groups=(10**15,))


# -- row by row ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "query"),
    [
        ("applied", "select ts, k, unnest([i, i + 1]) as i from a"),
        ("filtered", "select * from a where i > 0 and k is not null"),
        ("mapped", "select ts, k, i / 2 as half, upper(w) as word from a"),
        ("united", "select * from a where i <> 0 union all "
                   "select * from a where i > 0 and k is not null"),
    ],
)  # fmt: skip
def test_row_by_row_operators_match_the_oracle(
    one: Found, a: pa.Table, output: str, query: str
) -> None:
    assert oracles.differences(one[output], oracles.sql(query, a=a)) == []


# -- time windows ----------------------------------------------------------------------------------


def by_window(results: pa.Table, keys: tuple[str, ...]) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = oracles.micros(results).to_pylist()
    named = {(*(row[key] for key in keys), row["ts"]): row for row in rows}
    assert len(named) == len(rows)
    return named


@pytest.mark.parametrize("output", ["tumbling", "short"])
def test_exact_aggregates_of_time_windows_match_the_oracle(
    one: Found, a: pa.Table, output: str
) -> None:
    size, slide, keys = WINDOWS[output]
    wanted = oracles.windows(
        a, size, slide, keys,
        {"n": "count(*)", "nx": "count(x)", "si": oracles.SUM_LONG, "ai": "avg(i)",
         "sd": "sum(d)::decimal(22,3)", "mn": "min(x) + 0", "mx": "max(x) + 0", "mw": "max(w)",
         "fw": oracles.FIRST_W, "lw": oracles.LAST_W, "words": "count(distinct w)"},
    )  # fmt: skip
    results = one[output].select(wanted.column_names)
    assert oracles.differences(results.drop("ai"), wanted.drop("ai")) == []
    averages = by_window(results, keys)
    for row in by_window(wanted, keys).items():
        assert oracles.close(averages[row[0]]["ai"], row[1]["ai"], 1e-9)


Of = Callable[[list[Any], list[tuple[int, Any]]], tuple[Any, float]]
DOUBLES: list[tuple[str, str, str, Of]] = [
    (output, column, of, fn)
    for output in ("tumbling", "short")
    for column, of, fn in (
        ("sx", "x", lambda vals, _: oracles.exact_sum(vals)),
        ("av", "x", lambda vals, _: _mean(vals)),
        ("sy", "y", lambda vals, _: oracles.spread(vals)),
        ("fx", "x", lambda _, rows: (oracles.first(rows), 0.0)),
        ("lx", "x", lambda _, rows: (oracles.last(rows), 0.0)),
    )
] + [
    (output, column, of, fn)
    for output in ("odd", "everything")
    for column, of, fn in (
        ("sx", "x", lambda vals, _: oracles.exact_sum(vals)),
        ("plain", "y", lambda vals, _: _mean(vals)),
        ("dev", "y", lambda vals, _: oracles.spread(vals)),
        ("median", "x", lambda vals, _: _within(oracles.quantile(vals, 0.5), 0.01)),
        ("high", "y", lambda vals, _: _within(oracles.quantile(vals, 0.9), 0.001)),
    )
]


def _mean(values: list[float | None]) -> tuple[float | None, float]:
    total, allowed = oracles.exact_sum(values)
    n = sum(value is not None for value in values)
    return (None, 0.0) if total is None else (total / n, allowed / n)


def _within(value: float | None, error: float) -> tuple[float | None, float]:
    tiny = 5e-324  # subnormals have no relative precision
    return value, 0.0 if value is None else 1.000001 * error * abs(value) + tiny


@pytest.mark.parametrize(("output", "column", "of", "fn"), DOUBLES, ids=lambda v: str(v)[:10])
def test_double_aggregates_of_time_windows_match_the_oracle(
    one: Found, a: pa.Table, output: str, column: str, of: str, fn: Of
) -> None:
    size, slide, keys = WINDOWS[output]
    results = by_window(one[output], keys)
    wanted = oracles.groups(a, size, slide, keys, of)
    assert results.keys() == wanted.keys()
    for key, rows in wanted.items():
        value, allowed = fn([v for _, v in rows], rows)
        assert oracles.close(results[key][column], value, allowed), (
            key,
            results[key][column],
            value,
        )


@pytest.mark.parametrize("output", ["odd", "everything"])
def test_spark_aggregate_columns_are_decomposed(one: Found, a: pa.Table, output: str) -> None:
    size, slide, keys = WINDOWS[output]
    wanted = oracles.windows(
        a, size, slide, keys,
        {"span": "max(i) - min(i)", "n": "count(*)",
         "ratio": "sum(case when i > 0 then i else 0 end) / count(*)"},
    )  # fmt: skip
    results = by_window(one[output], keys)
    for key, row in by_window(wanted, keys).items():
        assert (results[key]["span"], results[key]["n"]) == (row["span"], row["n"])
        assert results[key]["ratio"] == pytest.approx(row["ratio"], rel=1e-15)


@pytest.mark.parametrize("output", ["odd", "everything"])
def test_top_k_counts_are_exact_and_ties_prefer_the_smaller_value(
    one: Found, a: pa.Table, output: str
) -> None:
    size, slide, keys = WINDOWS[output]
    results = by_window(one[output], keys)
    for key, rows in oracles.groups(a, size, slide, keys, "w").items():
        assert results[key]["top"] == oracles.top_k([w for _, w in rows], 2)


def test_a_window_function_matches_the_oracle(one: Found, a: pa.Table) -> None:
    wanted = oracles.windows(
        a, 700 * MS, 300 * MS, ["k"], {"n": "count(*)", "words": "count(distinct w)"}
    )
    assert oracles.differences(one["function"], wanted.drop("window_start")) == []


def test_a_window_over_window_results_matches_the_oracle(one: Found, a: pa.Table) -> None:
    inner = oracles.windows(a, 100 * MS, 100 * MS, ["k"], {"s": oracles.SUM_LONG, "n": "count(*)"})
    busy = oracles.sql("select * from inner_rows where n > 1", inner_rows=inner)
    outer = oracles.windows(
        inner.drop("window_start"), 600 * MS, 200 * MS, ["k"], {"top": "max(s)"}
    )
    assert oracles.differences(one["inner"], busy) == []
    assert oracles.differences(one["outer"], outer) == []


# -- joins -----------------------------------------------------------------------------------------


def test_a_join_on_columns_matches_the_oracle(two: Found, a: pa.Table, b: pa.Table) -> None:
    wanted = oracles.sql(
        "select greatest(ts, seen) as ts, l.k, i, seen, z from a l, b r "
        "where l.k = r.k and abs(ts - seen) <= 300000",
        a=a, b=b,
    )  # fmt: skip
    assert wanted.num_rows > 50
    assert oracles.differences(two["on_columns"], wanted) == []


def test_a_join_on_any_predicate_matches_the_oracle(two: Found, a: pa.Table, b: pa.Table) -> None:
    wanted = oracles.sql(
        "select greatest(ts, seen) as ts, l.k, i, seen, z, r.k as key from a l, b r "
        "where i > z and (l.k = r.k or r.k is null) and abs(ts - seen) <= 40000",
        a=a, b=b,
    )  # fmt: skip
    assert wanted.num_rows > 10
    assert oracles.differences(two["on_sql"], wanted) == []


def test_a_join_of_windows_matches_the_oracle(two: Found, a: pa.Table, b: pa.Table) -> None:
    wide = oracles.windows(a, 500 * MS, 250 * MS, ["k"], {"s": oracles.SUM_LONG})
    narrow = oracles.windows(
        b.rename_columns({"seen": "ts"}), 200 * MS, 200 * MS, ["k"], {"z": "max(z)"}
    )
    wanted = oracles.sql(
        "select greatest(l.ts, r.ts) as ts, l.k, s, r.ts as seen, z from wide l, narrow r "
        "where l.k = r.k and abs(l.ts - r.ts) <= 260000",
        wide=wide, narrow=narrow,
    )  # fmt: skip
    assert wanted.num_rows > 50
    assert oracles.differences(two["of_windows"], wanted) == []


# -- keyed state -----------------------------------------------------------------------------------


def test_tumbling_count_windows_match_the_oracle(one: Found, a: pa.Table) -> None:
    wanted = oracles.count_windows(
        a, 3, 3, {"n": "count(*)", "s": oracles.SUM_LONG, "lw": oracles.LAST_W}
    )
    assert oracles.differences(one["threes"], wanted) == []
    wanted = oracles.count_windows(a, 4, 4, {"s": oracles.SUM_LONG, "mw": "min(w)"})
    assert oracles.differences(one["fours"], wanted) == []


def test_sliding_count_windows_match_the_oracle(one: Found, a: pa.Table) -> None:
    wanted = oracles.count_windows(a, 5, 2, {"s": oracles.SUM_LONG, "mx": "max(x) + 0"})
    assert oracles.differences(one["fives"], wanted) == []


def test_stateful_is_called_once_per_bucket_with_rows(one: Found, a: pa.Table) -> None:
    width = oracles.WIDTH_US
    wanted = oracles.sql(
        f"""with buckets as (
              select k, floor_to(ts, {width}) + {width - 1} as due, count(*) as n,
                     coalesce(sum(i), 0) as total from a group by all)
            select k, due as ts, (sum(n) over w)::bigint as n, (sum(total) over w)::bigint as total
            from buckets window w as (partition by k order by due)""",
        a=a,
    )
    assert oracles.differences(one["totals"], wanted) == []


def test_a_timer_fires_in_buckets_without_rows(one: Found, a: pa.Table) -> None:
    assert oracles.differences(one["sessions"], oracles.sessions(a, QUIET_US)) == []


# -- extremes --------------------------------------------------------------------------------------


def test_a_hundred_thousand_keys_match_the_oracle(sessions: Sessions) -> None:
    count = 200_000
    rng = np.random.default_rng(5)
    rows = pa.table(
        {
            "ts": pa.array(rng.integers(0, 800_000, count), pa.int64()).cast(
                pa.timestamp("us", tz="UTC")
            ),
            "k": pa.array(rng.permutation(np.arange(count) % 100_000)),
            "i": pa.array(rng.integers(-(10**9), 10**9, count)),
        }
    )
    net = hf.Network("many", bucket="250ms", partitions=2)
    source = net.source("a", "ts timestamp, k long, i long", time="ts")
    agg = {"n": hf.count(), "si": hf.sum("i"), "mx": hf.max("i")}
    net.output("windows", source.window("500ms", slide="250ms").group_by("k").agg(**agg))
    net.output("pairs", source.count_window(2, by="k").agg(s=hf.sum("i")))
    outputs = run_network(net, {"a": rows}, sessions)
    sql = {"n": "count(*)", "si": oracles.SUM_LONG, "mx": "max(i)"}
    wanted = oracles.windows(rows, 500 * MS, 250 * MS, ["k"], sql)
    assert oracles.differences(outputs["windows"], wanted) == []
    pairs = oracles.sql("select k, sum(i)::bigint as s, max(ts) as ts from a group by k", a=rows)
    assert oracles.differences(outputs["pairs"], pairs) == []
