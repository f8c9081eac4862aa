"""Well-formedness (ECOC section 2.3), without Spark: each violation is one message that names the
operator and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, StringType, StructField, StructType, TimestampType

import holdfast as hf
from holdfast.errors import HoldfastError, InputError, NetworkError
from holdfast.model.operators import Source, Stateful

SCHEMA = "ts timestamp, k string, x double"


def network() -> tuple[hf.Network, hf.Stream]:
    net = hf.Network("net", bucket="500ms")
    return net, net.source("a", SCHEMA, time="ts")


def violations(net: hf.Network) -> tuple[str, ...]:
    with pytest.raises(NetworkError) as raised:
        net.check()
    for message in raised.value.violations:
        assert "\n" not in message
        assert message in str(raised.value)
    return raised.value.violations


def violation(net: hf.Network) -> str:
    (message,) = violations(net)
    return message


def same(df: Any) -> Any:
    return df


def nothing(state: Any, rows: Any, info: Any) -> Any:
    return rows, state


def test_a_network_with_every_operator_is_well_formed() -> None:
    net, a = network()
    b = net.source("b", SCHEMA, time="ts")
    port = net.port("later", SCHEMA, time="ts")
    net.connect(b.filter("x > 0"), port)
    joined = a.join(port.map("ts", "k", y="x"), on=["k"], within="1s")
    net.output("windows", joined.window("10s", slide="1s").group_by("k").agg(n=hf.count()))
    net.output("counts", a.union(b).count_window(5, by="k").agg(s=hf.sum("x")))
    keyed = a.stateful(nothing, key="k", state="k string, due timestamp", out=SCHEMA, timer="due")
    net.output("keyed", keyed, contract=hf.Contract(within="700ms", loss=0.1))
    net.check()


# -- rule 1: every input port is connected exactly once --------------------------------------------


def test_an_unconnected_input_port_is_refused() -> None:
    net, a = network()
    net.output("out", a.union(net.port("open", SCHEMA, time="ts")))
    message = violation(net)
    assert message.startswith("open, input port 0: no stream feeds it")
    assert "net.connect(" in message


def test_an_input_port_connected_twice_is_refused() -> None:
    net, a = network()
    port = net.port("twice", SCHEMA, time="ts")
    net.connect(a.filter("x > 0", name="up"), port)
    net.connect(a.filter("x < 0", name="down"), port)
    net.output("out", port.apply(same))
    messages = [text for text in violations(net) if text.startswith("twice")]
    assert messages == [
        "twice, input port 0: expected one stream, found 2 (up, down); unite them first with "
        "net.union(...)"
    ]


def test_a_connection_to_a_stream_that_is_not_a_port_is_refused() -> None:
    net, a = network()
    with pytest.raises(InputError, match="'a' is not a port"):
        net.connect(a.apply(same), a)


# -- cycles ----------------------------------------------------------------------------------------


def cycle(feedback: int) -> hf.Network:
    net, a = network()
    port = net.port("back", SCHEMA, time="ts")
    both = a.union(port, name="both")
    net.connect(both, port, feedback=feedback)
    net.output("out", both)
    return net


def test_a_cycle_without_delay_is_refused() -> None:
    message = violation(cycle(feedback=0))
    assert "the cycle back -> both -> back has no delay" in message
    assert "feedback=1" in message


def test_a_cycle_with_delay_is_checked_but_cannot_run_yet() -> None:
    message = violation(cycle(feedback=1))
    assert message.startswith("back: feedback edges are checked but cannot run yet")


# -- rules 2 and 4: every output port is used; no source feeds an output directly ------------------


def test_an_unread_stream_is_refused() -> None:
    net, a = network()
    net.output("out", a.apply(same))
    a.filter("x > 0", name="lost").window("1s", name="unread").agg(n=hf.count())
    message = violation(net)
    assert message.startswith("unread, output port 0: no operator reads it")


def test_an_unread_source_is_refused() -> None:
    net, a = network()
    net.output("out", a.apply(same))
    net.source("idle", SCHEMA, time="ts")
    assert violation(net).startswith("idle, output port 0: no operator reads it")


def test_a_source_connected_directly_to_an_output_is_refused() -> None:
    net, a = network()
    net.output("out", a)
    message = violation(net)
    assert message.startswith("out, input port 0: source a feeds it directly")


def test_an_empty_network_is_refused() -> None:
    messages = violations(hf.Network("empty"))
    assert [text.split(":")[0] for text in messages] == [
        "network 'empty' has no source",
        "network 'empty' has no output",
    ]


# -- rule 3: schemas -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "time", "fragment"),
    [
        (SCHEMA, "at", "no time column 'at' among the columns ts, k, x"),
        (SCHEMA, "k", "time column 'k' is string; it must be a timestamp"),
        ("d date, k string", "d", "time column 'd' is date"),
        ("ts timestamp_ntz", "ts", "use timestamp"),
        ("", "ts", "it is empty"),
        ("ts", "ts", "expected more"),
        ("ts timestamp,", "ts", "expected more"),
        ("ts timestamp k string", "ts", "unexpected 'k'"),
        ("ts timestamp, x doubel", "ts", "unknown type 'doubel'"),
        ("ts timestamp, x double!", "ts", "unexpected character '!'"),
        ("ts timestamp, x array<double", "ts", "expected >"),
        ("ts timestamp, x double not", "ts", "expected more"),
        ("ts timestamp, x decimal(", "ts", "expected more"),
        ("ts timestamp, x decimal(a,b)", "ts", "'a'"),
        ("ts timestamp, x decimal(39,0)", "ts", "decimal(39,0)"),
        ("ts timestamp, x decimal(4,5)", "ts", "decimal(4,5)"),
        ("ts timestamp, x long, x long", "ts", "column x occurs twice"),
        ("ts timestamp, x long, X long", "ts", "occurs twice"),
    ],
)
def test_invalid_schemas_of_sources_are_refused(schema: str, time: str, fragment: str) -> None:
    net = hf.Network("net")
    net.output("out", net.source("a", schema, time=time).apply(same))
    message = violation(net)
    assert message.startswith("a")
    assert fragment in message


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"state": "k strin"}, "keyed, state: "),
        ({"out": "ts timestamp,"}, "keyed, out: "),
        ({"timer": "due"}, "keyed, timer: no time column 'due'"),
        ({"timer": "n"}, "keyed, timer: time column 'n' is bigint"),
    ],
)
def test_invalid_schemas_of_stateful_are_refused(change: dict[str, str], fragment: str) -> None:
    net, a = network()
    schemas = {"state": "k string, n long", "out": SCHEMA} | change
    net.output("out", a.stateful(nothing, key="k", name="keyed", **schemas))
    assert fragment in violation(net)


# -- rule 5: delays --------------------------------------------------------------------------------


def test_a_within_shorter_than_a_bucket_is_refused() -> None:
    net, a = network()
    net.output("out", a.apply(same), contract=hf.Contract(within="400ms"))
    message = violation(net)
    assert message.startswith("out: its contract promises results within 400ms")
    assert "500ms" in message


def test_a_within_shorter_than_a_bucket_and_its_grace_is_refused() -> None:
    net = hf.Network("net", bucket="500ms")
    late = net.source("late", SCHEMA, time="ts", grace="4s").filter("x > 0")
    net.output("out", late, contract=hf.Contract(within="3s"))
    message = violation(net)
    assert "buckets of 500ms of source late are closed 4s after their end" in message


def test_all_violations_are_reported_together() -> None:
    net = hf.Network("many", bucket="1s")
    a = net.source("a", SCHEMA, time="at")
    net.output("out", a, contract=hf.Contract(within="1ms"))
    net.port("open", SCHEMA, time="k")
    assert len(violations(net)) == 6


# -- mistakes that are refused by the call ---------------------------------------------------------


WRITTEN: dict[str, tuple[Callable[[hf.Network, hf.Stream], Any], str]] = {
    "a bucket without a unit": (lambda net, a: hf.Network("n", bucket="500"), "bucket: '500'"),
    "a bucket of words": (lambda net, a: hf.Network("n", bucket="soon"), "is not a duration"),
    "a bucket of a number": (lambda net, a: hf.Network("n", bucket=5), "is not a duration"),
    "a bucket of nothing": (lambda net, a: hf.Network("n", bucket="0s"), "positive"),
    "a negative bucket": (lambda net, a: hf.Network("n", bucket="-1s"), "is not a duration"),
    "half a microsecond": (lambda net, a: hf.Network("n", bucket="0.5us"), "whole number"),
    "no partitions": (lambda net, a: hf.Network("n", partitions=0), "partitions=0"),
    "a network name with a space": (lambda net, a: hf.Network("my net"), "'my net'"),
    "a source name with a dot": (lambda net, a: net.source("a.b", SCHEMA, time="ts"), "'a.b'"),
    "a name used twice": (lambda net, a: net.source("a", SCHEMA, time="ts"), "is already used"),
    "an output named like a source": (
        lambda net, a: net.output("a", a.apply(same)), "is already used"),
    "an operator named like a source": (lambda net, a: a.filter("x > 0", name="a"), "already used"),
    "an unknown late policy": (
        lambda net, a: net.source("b", SCHEMA, time="ts", late="drop"), "late='drop'"),
    "an unknown clock": (
        lambda net, a: net.source("b", SCHEMA, time="ts", clock="sun"), "clock='sun'"),
    "a window of words": (lambda net, a: a.window("ten seconds"), "window size: 'ten seconds'"),
    "a slide longer than the window": (
        lambda net, a: a.window("1s", slide="2s"), "slide '2s' is longer than size '1s'"),
    "a window without aggregates": (lambda net, a: a.window("1s").agg(), "at least one aggregate"),
    "a window left unfinished": (
        lambda net, a: net.output("out", a.window("1s")), "finish the window"),
    "a grouped window function": (
        lambda net, a: a.window("1s").group_by("k").apply(same), "group inside the function"),
    "group_by of nothing": (lambda net, a: a.window("1s").group_by(), "at least one column name"),
    "a count window of nothing": (lambda net, a: a.count_window(0, by="k"), "slide=0"),
    "a count window that skips": (lambda net, a: a.count_window(2, slide=3, by="k"), "slide=3"),
    "a count window by nothing": (lambda net, a: a.count_window(2, by=[]), "at least one column"),
    "a join on nothing": (lambda net, a: a.join(a, on=[], within="1s"), "at least one column"),
    "a join within words": (lambda net, a: a.join(a, on=["k"], within="soon"), "join within"),
    "a union of nothing": (lambda net, a: net.union(), "at least one stream"),
    "a stream of another network": (
        lambda net, a: net.union(a, network()[1]), "belongs to another network"),
    "an apply without a function": (lambda net, a: a.apply("x > 1"), "give a function"),
    "a quantile beyond 1": (lambda net, a: hf.quantile("x", 50), "q=50"),
    "a quantile without error": (lambda net, a: hf.quantile("x", 0.5, error=0.0), "error=0.0"),
    "a sketch too large": (lambda net, a: hf.approx_distinct("x", lg_k=30), "lg_k=30"),
    "the top 0": (lambda net, a: hf.top_k("x", 0), "k=0"),
    "a contract within words": (lambda net, a: hf.Contract(within="fast"), "contract within"),
    "a contract that loses all": (lambda net, a: hf.Contract(loss=1.0), "loss=1.0"),
    "a contract with an unknown order": (lambda net, a: hf.Contract(order="total"), "'total'"),
    "an unknown operator": (lambda net, a: net.named("nope"), "no operator 'nope'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_mistakes_are_refused_by_the_call(case: str) -> None:
    build, fragment = WRITTEN[case]
    net, a = network()
    with pytest.raises(HoldfastError) as raised:
        build(net, a)
    assert isinstance(raised.value, InputError)
    assert fragment in str(raised.value)
    assert "\n" not in str(raised.value)


# -- feeds and sinks are checked before the run ----------------------------------------------------


@pytest.mark.parametrize("feed", [(n for n in range(3)), lambda: [], "rows.csv", [{"x": 1}]])
def test_an_invalid_feed_is_refused(feed: Any) -> None:
    net = hf.Network("net", bucket="500ms")
    net.output("out", net.source("a", SCHEMA, time="ts", feed=feed).filter("x > 0"))
    message = violation(net)
    assert message.startswith("a, feed: expected hf.Generate(fn), hf.Replay('file')")
    assert f"found {type(feed).__name__}" in message


@pytest.mark.parametrize("sink", ["out", 7, {"folder": "out"}])
def test_an_invalid_sink_is_refused(sink: Any) -> None:
    net, a = network()
    net.output("out", a.filter("x > 0"), sink=sink)
    message = violation(net)
    assert message.startswith("out, sink: expected a function(table, info) or a sink such as hf.Pa")
    assert message.endswith(f"found {sink!r}")


def test_functions_and_sink_objects_are_accepted() -> None:
    for sink in (None, print, hf.ParquetSink("folder"), hf.CorrectedTable("folder")):
        net, a = network()
        net.output("out", a.filter("x > 0"), sink=sink)
        net.check()


# -- forms of a schema -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"ts": "timestamp", "k": "string", "x": "double"},
        pa.schema([("ts", pa.timestamp("us", tz="UTC")), ("k", pa.string()), ("x", pa.float64())]),
        StructType([StructField("ts", TimestampType()), StructField("k", StringType()),
                    StructField("x", DoubleType())]),
    ],
    ids=["dict", "arrow", "spark"],
)  # fmt: skip
def test_a_schema_is_accepted_in_every_form(schema: Any) -> None:
    net = hf.Network("net")
    op = net.source("a", schema, time="ts").op
    assert isinstance(op, Source) and op.schema == SCHEMA
    keyed = hf.Stream(net, op).stateful(nothing, key="k", state=schema, out=schema).op
    assert isinstance(keyed, Stateful) and keyed.state == keyed.out == SCHEMA


@pytest.mark.parametrize("schema", [{"ts": int}, ["ts", "k"], None, {}, 5])
def test_an_invalid_schema_is_refused_by_the_call(schema: Any) -> None:
    with pytest.raises(
        InputError, match="source 'a': expected a schema as text such as 'ts timest"
    ):
        hf.Network("net").source("a", schema, time="ts")


@pytest.mark.parametrize("name", ["_reason", "_Rejected_At", "_stability", "__x"])
def test_names_of_columns_that_holdfast_adds_are_reserved(name: str) -> None:
    net = hf.Network("reserved")
    rows = net.source("rows", {"ts": "timestamp", name: "long"}, time="ts")
    net.output("out", rows.filter("true"))
    with pytest.raises(NetworkError, match=f"rows: schema: column '{name}': this name is reserved"):
        net.check()


def test_a_join_takes_a_column_name_as_pyspark_does() -> None:
    net, a = network()
    b = net.source("b", SCHEMA, time="ts").map("ts", "k", y="x")
    operators = [a.join(b, on=on, within="1s").op for on in ("k", ["k"], "l.k = r.k and r.y > 0")]
    assert [getattr(op, "on", None) for op in operators] == [
        ("k",),
        ("k",),
        "l.k = r.k and r.y > 0",
    ]
