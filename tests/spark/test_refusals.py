"""Queries are refused before they run: one message per violation, without Spark traces."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType

import holdfast as hf
from holdfast.engine.compiled import Compiled, compile_network
from holdfast.engine.session import Sessions
from holdfast.errors import HoldfastError, InputError, NetworkError, NotDeterministic
from holdfast.verify.fuzz.engine_run import run_network

Build = Callable[[hf.Network, hf.Stream], hf.Stream]


def network(build: Build) -> hf.Network:
    net = hf.Network("refused", bucket="1s")
    rows = net.source("a", "ts timestamp, k string, x double, i long", time="ts")
    net.output("out", build(net, rows))
    return net


def compiled(build: Build, sessions: Sessions) -> Compiled:
    return compile_network(network(build), sessions.small)


def refusal(build: Build, sessions: Sessions) -> str:
    with pytest.raises(NetworkError) as raised:
        compiled(build, sessions)
    (message,) = raised.value.violations
    assert raised.value.__cause__ is None, "the message has no chained exception"
    for trace in ("org.apache.spark", "py4j", "Traceback", "JVM stacktrace", "SQLSTATE", "\n"):
        assert trace not in message
    assert not re.match(r"\[[A-Z_.]+\]", message.split(": ", 1)[1]), (
        "the message has no Spark error code"
    )
    assert 20 < len(message) < 500
    return message


def applied(fn: Callable[[Any], Any], **options: Any) -> Build:
    return lambda net, rows: rows.apply(fn, **options)


def agg(**aggregates: Any) -> Build:
    return lambda net, rows: rows.window("2s").group_by("k").agg(**aggregates)


@F.udf(DoubleType())  # type: ignore[untyped-decorator]
def plus_one(x: float | None) -> float | None:
    return None if x is None else x + 1.0


@F.pandas_udf(DoubleType())  # type: ignore[call-overload, untyped-decorator]
def running_total(x: pd.Series) -> pd.Series:
    return x.cumsum()


@F.udf(DoubleType())  # type: ignore[untyped-decorator]
def by_chance(x: float) -> float:
    return random.random()


NOT_ROW_BY_ROW = "does not work row by row"
APPLY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rand": (lambda df: df.withColumn("r", F.rand()), "rand()"),
    "rand with a seed": (lambda df: df.withColumn("r", F.rand(7)), "rand()"),
    "rand in a filter": (lambda df: df.filter("rand() < 0.5"), "rand()"),
    "rand in a lambda": (
        lambda df: df.withColumn("r", F.expr("transform(array(x), e -> e + randn())")), "randn()"),
    "now": (lambda df: df.withColumn("n", F.current_timestamp()), "current_timestamp()"),
    "now, spelled otherwise": (lambda df: df.withColumn("n", F.expr("now()")), "now()"),
    "unix_timestamp()": (lambda df: df.withColumn("n", F.unix_timestamp()), "current_timestamp()"),
    "today": (lambda df: df.filter("current_date() > date'2020-01-01'"), "current_date()"),
    "increasing id": (
        lambda df: df.withColumn("n", F.monotonically_increasing_id()),
        "monotonically_increasing_id()"),
    "partition id": (lambda df: df.withColumn("n", F.spark_partition_id()), "spark_partition_id()"),
    "uuid": (lambda df: df.withColumn("u", F.expr("uuid()")), "uuid()"),
    "shuffle": (lambda df: df.withColumn("s", F.shuffle(F.array("x", "i"))), "shuffle()"),
    "file name": (lambda df: df.withColumn("f", F.input_file_name()), "input_file_name()"),
    "limit": (lambda df: df.limit(3), "limit() without an order"),
    "ordered limit": (lambda df: df.orderBy("x").limit(3), NOT_ROW_BY_ROW),
    "sample": (lambda df: df.sample(0.5), "sample() picks rows at random"),
    "sort": (lambda df: df.orderBy("x"), NOT_ROW_BY_ROW),
    "group": (lambda df: df.groupBy("ts").count(), NOT_ROW_BY_ROW),
    "distinct": (lambda df: df.distinct(), NOT_ROW_BY_ROW),
    "drop duplicates": (lambda df: df.dropDuplicates(["k"]), NOT_ROW_BY_ROW),
    "join with itself": (
        lambda df: df.join(df.select(F.col("k").alias("q")), F.expr("k = q")), NOT_ROW_BY_ROW),
    "collect": (lambda df: df.filter(F.col("x") > df.collect()[0]["x"]), "runs an action"),
    "count": (lambda df: df.withColumn("n", F.lit(df.count())), "runs an action"),
    "toPandas": (lambda df: df.filter(F.lit(len(df.toPandas()) > 0)), "runs an action"),
    "toArrow": (lambda df: df.filter(F.lit(df.toArrow().num_rows > 0)), "runs an action"),
    "rows from outside": (
        lambda df: df.union(df.sparkSession.sql("select timestamp_seconds(1), 'k', 1D, 1L")),
        "belong to no bucket"),
    "an undeclared UDF": (lambda df: df.withColumn("x", plus_one("x")), "python_udfs=True"),
    "mapInArrow": (
        lambda df: df.mapInArrow(lambda batches: batches, df.schema), "user-defined function"),
    "time dropped": (lambda df: df.select("k"), "no time column 'ts'"),
    "time changed": (
        lambda df: df.withColumn("ts", F.expr("ts + interval 1 day")), "changes the time column"),
    "time replaced": (
        lambda df: df.drop("ts").withColumn("ts", F.expr("timestamp_seconds(i)")),
        "changes the time column"),
    "time changed in half a union": (
        lambda df: df.union(df.withColumn("ts", F.expr("ts + interval 1 second"))),
        "changes the time column"),
    "time twice": (lambda df: df.select("*", "ts"), "'ts' twice"),
    "a column twice": (lambda df: df.select("*", F.col("x").alias("X")), "the column x twice"),
    "an unknown column": (lambda df: df.select("ts", "nope"), "columns are: ts, k, x, i"),
    "no frame": (lambda df: None, "must return a DataFrame, found NoneType"),
    "an exception": (lambda df: {}["gone"], "KeyError: 'gone'"),
    "a column without a type": (lambda df: df.withColumn("v", F.lit(None)), "cast the null"),
}  # fmt: skip


@pytest.mark.parametrize("case", APPLY)
def test_apply_refuses_invalid_functions(sessions: Sessions, case: str) -> None:
    fn, expected = APPLY[case]
    message = refusal(applied(fn), sessions)
    assert expected in message
    assert message.startswith("apply-1: ")


def test_not_deterministic_is_not_an_input_error() -> None:
    assert issubclass(NotDeterministic, HoldfastError)
    assert not issubclass(NotDeterministic, InputError)


OTHERS: dict[str, tuple[Build, str]] = {
    "filter on an unknown column": (
        lambda net, rows: rows.filter("nope > 1"), "columns are: ts, k"),
    "filter that is no SQL": (lambda net, rows: rows.filter("x >"), "Syntax error"),
    "map of an unknown column": (
        lambda net, rows: rows.map("ts", n="nope + 1"), "columns are: ts, k"),
    "map without the time": (lambda net, rows: rows.map("k"), "no time column 'ts'"),
    "map that computes the time": (
        lambda net, rows: rows.map("k", ts="ts - interval 1 day"), "changes the time column"),
    "sum of an unknown column": (agg(s=hf.sum("nope")), "cannot be computed from columns ts, k"),
    "sum of text": (agg(s=hf.sum("k")), "string is not a number"),
    "sum with chance": (agg(s=hf.sum("x * rand()")), "rand()"),
    "sum with the clock": (
        agg(s=hf.sum("unix_seconds(current_timestamp())")), "current_timestamp()"),
    "max of maps": (agg(m=hf.max("map(k, x)")), "have no order"),
    "group by an unknown column": (
        lambda net, rows: rows.window("1s").group_by("nope").agg(n=hf.count()),
        "'nope', which is not among ts, k, x, i"),
    "group by time": (
        lambda net, rows: rows.window("1s").group_by("ts").agg(n=hf.count()), "for its own time"),
    "group by the start of another window": (
        lambda net, rows: rows.window("1s").agg(n=hf.count()).window("2s")
        .group_by("window_start").agg(m=hf.max("n")), "for its own time"),
    "an aggregate with the name of a key": (agg(k=hf.count()), "'k' is taken"),
    "an aggregate with the name of the time": (agg(ts=hf.count()), "'ts' is taken"),
    "an aggregate called window_start": (agg(window_start=hf.count()), "'window_start' is taken"),
    "an aggregate that is a number": (agg(n=3), "found int"),
    "a column that is no aggregate": (agg(n=lambda: F.col("x") + 1), "outside an aggregate"),
    "an aggregate of an unknown column": (agg(n=lambda: F.sum("nope")), "columns are: ts, k, x, i"),
    "a constant that is no aggregate": (agg(n=lambda: F.lit(1)), "is not an aggregate"),
    "collect_list": (agg(n=lambda: F.collect_list("x")), "cannot be merged from"),
    "count distinct": (agg(n=lambda: F.count_distinct("x")), "cannot be merged from"),
    "sum distinct": (agg(n=lambda: F.sum_distinct("i") + 1), "cannot be merged from"),
    "a randomised percentile": (agg(n=lambda: F.percentile_approx("x", 0.5)), "cannot be merged"),
    "count of two columns": (agg(n=lambda: F.expr("count(x, i)")), "count one"),
    "an aggregate beside a column": (agg(n=lambda: F.sum("x") / F.col("i")), "outside an"),
    "an aggregate of a window": (
        agg(n=lambda: F.sum("x").over(Window.partitionBy("k"))), "outside an"),
    "two top_k": (agg(a=hf.top_k("k"), b=hf.top_k("i")), "one top_k per window"),
    "count windows by an unknown column": (
        lambda net, rows: rows.count_window(2, by="nope").agg(n=hf.count()), "by names the column"),
    "count windows by time": (
        lambda net, rows: rows.count_window(2, by="ts").agg(n=hf.count()), "for its own time"),
    "a window function with rand": (
        lambda net, rows: rows.window("1s").apply(lambda df: df.filter(F.rand() > 0)), "rand()"),
    "a window function that collects a list": (
        lambda net, rows: rows.window("1s").apply(
            lambda df: df.groupBy("k").agg(F.collect_list("x").alias("l"))), "order of rows"),
    "a window function with any first": (
        lambda net, rows: rows.window("1s").apply(
            lambda df: df.groupBy("k").agg(F.first("x").alias("l"))), "order of rows"),
    "a window function with a limit": (
        lambda net, rows: rows.window("1s").apply(lambda df: df.limit(1)), "without an order"),
    "union of different columns": (
        lambda net, rows: rows.union(rows.map("ts", "k")), "input port 1: "),
    "union of different types": (
        lambda net, rows: rows.map("ts", "x").union(rows.map("ts", x="i")), "make them equal"),
    "join on an unknown column": (
        lambda net, rows: rows.join(rows.map("ts", q="k"), on=["k"], within="1s"),
        "input port 1: on names the column 'k'"),
    "join with equal names": (
        lambda net, rows: rows.join(rows.map("ts", "k", "x"), on=["k"], within="1s"),
        "both sides have a column x"),
    "join on SQL with an unknown column": (
        lambda net, rows: rows.join(rows.map("ts", q="k"), on="l.k = r.nope", within="1s"), "r.q"),
    "join on chance": (
        lambda net, rows: rows.join(rows.map("ts", q="k"), on="l.k = r.q and rand() < 0.5",
                                    within="1s"), "expects a deterministic expression"),
    "join on the clock": (
        lambda net, rows: rows.join(rows.map("ts", q="k"), on="l.ts < current_timestamp()",
                                    within="1s"), "current_timestamp()"),
    "stateful without the time": (
        lambda net, rows: rows.stateful(lambda s, r, i: (r, s), key="k", state="k string",
                                        out="k string"), "out: no time column 'ts'"),
    "stateful by an unknown key": (
        lambda net, rows: rows.stateful(lambda s, r, i: (r, s), key="nope", state="k string",
                                        out="k string, ts timestamp"), "key names the column"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_operators_refuse_invalid_arguments(sessions: Sessions, case: str) -> None:
    build, expected = OTHERS[case]
    assert expected in refusal(build, sessions)


def test_all_violations_are_reported_together(sessions: Sessions) -> None:
    net = hf.Network("two", bucket="1s")
    rows = net.source("a", "ts timestamp, k string, x double, i long", time="ts")
    net.output("one", rows.filter("nope > 1").window("1s").agg(n=hf.count()))
    net.output("two", rows.apply(lambda df: df.distinct()))
    with pytest.raises(NetworkError) as raised:
        compile_network(net, sessions.small)
    assert len(raised.value.violations) == 2  # the window after the filter is not reported


# -- Python UDFs -----------------------------------------------------------------------------------


def test_a_declared_udf_is_accepted(sessions: Sessions) -> None:
    fn = lambda df: df.withColumn("x", plus_one("x"))  # noqa: E731
    assert compiled(applied(fn, python_udfs=True), sessions).schema["apply-1"]


@pytest.mark.parametrize("udf", [running_total, by_chance])
def test_a_declared_udf_is_tried_in_two_orders(sessions: Sessions, udf: Any) -> None:
    fn = lambda df: df.withColumn("x", udf("x"))  # noqa: E731
    assert "different results" in refusal(applied(fn, python_udfs=True), sessions)


def test_a_declared_udf_that_raises_on_generated_rows_is_accepted_with_a_warning(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a UDF that parses JSON: generated strings are none."""
    parse = F.udf(lambda k: float(json.loads(k)["amount"]), "double")
    fn = lambda df: df.withColumn("x", parse("k"))  # noqa: E731
    assert compiled(applied(fn, python_udfs=True), sessions).schema["apply-1"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= 30)
    assert "apply-1: Holdfast could not check that the Python UDF is deterministic" in warning
    assert "JSONDecodeError" in warning


