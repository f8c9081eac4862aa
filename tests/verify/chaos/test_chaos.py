"""Scenarios on node processes with Spark, a chain of two and two replicas: nothing lost, doubled or
changed, and what is tentative is corrected."""

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

#: As they come; stream time and state go on from one to the next.
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
    def test_nothing_is_lost_doubled_or_changed(self, name: str, deployment: Deployment) -> None:
        judged(name, deployment)

    def test_the_instance_that_was_replaced_found_out_by_itself(
        self, deployment: Deployment
    ) -> None:
        (ended,) = [one for one in deployment.run.processes["second"].exits if one.replaced]
        assert ended.code == EXIT_CODES["transport"]
        assert "was replaced" in ended.last_words or "the older one must stop" in ended.last_words
        assert deployment.run.failures.all() == []


@pytest.mark.processes
@pytest.mark.timeout(180)
class TestTwoReplicas:
    network = "pair"

    @pytest.mark.parametrize("name", PAIR)
    def test_nothing_is_lost_doubled_or_changed(self, name: str, deployment: Deployment) -> None:
        history = judged(name, deployment)
        if name == "tentative":
            given = list(history.of(Given))
            guessed = {one.bucket for one in given if one.stability == Stability.TENTATIVE}
            assert guessed & {one.bucket for one in given if one.replaces}


def test_every_scenario_is_run() -> None:
    assert sorted((*CHAIN, *PAIR)) == sorted(SCENARIOS)
