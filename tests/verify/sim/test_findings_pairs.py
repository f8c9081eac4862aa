"""Defects of pairs (Flux) that a review found, each with a run or unit test that showed it. B2 and
B5 are in tests/node/test_state_lending.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config import Options
from holdfast.core.membership import Standing
from holdfast.engine.engine import Engine
from holdfast.model.fragments import fragments
from holdfast.model.network import Network
from holdfast.storage import Boundary, Log
from holdfast.streams.serving import Service
from holdfast.verify.history import Stopped
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import pairs
from holdfast.verify.sim.random_scenarios import options_of
from tests.verify.sim.lab import Lab, S, failed, needs

CHECKPOINTS = Options(checkpoint_buckets=7, recovery="checkpoint")


def test_b1_one_disk_of_a_pair_is_enough(lab: Lab) -> None:
    """One is killed, and the other one loses its disk before the first was declared dead."""
    outcome = lab.run(
        lambda: pairs(2, 3),
        Fault(10 * S, "kill", "lower.0", 4 * S),
        Fault(11_500_000, "wipe", "lower.0@2", S),
        seconds=30,
        options=CHECKPOINTS,
    )
    assert not {"lost", "paired"} & failed(outcome).keys()


def test_b1_a_pair_that_is_lost_says_so(lab: Lab) -> None:
    """Inputs behind the first one's checkpoint go when it was declared dead; then the other one is
    lost with its disk. docs/pairs.md: after two minutes without any state the node says so."""
    outcome = lab.run(
        lambda: pairs(1, 1),
        Fault(10 * S, "kill", "lower.0", 20 * S),
        Fault(25 * S, "wipe", "lower.0@2", 140 * S),
        seconds=160,
        options=CHECKPOINTS,
    )
    ended = [event for event in outcome.history.of(Stopped) if event.who.startswith("lower.0")]
    assert "lost" not in failed(outcome) or ended


@pytest.mark.parametrize("buffer_buckets", [None, 24])
@pytest.mark.parametrize("do", ["full", "hang"])
def test_b3_a_copy_that_makes_no_progress_stops_nobody(
    lab: Lab, do: str, buffer_buckets: int | None
) -> None:
    outcome = lab.run(
        lambda: pairs(2, 3),
        Fault(5 * S, do, "lower.0@2", 40 * S),
        seconds=50,
        options=Options(checkpoint_buckets=7, recovery="checkpoint", buffer_buckets=buffer_buckets),
    )
    assert not {"available", "standing", "detected"} & failed(outcome).keys()


@pytest.mark.parametrize("factor", [20, 30, 60])
def test_a_copy_that_is_slow_stops_nobody(lab: Lab, factor: float) -> None:
    """It moves all the time, but falls further and further behind. docs/pairs.md: the healthy copy
    serves, also with `buffer_buckets` as long as that is more than `stall`."""
    outcome = lab.run(
        lambda: pairs(2, 3),
        Fault(5 * S, "slow", "lower.0", 40 * S, factor),
        seconds=50,
        seed=8,
        options=options_of(8),
    )
    needs(options_of(8).buffer_buckets == 24, "nobody would be stopped")
    assert failed(outcome) == {}


def test_b6_another_function_makes_another_plan() -> None:
    def plan(condition: str, fn: Any) -> str:
        net = Network("n", bucket="500ms")
        tap = net.source("tap", "ts timestamp, src string, n long", time="ts")
        out = "ts timestamp, src string, n long"
        ended = tap.filter(condition).stateful(fn, key="src", state="src string, n long", out=out)
        net.output("out", ended)
        engine = Engine.__new__(Engine)
        engine.network = net
        schema = {op.name: "the same" for op in net.operators}
        engine.compiled = SimpleNamespace(schema=schema)  # type: ignore[assignment]
        return engine.plan_hash(fragments(net)[0].paths[0])

    one = plan("n > 0", lambda state, rows, info: (rows, state))
    needs(one == plan("n > 0", lambda state, rows, info: (rows, state)), "no two plans are equal")
    assert one != plan("n > 1000", lambda state, rows, info: (rows, state))
    assert one != plan("n > 0", lambda state, rows, info: (state, rows))


def test_b7_a_newcomer_that_comes_just_as_its_predecessor_is_given_up_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.open(tmp_path, "maker", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    log.append(Boundary("s", 9))
    service = Service(logs={"s": log}, readers={"s": {"r", "r@2"}}, trim_buckets=1)
    for reader in ("r", "r@2"):
        service.acknowledge("s", reader, 5, 5, 1)
    asked = Log.position

    def overtaken(self: Log, stream: str, reader: str) -> tuple[int, int, int]:
        position = asked(self, stream, reader)
        monkeypatch.setattr(Log, "position", asked)
        service.hold("s", "r@2", 2, 0)
        return position

    monkeypatch.setattr(Log, "position", overtaken)
    service.lost({"r@2": Standing(epoch=1, dead=1, released=1)}, 0)
    assert asked(log, "s", "r@2")[2] == 2
    log.close()