def test_declared_udfs_must_still_work_row_by_row(sessions: Sessions) -> None:
    fn = lambda df: df.mapInArrow(lambda batches: batches, df.schema)  # noqa: E731
    assert NOT_ROW_BY_ROW in refusal(applied(fn, python_udfs=True), sessions)


# -- allowed ---------------------------------------------------------------------------------------


def test_row_by_row_code_is_accepted(sessions: Sessions) -> None:
    """Renaming back and forth, hints, explode, a union of two filters of the same rows."""

    def fine(df: Any) -> Any:
        df = df.withColumnRenamed("ts", "t").withColumn("y", F.col("x") * 2).hint("broadcast")
        df = df.select(F.col("t").alias("ts"), "k", F.explode(F.array("x", "y")).alias("x"))
        return df.filter("x > 0").unionByName(df.filter("x <= 0"))

    assert compiled(applied(fine), sessions).schema["apply-1"] == "ts timestamp, k string, x double"


# -- errors of a running query ---------------------------------------------------------------------


def times(*seconds: float) -> pa.Array:
    return pa.array([round(s * 1e6) for s in seconds], pa.int64()).cast(pa.timestamp("us", "UTC"))


ROWS = pa.table({"ts": times(0.1, 1.2), "k": ["7", "seven"], "x": [0.5, 1.5], "i": [1, 2]})


