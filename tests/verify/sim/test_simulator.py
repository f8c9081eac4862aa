"""The simulator detects the defects that it is built to detect, and is deterministic."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from holdfast.cli.main import main
from holdfast.cluster.controller import Controller
from holdfast.config import Options
from holdfast.errors import InputError
from holdfast.storage import Counter, Log
from holdfast.streams.serving import Service
from holdfast.verify.chaos import SCENARIOS, find
from holdfast.verify.history import Given, Reported
from holdfast.verify.scenario import KINDS, Fault, Scenario, parse_scenario
from holdfast.verify.sim import random_scenarios
from holdfast.verify.sim.networks import NETWORKS
from holdfast.verify.sim.random_scenarios import options_of, protect, scenario_of
from holdfast.verify.sim.simulation import shrink, simulate
from tests.verify.sim.mutations import MUTATIONS

S = 1_000_000

#: Found by a random seed of that time: a node that lost its log released the buckets of its source
#: when the first of its two consumers had acknowledged, although the other might still need them.
UNHEARD_READER = """
name = "unheard-reader"
network = "fan"
seconds = 9.1
seed = 3170
fault = [
    { at = "1974ms", do = "replace", on = "first", for = "750ms" },
    { at = "2673ms", do = "full", on = "right", for = "175ms" },
    { at = "5943ms", do = "wipe", on = "right", for = "1500ms" },
    { at = "6847ms", do = "replace", on = "first", for = "1250ms" },
]
"""


def test_random_seeds_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """A few seeds; `make test` runs two hundred."""
    assert main(["simulate", "--seeds", "1..6"]) == 0
    output = capsys.readouterr().out
    assert "6 seeds" in output and "0 failed" in output


def test_one_seed_gives_the_same_trace_under_two_hash_seeds() -> None:
    """Byte for byte, including faults, history and verdicts."""
    script = (
        "import hashlib\n"
        "from holdfast.verify.sim import random_scenarios\n"
        "from holdfast.verify.sim.simulation import simulate\n"
        "for seed in (1, 2, 3, 12, 13, 14):\n"
        "    random_scenarios.FAULTS_2 = seed > 8\n"
        "    o = simulate(random_scenarios.scenario_of(seed))\n"
        "    text = o.world.transcript() + repr(o.history.events) + repr(o.verdicts)\n"
        "    print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert len(set(traces[0].split())) == 6


def test_a_defect_found_by_a_seed_stays_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = parse_scenario(UNHEARD_READER)
    assert simulate(scenario).failed == []

    def hasty(self: Service, stream: str, *position: object) -> None:
        listeners, self.on_ack = self.on_ack, []
        acknowledge(self, stream, *position)  # type: ignore[arg-type]
        self.on_ack = listeners
        if stream in self.logs[stream].streams():
            for notify in listeners:
                notify(stream, self.logs[stream].trimmable(stream))

    acknowledge = Service.acknowledge
    monkeypatch.setattr(Service, "acknowledge", hasty)
    assert "alive" in {verdict.checker for verdict in simulate(scenario).failed}


def test_an_epoch_that_was_never_registered_replaces_no_instance(tmp_path: object) -> None:
    """A request may be executed long after the process has repeated the request."""
    log = Log.open(str(tmp_path), "controller", fsync="never")
    controller = Controller(log)
    epoch = controller.next_epoch("node")
    assert controller.register("node", "here", epoch)
    late = controller.next_epoch("node")
    assert controller.register("node", "here", epoch)
    assert controller.register("node", "there", late)
    assert not controller.register("node", "here", epoch)
    assert controller.address("node") == "there"
    log.append(Counter("something", 1))
    log.close()
    log = Log.open(str(tmp_path), "controller", fsync="never")
    assert not Controller(log).register("node", "here", epoch)  # also after a restart
    log.close()


def test_a_failing_seed_shrinks_to_a_short_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = next(m for m in MUTATIONS if m.name == "skip the checksum of a delivery")
    mutation.plant(monkeypatch)

    def fails(scenario: Scenario) -> bool:
        return "wrong" in {verdict.checker for verdict in simulate(scenario).failed}

    original = Scenario("many", "line", 15, (
        Fault(0, "kill", "first", S),
        Fault(2 * S, "slow", "second", 2 * S, 3.0),
        Fault(3 * S, "damage", "third->client-counts", 4 * S),
        Fault(4 * S, "pause", "client-counts", S),
        Fault(5 * S, "full", "third", S),
    ), 1)  # fmt: skip
    assert fails(original)
    assert parse_scenario(original.toml()) == original
    small = shrink(original, fails)
    assert fails(small)
    assert [fault.do for fault in small.faults] == ["damage"]
    assert small.faults[0].for_us <= 4 * S and small.seconds < 15
    assert parse_scenario(small.toml()) == small
    assert len(simulate(small).world.transcript().splitlines()) < 200


def test_a_broken_promise_is_reported_within_a_bucket_and_a_step() -> None:
    """A source is silent for longer than the promise; the monitor reports the violation in time."""
    silent_us, within_us, width_us = 5 * S, 2 * S, 500_000
    faults = (Fault(3_100_000, "silent", "s1", silent_us),)
    outcome = simulate(Scenario("silent", "line", 12, faults, 1))
    assert outcome.failed == []
    broken, restored = list(outcome.history.of(Reported))
    assert (broken.kept, restored.kept) == (False, True)
    first_missing_us = broken.bucket * width_us
    assert 0 <= broken.at - (first_missing_us + within_us) <= width_us
    assert restored.at > 3_100_000 + silent_us


def test_without_faults_all_results_are_on_time_and_no_violation_is_reported() -> None:
    for name in sorted(NETWORKS):
        outcome = simulate(Scenario("calm", name, 10, (), 1))
        assert outcome.failed == []
        assert not list(outcome.history.of(Reported))
        assert {delivered.output for delivered in outcome.history.of(Given)} == {
            op.name for op in NETWORKS[name]().outputs
        }


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenarios_for_real_processes_pass_in_virtual_time_too(name: str) -> None:
    assert simulate(find(name), Options(checkpoint_buckets=10)).failed == []


RARE_FAULTS = {"hang", "clock", "rot", "rot-state", "eio-read", "eio-fsync", "end", "restore"}


def test_every_kind_of_fault_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without rare faults, which do not change the seeds that have none."""

    def generated() -> tuple[set[str], set[str]]:
        scenarios = [scenario_of(seed) for seed in range(1, 401)]
        return {fault.do for scenario in scenarios for fault in scenario.faults}, {
            scenario.network for scenario in scenarios
        }

    monkeypatch.setattr(random_scenarios, "FAULTS_2", False)
    assert generated() == (set(KINDS) - RARE_FAULTS, set(NETWORKS) - {"hours"})
    before = [scenario_of(seed) for seed in range(1, 41)]
    monkeypatch.setattr(random_scenarios, "FAULTS_2", True)
    assert generated() == (set(KINDS), set(NETWORKS))
    after = [scenario_of(seed) for seed in range(1, 41)]
    assert 10 < sum(a == b for a, b in zip(before, after, strict=True)) < 30
    assert {options_of(seed).recovery for seed in range(1, 20)} == {"replay", "checkpoint"}


