"""Hosts with several nodes, and standbys, with the state machines of production (Flux sections 2.2
and 5.4)."""

from __future__ import annotations

import pytest

from holdfast.config import Options
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.random_host_faults import host_scenario_of
from holdfast.verify.sim.random_scenarios import options_of
from holdfast.verify.sim.simulation import Outcome, Simulation, simulate

S = 1_000_000
#: The first `OFTEN` seeds run with every test run, all of them with `make soak`.
SEEDS, OFTEN = 24, 6


def events_of(outcome: Outcome, process: str, event: str) -> list[str]:
    """The trace lines of a process with this event, with their times, in order."""
    return [
        f"{at / S:.3f} {' '.join(map(str, more))}"
        for at, name, text, more in outcome.world.trace
        if name == process and text == event
    ]


def run(*faults: Fault, seconds: float = 25, on: str = "pairs-hosts-2") -> Outcome:
    options = Options(checkpoint_buckets=7)
    outcome = simulate(Scenario("story", on, seconds, faults, seed=1), options)
    assert not outcome.failed, outcome.failed
    return outcome


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.soak] if seed > OFTEN else [])
        for seed in range(1, SEEDS + 1)
    ],
)
def test_losing_hosts_breaks_no_promise(seed: int) -> None:
    outcome = simulate(
        host_scenario_of(seed, checkpoints=bool(options_of(seed).checkpoint_buckets))
    )
    assert not outcome.failed, (outcome.failed, outcome.scenario.toml())


def test_a_standby_takes_over_the_nodes_of_a_lost_host() -> None:
    outcome = run(Fault(4 * S, "wipe", "host-1", 3 * S))
    assignments = events_of(outcome, "controller", "assigns")
    assert {line.split(" to ")[1] for line in assignments} == {"host-3"}
    assert {line.split()[1] for line in assignments} == {"lower.0", "lower.1@2", "upper.0"}


def test_a_resumed_host_whose_nodes_were_moved_becomes_a_standby() -> None:
    outcome = run(
        Fault(4 * S, "pause", "host-1", 5 * S), Fault(18 * S, "kill", "host-3", 4 * S), seconds=35
    )
    assignments = events_of(outcome, "controller", "assigns")
    assert [line.split(" to ")[1] for line in assignments] == ["host-3"] * 3 + ["host-1"] * 3


def test_an_orphaned_host_terminates_itself_and_restarts_when_the_controller_returns() -> None:
    outcome = run(Fault(4 * S, "kill", "controller", 14 * S), seconds=30)
    for host in ("host-1", "host-2", "host-3", "edge"):
        (ended,) = events_of(outcome, host, "terminated:")
        assert "no reply from the controller" in ended and 13 <= float(ended.split()[0]) <= 16
        assert len(events_of(outcome, host, "started")) == 2


def test_a_node_with_a_damaged_log_is_rebuilt_while_the_other_replica_continues() -> None:
    scenario = Scenario("story", "pair", 20, (Fault(5 * S, "kill", "main@2", S),), seed=1)
    story = Simulation(scenario, Options(checkpoint_buckets=7))
    disk = story.cast.by_name["main@2"].disk

    def rot() -> None:
        manifest = disk._file("/main@2/manifest").data
        manifest[len(manifest) // 2] ^= 0xFF

    story.world.at(int(5.5 * S), rot)
    outcome = story.run()
    assert not outcome.failed, outcome.failed
    (condition,) = [text for _, process, text, _ in outcome.world.trace
                    if process == "main@2" and text.startswith("is retried")]  # fmt: skip
    assert "damaged at byte" in condition
    assert events_of(outcome, "main@2", "is rebuilt") and events_of(outcome, "main@2", "is healthy")