def outside(state: Any, rows: Any, info: Any) -> Any:
    return pa.table({"ts": times(77.0)}), state


def broken(state: Any, rows: Any, info: Any) -> Any:
    raise ValueError("the user's own mistake")


def no_tables(state: Any, rows: Any, info: Any) -> Any:
    return None


def stuck(state: Any, rows: Any, info: Any) -> Any:
    return pa.table({"ts": times()}), pa.table({"due": times(0.2)})


def stateful(fn: Any, **options: Any) -> Build:
    return lambda net, rows: rows.stateful(
        fn, key="k", out="ts timestamp", **{"state": "n long", **options}
    )


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda net, rows: rows.map("ts", n="cast(k as int)"), "'seven'"),
        (stateful(outside), "outside the processed bucket"),
        (stateful(broken), "the user's own mistake"),
        (stateful(no_tables), "must return (out, state)"),
        (stateful(stuck, state="due timestamp", timer="due"), "must remove or move timers"),
    ],
    ids=["a cast", "a time outside", "an exception", "no tables", "a timer left"],
)
def test_an_error_on_certain_rows_is_reported_without_a_traceback(
    sessions: Sessions, build: Build, expected: str
) -> None:
    with pytest.raises(InputError) as raised:
        run_network(network(build), {"a": ROWS}, sessions)
    message = str(raised.value)
    assert expected in message
    assert message.startswith("path 'out', buckets ")
    assert "Traceback" not in message
    assert "org.apache.spark" not in message
    assert "SQLSTATE" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("left", "right", "refused"),
    [
        ("decimal(38,38)", "decimal(12,3)", True),
        ("decimal(38,10)", "bigint", False),
        ("decimal(38,38)", "int", True),
        ("decimal(12,3)", "decimal(20,0)", False),
        ("double", "decimal(38,38)", False),
    ],
)
def test_a_join_on_decimals_without_a_common_type_is_refused(
    sessions: Sessions, left: str, right: str, refused: bool
) -> None:
    """Spark would compare them without their last digits."""
    net = hf.Network("decimals", bucket="100ms")
    one = net.source("one", f"ts timestamp, k {left}", time="ts")
    other = net.source("other", f"ts timestamp, k {right}, x int", time="ts")
    net.output("out", one.join(other, on=["k"], within="1s"))
    if not refused:
        compile_network(net, sessions.small)
        return
    with pytest.raises(hf.NetworkError, match="without their last digits"):
        compile_network(net, sessions.small)
