"""Defects of pairs (Flux) that a review found, each with a run or unit test to show it.

A test that is marked fails for the reason that its mark names; the repair takes the mark away.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config import Options
from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError
from holdfast.model.fragments import fragments
from holdfast.model.network import Network
from holdfast.storage import Boundary, Log
from holdfast.streams.serving import Service
from holdfast.verify.history import Stopped
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import pairs
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulation import Simulation
from tests.verify.sim.lab import Lab, S, failed, finding, needs


def node_of(sim: Simulation, name: str) -> NodeProcess:
    node = sim.cast.by_name[name]
    assert isinstance(node, NodeProcess)
    return node


CHECKPOINTS = Options(checkpoint_buckets=7, recovery="checkpoint")


@finding("B1: of two that wait for each other's state none takes its own disk")
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


@finding("B1: one whose inputs were deleted begins again every second and never says why")
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


@finding("B2: results that were offered to a newcomer are trimmed while it fetches the state")
def test_b2_what_is_offered_to_a_newcomer_stays_until_it_is_fetched(lab: Lab) -> None:
    gone: list[str] = []
    offered: dict[str, str] = {}

    def tweak(sim: Simulation) -> None:
        def offer() -> None:
            node = node_of(sim, "lower.0")
            needs(node.performer.give() is not None, "there is no state to give")
            offered.update(node.service.offered)

        def look() -> None:
            disk = node_of(sim, "lower.0").disk
            gone.extend(path for path in offered.values() if not disk.exists(path))
            node_of(sim, "lower.0").performer.given()

        sim.world.at(8 * S, offer)
        sim.world.at(18 * S, look)

    lab.run(lambda: pairs(1, 1), seconds=20, options=CHECKPOINTS, tweak=tweak)
    needs([path for path in offered if path.startswith("segments/")], "no results were offered")
    assert gone == []


@finding("B3: a copy that answers but cannot work is never given up")
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


@finding("B5: one that has not opened its inputs yet looks like one that began empty")
def test_b5_one_that_came_back_from_its_disk_did_not_begin_empty(lab: Lab) -> None:
    """Both are restarted, and nothing comes from ingress yet."""
    said: list[Any] = []

    def tweak(sim: Simulation) -> None:
        def ask() -> None:
            node = node_of(sim, "lower.0")
            kept = [node.log.states(path.name) for path in node.fragment.paths]
            needs(node.is_up and all(kept), "it is not up, or has no checkpoint")
            try:
                said.append(node.performer.give())
            except HoldfastError as err:
                said.append(err)
            node.performer.given()

        sim.world.at(16 * S, ask)

    lab.run(
        lambda: pairs(1, 1),
        Fault(10 * S, "kill", "ingress", 9 * S),
        Fault(10 * S, "kill", "lower.0", S),
        Fault(10 * S, "kill", "lower.0@2", S),
        seconds=25,
        options=CHECKPOINTS,
        tweak=tweak,
    )
    assert said != [None]


@finding("B6: the identity of a plan does not hold what its functions do")
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


@finding("B7: a newcomer's hold between question and deed makes the news of a death fatal")
def test_b7_a_newcomer_that_comes_just_as_its_predecessor_is_given_up_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.open(tmp_path, "maker", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    log.append(Boundary("s", 9))
    service = Service(logs={"s": log}, readers={"s": {"r", "r@2"}}, trim_buckets=1)
    for reader in ("r", "r@2"):
        service.acknowledge("s", reader, 5, 5, 1)
    asked = Log.reader_epoch

    def overtaken(self: Log, stream: str, reader: str) -> int:
        epoch = asked(self, stream, reader)
        service.hold("s", "r@2", 2)
        return epoch

    monkeypatch.setattr(Log, "reader_epoch", overtaken)
    raised: list[HoldfastError] = []
    try:
        service.lost({"r@2": 1})
    except HoldfastError as err:
        raised.append(err)
    log.close()
    assert raised == []
