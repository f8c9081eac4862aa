"""Defects of pairs (Flux) that a review found, each with a run or unit test that reproduced it. B2
and B5 are in tests/node/test_state_lending.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Options
from holdfast.core.membership import InstanceStatus
from holdfast.engine.compiled import Compiled
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
    """A replica is killed, and its peer loses its disk before the replica is declared dead."""
    outcome = lab.run(
        lambda: pairs(2, 3),
        Fault(10 * S, "kill", "lower.0", 4 * S),
        Fault(11_500_000, "wipe", "lower.0@2", S),
        seconds=30,
        options=CHECKPOINTS,
    )
    assert not {"lost", "paired"} & failed(outcome).keys()


def test_b1_the_loss_of_a_pair_is_reported(lab: Lab) -> None:
    """Inputs after the checkpoint of the first replica are released when the replica is declared
    dead; then its peer is lost with its disk. docs/pairs.md: after two minutes without any state
    the node reports the loss."""
    outcome = lab.run(
        lambda: pairs(1, 1),
        Fault(10 * S, "kill", "lower.0", 20 * S),
        Fault(25 * S, "wipe", "lower.0@2", 140 * S),
        seconds=160,
        options=CHECKPOINTS,
    )
    stopped = [event for event in outcome.history.of(Stopped) if event.who.startswith("lower.0")]
    assert "lost" not in failed(outcome) or stopped


@pytest.mark.parametrize("buffer_buckets", [None, 24])
@pytest.mark.parametrize("do", ["full", "hang"])
def test_b3_a_replica_without_progress_stops_no_other_process(
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
def test_a_slow_replica_stops_no_other_process(lab: Lab, factor: float) -> None:
    """The replica makes progress, but falls further and further behind. docs/pairs.md: the healthy
    replica serves, also with `buffer_buckets` if that is more than `stall`."""
    outcome = lab.run(
        lambda: pairs(2, 3),
        Fault(5 * S, "slow", "lower.0", 40 * S, factor),
        seconds=50,
        seed=8,
        options=options_of(8),
    )
    needs(options_of(8).buffer_buckets == 24, "without a bounded buffer no process can be stopped")
    assert failed(outcome) == {}


def test_b6_another_function_gives_another_plan_hash() -> None:
    def plan(condition: str, fn: Any) -> str:
        net = Network("n", bucket="500ms")
        tap = net.source("tap", "ts timestamp, src string, n long", time="ts")
        out = "ts timestamp, src string, n long"
        ended = tap.filter(condition).stateful(fn, key="src", state="src string, n long", out=out)
        net.output("out", ended)
        engine = Engine.__new__(Engine)
        engine.network = net
        schema = {op.name: "the same" for op in net.operators}
        engine.compiled = Compiled(net, schema=schema)
        return engine.plan_hash(fragments(net)[0].paths[0])

    one = plan("n > 0", lambda state, rows, info: (rows, state))
    needs(
        one == plan("n > 0", lambda state, rows, info: (rows, state)),
        "equal functions give different plan hashes",
    )
    assert one != plan("n > 1000", lambda state, rows, info: (rows, state))
    assert one != plan("n > 0", lambda state, rows, info: (state, rows))


def test_b7_a_new_instance_keeps_its_position_while_its_predecessor_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.open(tmp_path, "producer", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    log.append(Boundary("s", 9))
    service = Service(logs={"s": log}, consumers={"s": {"r", "r@2"}}, trim_buckets=1)
    for consumer in ("r", "r@2"):
        service.acknowledge("s", consumer, 5, 5, 1)
    read_position = Log.position

    def overtaken(self: Log, stream: str, consumer: str) -> tuple[int, int, int]:
        position = read_position(self, stream, consumer)
        monkeypatch.setattr(Log, "position", read_position)
        service.hold("s", "r@2", 2, 0)
        return position

    monkeypatch.setattr(Log, "position", overtaken)
    service.lost({"r@2": InstanceStatus(epoch=1, dead=1, released=1)}, 0)
    assert read_position(log, "s", "r@2")[2] == 2
    log.close()
