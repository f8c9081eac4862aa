"""Continuous eventual checkpoints in simulated runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.config import Options
from holdfast.core import progress_events as core
from holdfast.engine.state import Version
from holdfast.errors import StorageFull
from holdfast.model.network import Network
from holdfast.model.protection import FailurePolicy
from holdfast.node.executor import Performer
from holdfast.verify.history import Owed
from holdfast.verify.scenario import Fault
from holdfast.verify.sim.networks import NETWORKS, cec_chain, cec_line, cec_single
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.random_scenarios import options_of, protect, scenario_of
from holdfast.verify.sim.simulation import Outcome, Simulation
from tests.verify.sim.lab import Lab, S, failed, needs

OPTIONS = Options(checkpoint_buckets=3)


def network(on_failure: FailurePolicy = "block", replicas: int = 1) -> Network:
    net = cec_single()
    net.protect(
        "main", recovery="cec", recovery_rows=15, on_failure=on_failure, max_delay="1500ms",
        replicas=replicas,
    )  # fmt: skip
    return net


def chain() -> Network:
    net = cec_chain()
    for name in ("first", "second"):
        net.protect(name, recovery="cec", recovery_rows=15, on_failure="block")
    return net


def line() -> Network:
    net = cec_line()
    for name in ("first", "second", "third"):
        net.protect(name, recovery="cec", recovery_rows=15, on_failure="block")
    return net


def node_of(sim: Simulation, name: str) -> NodeProcess:
    node = sim.cast.by_name[name]
    assert isinstance(node, NodeProcess)
    return node


def counted(outcome: Outcome, name: str) -> Counter[str]:
    """How often each event of a node happened."""
    return Counter(event for _, who, event, _ in outcome.world.trace if who == name)


# -- seeds --------------------------------------------------------------------------------------


def test_seeds_with_eventual_checkpoints_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "1..4", "--only", "cec"]) == 0
    assert "4 seeds, 0 failed" in capsys.readouterr().out


def test_only_selects_the_scenarios_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "calm", "--only", "cec"]) == 2
    assert "--only selects scenarios of seeds" in capsys.readouterr().err


def test_seeds_choose_all_protections_and_limits() -> None:
    modes, limits = set(), set()
    for seed in range(1, 200):
        scenario = scenario_of(seed, "cec")
        net = NETWORKS[scenario.network]()
        protect(net, seed)
        interval = bool(options_of(seed, scenario.network).checkpoint_buckets)
        for it in net.protections.values():
            if it.recovery == "cec":
                modes.add((it.on_failure, it.replicas))
                limits.add((it.recovery_rows is None, it.recovery_entries is None, interval))
    assert modes >= {(kind, n) for kind in ("process", "delay", "block") for n in (1, 2, 3)}
    assert len(limits) == 8


def test_no_storage_of_eventual_checkpoints_is_lost() -> None:
    lost = {"wipe", "replace", "rot", "restore"}
    for seed in range(1, 200):
        scenario = scenario_of(seed, "cec")
        net = NETWORKS[scenario.network]()
        protect(net, seed)
        for fault in scenario.faults:
            fragment = fault.on.partition("@")[0]
            assert fault.do not in lost or net.protection(fragment).recovery != "cec"


# -- failures of nodes --------------------------------------------------------------------------


def test_adjacent_nodes_recover_together(lab: Lab) -> None:
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


def test_a_crash_at_any_write_of_a_checkpoint_is_harmless(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syncs of files, the record, and the removal of the previous one."""
    writes, original = list(range(1, 9)), Performer.flush

    def tweak(sim: Simulation) -> None:
        def flush(self: Performer, version: Version, costs: tuple[float, ...]) -> int:
            disk = node_of(sim, self.name).disk
            if sim.world.now > 2 * S and writes and disk.crash_after is None:
                sim.inject(Fault(0, "torn", self.name, S, float(writes.pop())))
            return original(self, version, costs)

        monkeypatch.setattr(Performer, "flush", flush)

    outcome = lab.run(network, seconds=30, options=OPTIONS, tweak=tweak)
    needs(not writes, "there were enough checkpoints")
    assert failed(outcome) == {}


# -- checkpoints beside the steps ---------------------------------------------------------------


def flushing_for(took_us: int, behind: list[int]) -> Callable[[Simulation], None]:
    """Every checkpoint takes this time longer. `behind`: how many buckets were logged meanwhile."""

    def tweak(sim: Simulation) -> None:
        for node in sim.cast.nodes:
            node.flush = partial(slowly, node, node.flush)  # type: ignore[method-assign]

    def slowly(node: NodeProcess, flush: Any, version: Version, costs: tuple[float, ...]) -> None:
        def over() -> None:
            behind.append(node.performer.versions[version.path].bucket - version.bucket)
            flush(version, costs)

        node.after(took_us, over)

    return tweak


