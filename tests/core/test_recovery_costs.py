"""How long recovery would take, from measured costs (CEC section III.A)."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.core.recovery_costs import RecoveryCosts


def test_before_the_first_recovery_rows_cost_what_they_cost_in_normal_steps() -> None:
    costs = RecoveryCosts()
    for _ in range(200):
        costs.stepped(rows=1_000, took_us=50_000)
    assert costs.row_us == pytest.approx(50.0, rel=0.01)
    costs.stepped(rows=0, took_us=50_000)
    assert costs.row_us == pytest.approx(50.0, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_predictions_approach_what_recoveries_take(seed: int) -> None:
    rng, costs = Random(seed), RecoveryCosts()
    for _ in range(200):
        costs.stepped(rows=1_000, took_us=50_000)
    errors = []
    for _ in range(20):
        entries, rows = rng.randrange(20_000, 200_000), rng.randrange(20_000, 1_000_000)
        load_us, replay_us = 4 * entries, 3 * rows
        all_us = int((700_000 + load_us + replay_us) * rng.uniform(0.85, 1.15))
        errors.append(abs(costs.predicted_us(entries, rows) - all_us) / all_us)
        costs.recovered(entries, rows, load_us, replay_us, all_us)
        assert RecoveryCosts.of(costs.body()).predicted_us(entries, rows) == pytest.approx(
            costs.predicted_us(entries, rows), rel=0.01
        )
    assert errors[0] > 1, "a normal step is no recovery"
    assert sorted(errors[1:])[9] < 0.15
    assert max(errors[1:]) < 0.4


def test_small_recoveries_say_nothing_about_the_cost_of_rows() -> None:
    costs = RecoveryCosts(entry_us=4.0, row_us=3.0, fixed_us=500_000.0)
    costs.recovered(entries=10, rows=100, load_us=90_000, replay_us=200_000, all_us=900_000)
    assert (costs.entry_us, costs.row_us) == (4.0, 3.0)
    assert costs.fixed_us == pytest.approx(900_000, rel=0.01)
