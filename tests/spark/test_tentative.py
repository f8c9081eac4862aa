"""A missing input on Spark: tentative results, corrections, REC_DONE (Borealis sections 3.3 and
3.4), and finally the same rows as without a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.edge.client import BucketInfo
from holdfast.engine.session import Sessions
from holdfast.experiments.failing import Breakable, Watch
from holdfast.model.schema import arrow_schema
from holdfast.types import Stability
from holdfast.verify.fuzz.engine_run import digests, run_network

WIDTH_US = 100_000
LIMIT_S = 60.0
SCHEMA = "ts timestamp, key string, x long"
SOURCES = ("left", "right")
OUTPUTS = ("rows", "counts", "pairs")


def network(**protection: Any) -> hf.Network:
    """A union and a window over it, which continue with one side, and a join, which does not."""
    net = hf.Network("missing", bucket="100ms")
    left, right = (net.source(name, SCHEMA, time="ts", clock="manual") for name in SOURCES)
    both = net.union(left, right)
    net.output("rows", both.filter("x > 0"))
    # Long enough that rows are folded into panes before the failure.
    net.output("counts", both.window("2s", slide="500ms").group_by("key").agg(n=hf.count()))
    net.output("pairs", left.join(right.map("ts", "key", y="x"), on=["key"], within="100ms"))
    net.protect("main", on_failure="process", **protection)
    return net


def rows(name: str, bucket: int) -> dict[str, Any]:
    rng = np.random.default_rng([SOURCES.index(name), bucket])
    times = np.sort(rng.integers(bucket * WIDTH_US, (bucket + 1) * WIDTH_US, 20))
    keys = np.char.add("k", rng.integers(0, 4, 20).astype(str))
    return {"ts": times, "key": keys, "x": rng.integers(-9, 99, 20)}


def push(run: Breakable, lo: int, hi: int) -> None:
    for bucket in range(lo, hi):
        for name in SOURCES:
            run.source(name).push(rows(name, bucket))
            run.source(name).advance((bucket + 1) * WIDTH_US)


def undisturbed(net: hf.Network, upto: int, sessions: Sessions) -> dict[str, tuple[int, str]]:
    schema = arrow_schema(SCHEMA)
    tables = {
        name: pa.concat_tables(
            [pa.table(rows(name, bucket)).cast(schema) for bucket in range(upto)]
        )
        for name in SOURCES
    }
    return digests(run_network(net, tables, sessions))


@contextmanager
def watched(net: hf.Network) -> Iterator[tuple[Breakable, dict[str, Watch]]]:
    with Breakable(net) as run, ExitStack() as stack:
        clients = {name: run.client(name, tentative=True) for name in OUTPUTS}
        yield run, {name: stack.enter_context(Watch(client)) for name, client in clients.items()}


def stable_upto(watches: dict[str, Watch], bucket: int) -> None:
    for client, watch in ((watch.client, watch) for watch in watches.values()):
        watch.wait(lambda c=client: c.position is not None and c.position >= bucket, LIMIT_S)


def tentative_upto(watch: Watch, bucket: int) -> None:
    watch.wait(lambda: watch.client.tentative_upto == bucket, LIMIT_S)


def to_the_end(run: Breakable, watches: dict[str, Watch]) -> dict[str, tuple[int, str]]:
    """The stable rows of each output after its end, including duplicates, as digests."""
    for name in SOURCES:
        run.source(name).end()
    for watch in watches.values():
        watch.wait(lambda watch=watch: watch.client.ended, LIMIT_S)
    run.raise_failure()
    return digests({
        name: pa.concat_tables(
            [table for table, info in watch.given if info.stability is Stability.STABLE]
        )
        for name, watch in watches.items()
    })  # fmt: skip


def is_tentative(info: BucketInfo) -> bool:
    return info.stability is Stability.TENTATIVE


def kinds(infos: list[BucketInfo]) -> list[str]:
    """The kinds of results of an output in order, without repetitions."""
    kinds = ["REC_DONE" if info.rec_done else str(info.stability) for info in infos]
    return [kind for number, kind in enumerate(kinds) if kinds[number - 1 : number] != [kind]]


@pytest.mark.parametrize("reconcile", ["checkpoint", "undo"])
def test_tentative_results_remain_valid_until_stable_ones_replace_them(
    reconcile: str, sessions: Sessions
) -> None:
    net = network(reconcile=reconcile, max_delay="1s")
    with watched(net) as (run, watches):
        rows_watch, pairs_watch = watches["rows"], watches["pairs"]
        push(run, 0, 20)
        stable_upto(watches, 19)
        for cut_at in (20, 30):  # a corrected failure does not affect the next one
            received_before = len(rows_watch.given)
            run.cut("right")
            push(run, cut_at, cut_at + 5)
            for name in ("rows", "counts"):
                tentative_upto(watches[name], cut_at + 4)
            tentative = [info for info in rows_watch.infos() if is_tentative(info)][-5:]
            assert [info.bucket for info in tentative] == list(range(cut_at, cut_at + 5))
            assert {info.missing for info in tentative} == {("right",)}
            assert rows_watch.client.position == cut_at - 1, (
                "expected no stable bucket without its input"
            )
            assert pairs_watch.client.position == cut_at - 1, (
                "expected the join to wait for both sides"
            )
            run.heal("right")
            rows_watch.wait(
                lambda received_before=received_before: any(
                    i.rec_done for _, i in rows_watch.given[received_before:]
                ),
                LIMIT_S,
            )
            infos = [info for _, info in rows_watch.given[received_before:]]
            assert kinds(infos)[:3] == ["TENTATIVE", "STABLE", "REC_DONE"]
            replaced = [info.bucket for info in infos if info.replaces]
            assert replaced == list(range(cut_at, cut_at + 5))
            push(run, cut_at + 5, cut_at + 10)
            stable_upto(watches, cut_at + 9)
        final = to_the_end(run, watches)
    assert not any(is_tentative(info) for info in pairs_watch.infos())
    for watch in watches.values():
        stable = [info.bucket for info in watch.infos() if info.rows and not is_tentative(info)]
        assert stable == sorted(set(stable)), "expected every stable bucket once, in order"
    assert final == undisturbed(net, 40, sessions)


def test_a_failure_shorter_than_max_delay_causes_no_tentative_results(sessions: Sessions) -> None:
    """Section 5.1: nodes block first, and give tentative results only after `max_delay`."""
    net = network(max_delay="10min")
    with watched(net) as (run, watches):
        push(run, 0, 5)
        stable_upto(watches, 4)
        run.cut("right")
        push(run, 5, 10)
        paths = run.nodes["main"].performer.core.paths
        watches["rows"].wait(lambda: paths["rows"].sunion.complete_upto["left"] == 9, LIMIT_S)
        run.heal("right")
        stable_upto(watches, 9)
        final = to_the_end(run, watches)
    assert [kinds(watch.infos()) for watch in watches.values()] == [["STABLE"]] * 3
    assert final == undisturbed(net, 10, sessions)
