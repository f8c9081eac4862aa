"""Scenarios on node processes with Spark, for a chain of two nodes and for two replicas: no row is
lost, duplicated or changed, and tentative results are corrected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.core.quarantine import EXIT_CODES
from holdfast.engine.session import Sessions
from holdfast.types import Stability
from holdfast.verify.chaos import SCENARIOS, find
from holdfast.verify.chaos.deployment import Deployment
from holdfast.verify.chaos.runner import run_scenario
from holdfast.verify.checkers import check, verdict_table
from holdfast.verify.history import Broke, Given, Healed, History, Ideal

#: In the order of execution; stream time and state continue from one scenario to the next.
CHAIN = ("kill", "pause", "wipe", "cut", "replace", "one-way", "kills", "slow", "resets", "silent")
PAIR = ("tentative", "partition", "take-over")


@pytest.fixture(scope="class")
def deployment(sessions: Sessions, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    deployment = Deployment(request.cls.network, sessions.large)
    try:
        yield deployment.start()
    finally:
        deployment.stop()
    assert deployment.left() == []


def judged(name: str, deployment: Deployment) -> History:
    history = run_scenario(find(name), deployment)
    verdicts = check(history, monitored=True)
    if failed := [verdict for verdict in verdicts if verdict.outcome == "failed"]:
        deployment.keep_storage = True
    assert not failed, f"{deployment.storage}\n{verdict_table(verdicts)}"
    assert len(list(history.of(Broke))) == len(list(history.of(Healed))) > 0
    assert list(history.of(Given)) and list(history.of(Ideal))
    return history


@pytest.mark.processes
@pytest.mark.timeout(180)
class TestTwoNodesInARow:
    network = "chain"

    @pytest.mark.parametrize("name", CHAIN)
    def test_no_row_is_lost_duplicated_or_changed(self, name: str, deployment: Deployment) -> None:
        judged(name, deployment)

    def test_the_replaced_instance_stops_itself(self, deployment: Deployment) -> None:
        (exited,) = [
            process_exit
            for process_exit in deployment.run.processes["second"].exits
            if process_exit.replaced
        ]
        assert exited.code == EXIT_CODES["transport"]
        assert "another process has replaced this host" in exited.last_words
        assert deployment.run.failures.all() == []


@pytest.mark.processes
@pytest.mark.timeout(180)
class TestTwoReplicas:
    network = "pair"

    @pytest.mark.parametrize("name", PAIR)
    def test_no_row_is_lost_duplicated_or_changed(self, name: str, deployment: Deployment) -> None:
        history = judged(name, deployment)
        if name == "tentative":
            deliveries = list(history.of(Given))
            tentative = {one.bucket for one in deliveries if one.stability == Stability.TENTATIVE}
            assert tentative & {one.bucket for one in deliveries if one.replaces}


def test_every_scenario_is_run() -> None:
    assert sorted((*CHAIN, *PAIR)) == sorted(SCENARIOS)
