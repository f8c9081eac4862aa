"""Ten scenarios on one chain of node processes with Spark: nothing lost, doubled or changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.chaos import SCENARIOS, find
from holdfast.chaos.deployment import Deployment
from holdfast.chaos.runner import run_scenario
from holdfast.checkers import check, verdict_table
from holdfast.engine.session import Sessions
from holdfast.history import Broke, Given, Healed, Ideal, Undone
from holdfast.supervise import EXPLAINED
from holdfast.types import Stability

#: As they come; stream time and state go on from one to the next.
ORDER = {
    "chain": ("kill", "pause", "wipe", "cut", "replace", "one-way", "kills", "slow", "resets",
              "silent"),
    "pair": ("tentative", "partition", "take-over"),
}  # fmt: skip


@pytest.fixture(scope="module")
def deployment(sessions: Sessions, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    deployment = Deployment(request.param, sessions.large)
    try:
        yield deployment.start()
    finally:
        deployment.stop()
    assert deployment.left() == []


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("deployment", "name"),
    [(network, name) for network, names in ORDER.items() for name in names],
    indirect=["deployment"],
)
def test_nothing_is_lost_doubled_or_changed(name: str, deployment: Deployment) -> None:
    history = run_scenario(find(name), deployment)
    verdicts = check(history, monitored=True)
    if failed := [verdict for verdict in verdicts if verdict.outcome == "failed"]:
        deployment.keep_storage = True
    assert not failed, f"{deployment.storage}\n{verdict_table(verdicts)}"
    assert len(list(history.of(Broke))) == len(list(history.of(Healed))) > 0
    assert list(history.of(Given)) and list(history.of(Ideal))
    if name == "tentative":
        assert any(given.stability == Stability.TENTATIVE for given in history.of(Given))
        assert list(history.of(Undone))


@pytest.mark.processes
@pytest.mark.parametrize("deployment", ["chain"], indirect=True)
def test_the_instance_that_was_replaced_found_out_by_itself(deployment: Deployment) -> None:
    (ended,) = [one for one in deployment.run.processes["second"].exits if one.replaced]
    assert ended.code == EXPLAINED
    assert "was replaced" in ended.last_words or "the older one must stop" in ended.last_words
    assert deployment.run.failures == []


def test_every_scenario_is_run() -> None:
    assert sorted(name for names in ORDER.values() for name in names) == sorted(SCENARIOS)
