"""The clock of a source is stepped ahead and back: outputs continue, no accepted row is lost."""

from __future__ import annotations

import pytest

from holdfast.verify.history import PutAside
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.simulation import simulate

S, HOUR_MS = 1_000_000, 3_600_000.0


@pytest.mark.parametrize("network", ["line", "chain", "pair", "tree", "pairs-2"])
@pytest.mark.parametrize(
    ("for_us", "ms"),
    [(400_000, 24 * HOUR_MS), (9 * S, HOUR_MS), (9 * S, -HOUR_MS), (6 * S, -HOUR_MS / 6)],
    ids=["a day ahead for a moment", "an hour ahead", "an hour back", "ten minutes back"],
)
def test_outputs_continue_when_the_clock_of_a_source_is_stepped(
    network: str, for_us: int, ms: float
) -> None:
    fault = Fault(4 * S, "skew", "s1", for_us, ms)
    assert simulate(Scenario("set", network, 20, (fault,), 1)).failed == []


def test_rows_stamped_by_a_wrong_clock_become_dead_letters_and_are_reported() -> None:
    fault = Fault(4 * S, "skew", "s2", 3 * S, -HOUR_MS)
    outcome = simulate(Scenario("set", "chain", 15, (fault,), 1))
    assert outcome.failed == []
    put_aside = sum(len(event.rows) for event in outcome.history.of(PutAside))
    assert put_aside > 60  # including the rows that are late without a fault
    transcript = outcome.world.transcript()
    assert "the wall clock stepped back by 3600.0 s" in transcript
    assert "late rows were rejected and written to the dead letters" in transcript
    assert "the source clock agrees with the wall clock again" in transcript