def test_a_checkpoint_that_takes_longer_than_many_steps_is_harmless(lab: Lab) -> None:
    behind: list[int] = []
    kills = [Fault(int(at * S), "kill", name, S // 3)
             for at in (4.6, 8.1, 13.7) for name in ("first", "second")]  # fmt: skip
    outcome = lab.run(
        chain, *kills, seconds=24, options=Options(checkpoint_buckets=7),
        tweak=flushing_for(2_500_000, behind),
    )  # fmt: skip
    needs(max(behind) >= 5 and len(behind) >= 6, "checkpoints take longer than many steps")
    assert failed(outcome) == {}


def test_a_checkpoint_on_a_full_disk_is_retried(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full only while checkpoints are written, so that steps continue."""
    original, paths = Performer.flush, Counter[str]()

    def tweak(sim: Simulation) -> None:
        def flush(self: Performer, version: Version, costs: tuple[float, ...]) -> int:
            disk = node_of(sim, self.name).disk
            disk.full = 3 * S < sim.world.now < 6 * S or 9 * S < sim.world.now < 11 * S
            paths[version.path] += 1
            try:
                return original(self, version, costs)
            except StorageFull:
                paths[version.path] = 0
                raise
            finally:
                disk.full = False

        monkeypatch.setattr(Performer, "flush", flush)

    kills = [Fault(at, "kill", "main", S // 2) for at in (4_500_000, 6_100_000, 10_500_000)]
    outcome = lab.run(network, *kills, seconds=16, options=OPTIONS, tweak=tweak)
    needs(counted(outcome, "main")["could not checkpoint"] >= 6, "the disk was full")
    assert failed(outcome) == {}
    assert min(paths.values()) > 1, "no path was checkpointed after its last failure"


def test_no_tentative_version_is_made_durable(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    tentative: list[Version] = []
    #: Whether the path had a tentative line.
    flushed: list[tuple[Version, bool]] = []
    step, flush = Performer.step, Performer.flush

    def watched_step(self: Performer, work: Any, version: Version) -> Version:
        after = step(self, work, version)
        if isinstance(work, core.RunTentative):
            tentative.append(after)
        return after

    def watched_flush(self: Performer, version: Version, costs: tuple[float, ...]) -> int:
        flushed.append((version, version.path in self._tentative))
        return flush(self, version, costs)

    monkeypatch.setattr(Performer, "step", watched_step)
    monkeypatch.setattr(Performer, "flush", watched_flush)
    faults = [Fault(3 * S, "silent", "s2", 8 * S), Fault(6 * S, "kill", "main", S)]
    options = Options(checkpoint_buckets=3, group_buckets_max=2)
    outcome = lab.run(partial(network, "process", 2), *faults, seconds=20, options=options)
    needs(tentative and any(beside for _, beside in flushed), "checkpoints beside tentative lines")
    assert outcome.failed == []
    assert not any(version is other for version, _ in flushed for other in tentative)


# -- damage -------------------------------------------------------------------------------------


class Damage:
    """One file that the newest record of a node names is truncated or deleted, while the node is
    down."""

    def __init__(self, name: str, path: str, how: str, at_us: int) -> None:
        self._name, self._path, self._how, self._at_us = name, path, how, at_us
        self.file = ""
        #: Other files that the record names, before and after the restart.
        self.others: list[str] = []
        self.retained: list[str] = []

    def __call__(self, sim: Simulation) -> None:
        sim.world.at(self._at_us, partial(self._strike, sim))

    def _strike(self, sim: Simulation) -> None:
        node = node_of(sim, self._name)
        bucket, body = node.log.states(self._path)[-1]
        files = Version.of(self._path, bucket, body).files()
        node.die("killed")
        needs(files, "the record names files")
        self.file, *self.others = reversed([f"/{self._name}/state/{file}" for file in files])
        if self._how == "delete":
            node.disk.delete(self.file)
        else:
            held: Any = node.disk._nodes[self.file]
            del held.data[len(held.data) // 2 :]
        node.start()

        def look() -> None:
            self.retained = [file for file in self.others if node.disk.exists(file)]

        sim.world.at(self._at_us + S, look)


@pytest.mark.parametrize("how", ["truncate", "delete"])
def test_a_damaged_layer_stops_the_node(lab: Lab, how: str) -> None:
    """The inputs that could replace it are released. Checkers see a node that stops, but no wrong
    result."""
    damage = Damage("main", "merged", how, 6 * S)
    outcome = lab.run(network, seconds=14, options=OPTIONS, tweak=damage)
    assert failed(outcome).keys() >= {"lost", "alive"}
    assert not failed(outcome).keys() & {"wrong", "doubled", "undone", "converge"}
    assert "main         is quarantined: " in outcome.world.transcript()


def test_a_damaged_layer_is_named_and_the_others_are_retained(lab: Lab) -> None:
    damage = Damage("main", "merged", "delete", 6 * S)
    outcome = lab.run(network, seconds=10, options=OPTIONS, tweak=damage)
    needs(damage.others, "the record names several files")
    assert damage.retained == damage.others
    assert any(
        who == "main" and event == "fails:" and damage.file in str(more)
        for _, who, event, more in outcome.world.trace
    )


def test_a_node_whose_results_cannot_be_computed_any_more_refuses_to_start(lab: Lab) -> None:
    """Also if all its operators are convergent: the window needs released inputs."""
    damage = Damage("third", "windows", "delete", 6_200_000)
    outcome = lab.run(line, seconds=14, options=Options(checkpoint_buckets=1), tweak=damage)
    assert any(event.startswith("is quarantined: ") for event in counted(outcome, "third"))
    assert "Trimmed" not in str(failed(outcome))


@pytest.mark.parametrize("replicas", [1, 2])
def test_only_another_replica_owes_results_while_the_state_of_a_node_is_damaged(
    lab: Lab, replicas: int
) -> None:
    """Tentative steps of the node are retried until the file is restored."""
    faults = [Fault(3 * S, "silent", "s2", 12 * S), Fault(8 * S, "rot-state", "main", 5 * S)]
    run = partial(network, "process", replicas)
    outcome = lab.run(run, *faults, seconds=20, seed=1, options=OPTIONS)
    needs(counted(outcome, "main")["failed"] > 3, "tentative steps have failed")
    assert failed(outcome) == {}
    owed = [e for e in outcome.history.of(Owed) if e.output == "merged"]
    newest = [event.age_us for event in owed if event.at <= 9 * S]
    assert (newest[-1] is None) == (replicas == 1)
