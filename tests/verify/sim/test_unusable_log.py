"""A log to which nothing can be appended until the node is restarted."""

from __future__ import annotations

import pytest

from holdfast.verify.scenario import Fault
from tests.verify.sim.lab import Lab, S, union_of_two


def test_a_failed_sync_during_a_failure_does_not_stop_tentative_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Borealis property 1. Only tentative steps ran, and their errors never restarted the node:
    its log stayed unusable until the missing source returned. (Seeds 9129, 9338 and 9546.)"""
    outcome = Lab(monkeypatch).run(
        lambda: union_of_two(1, "500ms"),
        Fault(5 * S, "silent", "s2", 20 * S), Fault(9 * S, "eio-fsync", "main", 2 * S),
        seconds=30,
    )  # fmt: skip
    assert not outcome.failed, outcome.failed