def test_a_failure_of_an_hour_is_generated_for_at_most_one_percent_of_the_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_scenarios, "FAULTS_2", True)
    scenarios = [scenario_of(seed) for seed in range(1, 2_001)]
    hours = [
        scenario
        for scenario in scenarios
        if any(fault.for_us == 3_600 * S for fault in scenario.faults)
    ]
    assert 0 < len(hours) <= len(scenarios) / 100
    assert {scenario.network for scenario in hours} == {"hours"}


def test_networks_with_three_replicas_of_every_fragment_are_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replicas(seed: int) -> set[int]:
        network = NETWORKS["taps"]()
        protect(network, seed)
        return {protection.replicas for protection in network.protections.values()}

    monkeypatch.setattr(random_scenarios, "FAULTS_2", True)
    assert sum(replicas(seed) == {3} for seed in range(1, 101)) > 10


HEAD = 'network = "chain"\nseconds = 3\n'
FAULT = HEAD + '[[fault]]\nat = "1s"\non = "a"\nfor = "1s"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seconds = 3", "network is missing"),
        (HEAD + "surprise = 1", "unknown keys: surprise"),
        (FAULT + 'do = "smash"', "is not one of kill"),
        (HEAD + '[[fault]]\ndo = "kill"\nat = "1s"', "needs on"),
        (FAULT + 'do = "cut"', "expects a link"),
        (FAULT + 'do = "slow"', "needs value = a factor"),
        ("network = ", "not TOML"),
    ],
)
def test_an_invalid_scenario_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_scenario(text)


def test_a_fault_with_an_unknown_target_is_refused() -> None:
    scenario = Scenario("x", "chain", 3, (Fault(S, "kill", "nobody", S),))
    with pytest.raises(InputError, match="choose from controller"):
        simulate(scenario)


def test_the_simulator_is_fast_enough() -> None:
    """`holdfast simulate` prints the actual speed; a tenth of that speed is required here, because
    tests share their machine."""
    simulate(Scenario("warm", "line", 5, (), 1))
    began = time.process_time()
    outcome = simulate(Scenario("speed", "line", 60, (), 1))
    assert outcome.node_seconds / 60 / (time.process_time() - began) > 4
