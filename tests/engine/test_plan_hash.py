"""State is read only by the query that wrote it: the plan hash covers its code. No JVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast as hf
from holdfast.engine.compiled import Compiled
from holdfast.engine.engine import Engine
from holdfast.model.fragments import fragments
from holdfast.model.partitions import physical

Build = Callable[[hf.Stream], hf.Stream]


def plan_hash(build: Build, *, bucket: str = "500ms", **protection: Any) -> str:
    net = hf.Network("n", bucket=bucket)
    tap = net.source("tap", "ts timestamp, src string, n long", time="ts")
    net.output("out", build(tap))
    net.protect("main", **protection)
    expanded = physical(net)
    engine = Engine.__new__(Engine)
    engine.network = expanded
    engine.compiled = Compiled(expanded, schema={op.name: "same" for op in expanded.operators})
    return engine.plan_hash(fragments(expanded)[-1].paths[0])


def stateful(fn: Any) -> Build:
    return lambda tap: tap.stateful(fn, key="src", state="src string, n long", out="ts timestamp")


def test_another_function_changes_the_plan_hash() -> None:
    original = plan_hash(stateful(lambda state, rows, info: (rows, state)))
    assert plan_hash(stateful(lambda state, rows, info: (state, rows))) != original
    assert plan_hash(stateful(lambda state, rows, info: (rows, state))) == original


def test_another_condition_changes_the_plan_hash() -> None:
    original = plan_hash(lambda tap: tap.filter("n > 0"))
    assert plan_hash(lambda tap: tap.filter("n > 1000")) != original
    assert plan_hash(lambda tap: tap.filter("n > 0")) == original


def test_another_form_of_recovery_reads_the_same_state() -> None:
    """Eventual checkpoints name the files that all checkpoints name."""
    windows = stateful(lambda state, rows, info: (rows, state))
    original = plan_hash(windows, recovery="checkpoint")
    assert plan_hash(windows, recovery="cec", recovery_entries=10) == original


def test_other_keys_of_an_exchange_change_the_plan_hash() -> None:
    def split(by: str) -> Build:
        def build(tap: hf.Stream) -> hf.Stream:
            split = tap.on("split", by=by, partitions=2)
            return split.window("1s").group_by("src").agg(n=hf.count()).filter("n > 0")

        return build

    def routing(by: str) -> list[str]:
        net = hf.Network("n")
        net.output("out", split(by)(net.source("tap", "ts timestamp, src string", time="ts")))
        run = physical(net)
        engine = Engine.__new__(Engine)
        engine.network = run
        engine.compiled = Compiled(run, schema={op.name: "same" for op in run.operators})
        return [engine.plan_hash(path) for f in fragments(run) for path in f.paths]

    assert routing("src") == routing("src")
    assert routing("src")[0] != routing("ts")[0]
