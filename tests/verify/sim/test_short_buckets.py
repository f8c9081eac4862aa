"""Nodes whose steps take as long as a bucket, with enough capacity: their stable line is never
idle. No promise may depend on an idle moment."""

from __future__ import annotations

import pytest

from holdfast.config import Options
from holdfast.core.consistency import Consistency
from holdfast.model.contract import Contract
from holdfast.model.network import Network
from holdfast.types import OutputState
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import _windows as windows
from holdfast.verify.sim.networks import small
from holdfast.verify.sim.simulation import Simulation
from tests.verify.sim.lab import Lab, S, group_steps, sources, union_of_two

OPTIONS = Options(recovery="replay", checkpoint_buckets=20)


def network(replicas: int) -> Network:
    net = Network("lab", bucket="20ms")
    both = net.union(*sources(net, 2)).apply(small)
    net.output("windows", windows(both, "1s", "20ms"), contract=Contract(within="4s"))
    net.protect(
        "main", replicas=replicas, on_failure="process", while_correcting="process", max_delay="1s"
    )
    return net


def test_results_continue_after_a_restart_although_an_input_is_always_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Borealis property 1. The node waited for an idle moment to begin a tentative line."""
    outcome = Lab(monkeypatch).run(
        lambda: network(1),
        Fault(5 * S, "skew", "s2", 20 * S, -3_000), Fault(14 * S, "kill", "main", S),
        seconds=28, options=OPTIONS, tweak=group_steps(1_000),
    )  # fmt: skip
    assert not outcome.failed, outcome.failed


def test_a_replica_that_has_caught_up_is_preferred_to_a_tentative_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica stayed in STABILIZATION forever, and the client kept reading tentative rows."""
    outcome = Lab(monkeypatch).run(
        lambda: network(2),
        Fault(3 * S, "kill", "main@2", S), Fault(14 * S, "cut", "s2<->main", 8 * S),
        seconds=26, options=OPTIONS, tweak=group_steps(1_000),
    )  # fmt: skip
    assert not outcome.failed, outcome.failed


@pytest.mark.parametrize("seed", range(4))
def test_replicas_do_not_wait_for_each_other_in_a_circle(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica asked to correct first, then let another replica go first before the reply."""
    circles: list[tuple[str, ...]] = []

    def waits_for(consistency: Consistency, at: int) -> str | None:
        failing = consistency.state is OutputState.UP_FAILURE
        return consistency.promises.waits_for(at) if failing else None

    def watch(sim: Simulation) -> None:
        def look() -> None:
            awaited = {
                node.name: waits_for(path.consistency, node.monotonic())
                for node in sim.cast.nodes
                if node.is_up
                for path in node.performer.core.paths.values()
                if path.position is not None
            }
            for name in awaited:
                chain = [name]
                while (other := awaited.get(chain[-1])) is not None and other not in chain:
                    chain.append(other)
                if other is not None:
                    circles.append((*chain, other))
            sim.world.at(sim.world.now + 50_000, look)

        sim.world.at(sim.world.now + S, look)

    outcome = Lab(monkeypatch).run(
        lambda: union_of_two(4, "500ms"),
        Fault(4 * S, "silent", "s2", 6 * S),
        seconds=18, seed=seed, options=Options(recovery="replay", checkpoint_buckets=3),
        tweak=watch,
    )  # fmt: skip
    assert not outcome.failed, outcome.failed
    assert not circles, circles[0]
