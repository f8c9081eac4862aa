"""Simulated runs for single tests, each with its own network, and with faults that are injected at
a moment that only the run itself determines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.config import Options
from holdfast.engine.inputs import OnResults, Results, StepResult
from holdfast.model.contract import Contract
from holdfast.model.network import Network
from holdfast.verify.history import Given, Hinted, History
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim import inspection
from holdfast.verify.sim.networks import NETWORKS, small
from holdfast.verify.sim.networks import _sources as sources
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulation import Outcome, Simulation
from holdfast.verify.sim.tables import Rows

S = 1_000_000


def union_of_two(replicas: int, bucket: str = "100ms", x: str = "1500ms") -> Network:
    """Two sources, one fragment, one output."""
    net = Network("lab", bucket=bucket)
    both = net.union(*sources(net, 2)).apply(small)
    net.output("merged", both, contract=Contract(within="3s"))
    net.protect(
        "main", replicas=replicas, on_failure="process", while_correcting="process", max_delay=x
    )
    return net


class Lab:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def run(
        self,
        network: Callable[[], Network],
        *faults: Fault,
        seconds: float,
        seed: int = 0,
        options: Options | None = None,
        tweak: Callable[[Simulation], None] = lambda sim: None,
    ) -> Outcome:
        """Runs the network with these faults; all checkers judge the outcome."""
        self._monkeypatch.setitem(NETWORKS, "lab", network)
        scenario = Scenario("lab", "lab", seconds, faults, seed)
        sim = Simulation(scenario, options or Options())
        tweak(sim)
        return sim.run()


def finding(reason: str) -> pytest.MarkDecorator:
    """Marks a test of a known defect that is not fixed yet: it must fail for this reason only."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


def group_steps(bucket_us: int) -> Callable[[Simulation], None]:
    """Sets the time that each further bucket of a step takes. Steps of one bucket keep their
    duration, and corrections become slow."""

    def tweak(sim: Simulation) -> None:
        for node in sim.cast.nodes:
            node._bucket_us = bucket_us

    return tweak


def needs(condition: object, what: str) -> None:
    """Checks a precondition of a test. A violation is no finding, hence no `AssertionError`."""
    if not condition:
        raise RuntimeError(f"the precondition of this test does not hold: {what}")


def strike(sim: Simulation, at_us: int, fault: Callable[[str, str], Fault]) -> None:
    """Injects a fault while replicas correct their results. `fault` receives the name of the
    replica that the client reads, which answers meanwhile, and the name of another replica."""

    def hit() -> None:
        (client,) = sim.cast.clients
        answers = inspection.read_from(client.follower)
        others = [node.name for node in sim.cast.nodes if node.name != answers]
        needs(answers and others, "the client reads no replica, or there is no other replica")
        assert answers is not None
        sim.inject(fault(answers, others[0]))

    sim.world.at(at_us, hit)


def failed(outcome: Outcome) -> dict[str, str]:
    return {verdict.checker: verdict.why for verdict in outcome.failed}


def first_seen_us(history: History, output: str) -> dict[int, int]:
    """When the client first had each bucket, stable or tentative."""
    first_seen: dict[int, int] = {}
    newest = -1
    for event in history.of(Hinted):
        if event.output == output:
            first_seen |= dict.fromkeys(range(newest + 1, event.upto + 1), event.at)
            newest = max(newest, event.upto)
    return first_seen


def given(history: History, stability: str, since_us: int, until_us: int) -> list[Given]:
    return [
        event
        for event in history.of(Given)
        if event.stability == stability and since_us <= event.at < until_us
    ]


def flip_result(node: NodeProcess) -> None:
    """Damages one row of the next non-empty bucket that the node computes."""
    engine = node.performer.engine
    original: Any = engine.run

    def damage(results: Results) -> None:
        for buckets in results.values():
            if buckets and engine.run is wrong:
                bucket, table = buckets[0]
                buckets[0] = (bucket, Rows(table.rows).damaged())
                engine.run = original  # type: ignore[method-assign]

    wrong = changing(original, damage)
    engine.run = wrong  # type: ignore[method-assign]


def changing(run: Any, change: Callable[[Results], None]) -> Any:
    """`StepEngine.run` with other results."""

    def changed(*args: Any, on_results: OnResults | None = None, **options: Any) -> StepResult:
        def first_changed(results: Results) -> None:
            change(results)
            if on_results is not None:
                on_results(results)

        result: StepResult = run(*args, on_results=first_changed, **options)
        return result

    return changed
