"""Continuous eventual checkpoints in simulated runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.config import Options
from holdfast.engine.inputs import Leaving
from holdfast.engine.keyed import FOOTPRINTS
from holdfast.model.network import Network
from holdfast.model.protection import FailurePolicy
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import NETWORKS, cec_chain, cec_single
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.random_scenarios import protect, scenario_of
from holdfast.verify.sim.simulated_engine import EngineTwin
from holdfast.verify.sim.simulation import Simulation
from tests.verify.sim.lab import Lab, S

OPTIONS = Options(checkpoint_buckets=3)


def network(on_failure: FailurePolicy = "block", replicas: int = 1) -> Network:
    net = cec_single()
    net.protect(
        "main", recovery="cec", recovery_rows=15, on_failure=on_failure, max_delay="1500ms",
        replicas=replicas,
    )  # fmt: skip
    return net


def footprints(sim: Simulation, name: str) -> list[str]:
    disk = sim.cast.by_name[name].disk
    return [file for file in disk.files("/") if f"/{FOOTPRINTS}/" in f"/{file}"]


def test_seeds_with_eventual_checkpoints_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "1..4", "--only", "cec"]) == 0
    assert "4 seeds, 0 failed" in capsys.readouterr().out


def test_only_selects_the_scenarios_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "calm", "--only", "cec"]) == 2
    assert "--only selects scenarios of seeds" in capsys.readouterr().err


def test_no_storage_that_holds_footprints_is_lost() -> None:
    lost = {"wipe", "replace", "rot", "restore"}
    modes = set()
    for seed in range(1, 200):
        scenario = scenario_of(seed, "cec")
        net = NETWORKS[scenario.network]()
        protect(net, seed)
        modes |= {(p.recovery, p.on_failure, p.replicas) for p in net.protections.values()}
        for fault in scenario.faults:
            fragment = fault.on.partition("@")[0]
            assert fault.do not in lost or net.protection(fragment).recovery != "cec"
    assert {("cec", kind, n) for kind in ("process", "delay", "block") for n in (1, 2, 3)} <= modes


def test_adjacent_nodes_recover_together(lab: Lab) -> None:
    def chain() -> Network:
        net = cec_chain()
        for name in ("first", "second"):
            net.protect(name, recovery="cec", recovery_rows=15, on_failure="block")
        return net

    torn = [
        Fault(int((2 + 1.7 * n) * S), "torn", name, 1_500_000, float(n))
        for n in range(1, 12)
        for name in ("first", "second")
    ]
    assert lab.run(chain, *torn, seconds=26, options=OPTIONS).failed == []


def test_an_operator_without_rows_does_not_hold_back_recovery(lab: Lab) -> None:
    """Otherwise the inputs of other operators of the path are retained for ever."""
    end = Fault(3 * S, "end", "s2", 0)
    assert lab.run(network, end, seconds=40, options=OPTIONS).failed == []


def test_tentative_steps_leave_no_footprints(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, bool]] = []
    original = EngineTwin.run

    def run(self: EngineTwin, *args: Any, **options: Any) -> Any:
        lines.append((options.get("line", "stable"), isinstance(options.get("leaving"), Leaving)))
        return original(self, *args, **options)

    monkeypatch.setattr(EngineTwin, "run", run)
    faults = [Fault(3 * S, "silent", "s2", 8 * S), Fault(6 * S, "kill", "main", S)]
    outcome = lab.run(partial(network, "process", 2), *faults, seconds=20, options=OPTIONS)
    assert outcome.failed == []
    assert set(lines) == {("stable", True), ("tentative", False)}


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_damaged_footprint_stops_the_node(lab: Lab, damage: str) -> None:
    """The node must not recover without it: checkers see a node that stops, but no wrong result."""

    def tweak(sim: Simulation) -> None:
        def strike() -> None:
            node = sim.cast.by_name["main"]
            assert isinstance(node, NodeProcess)
            node.die("killed")
            for file in footprints(sim, "main"):
                if damage == "delete":
                    node.disk.delete(f"/{file}")
                else:
                    held: Any = node.disk._nodes[f"/{file}"]
                    held.data[len(held.data) // 2] ^= 4
            node.start()

        sim.world.at(6 * S, strike)

    outcome = lab.run(network, seconds=14, options=OPTIONS, tweak=tweak)
    failed = {verdict.checker for verdict in outcome.failed}
    assert "lost" in failed and not failed & {"wrong", "doubled", "converge"}
    assert "fails: LogCorrupted" in outcome.world.transcript()
