"""How long recovery would take, from measured costs (CEC section III.A)."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.core.recovery_costs import Recovery, RecoveryCosts


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


def test_few_rows_can_lower_the_cost_of_a_row() -> None:
    """After a slow recovery, few rows are left to be replayed; the estimate must not stay."""
    costs = RecoveryCosts(entry_us=4.0, row_us=2_000.0, fixed_us=500_000.0)
    for _ in range(20):
        rows = int(700_000 / costs.row_us)  # as many as a stated time allows
        replay_us = 50_000 + 2 * rows
        costs.recovered(0, rows, 0, replay_us, 500_000 + replay_us)
    assert costs.row_us < 5


def test_few_rows_that_take_less_than_the_next_bucket_are_not_free() -> None:
    costs = RecoveryCosts(row_us=20.0)
    for _ in range(5):
        costs.recovered(0, rows=50, load_us=0, replay_us=400_000, all_us=850_000, next_us=450_000)
    assert costs.row_us == 20.0
    costs.recovered(0, rows=100_000, load_us=0, replay_us=400_000, all_us=850_000, next_us=450_000)
    assert costs.row_us == 4.0, "at most"


def test_steps_are_measured_until_a_recovery_has_replayed_rows() -> None:
    costs = RecoveryCosts()
    for _ in range(5):
        costs.stepped(rows=10, took_us=800_000)
    costs.recovered(0, rows=0, load_us=0, replay_us=0, all_us=450_000, next_us=450_000)
    costs = RecoveryCosts.of(costs.body())
    for _ in range(200):
        costs.stepped(rows=100_000, took_us=300_000)
    assert costs.row_us == pytest.approx(3.0, rel=0.01)
    costs.recovered(
        0, rows=200_000, load_us=0, replay_us=600_000, all_us=1_000_000, next_us=200_000
    )
    costs.stepped(rows=10, took_us=800_000)
    assert costs.row_us == pytest.approx(2.0)


def test_no_measurement_makes_rows_or_entries_free() -> None:
    costs = RecoveryCosts()
    costs.recovered(entries=100_000, rows=100_000, load_us=0, replay_us=0, all_us=100)
    assert costs.entry_us > 0 and costs.row_us > 0
    assert costs.predicted_us(0, 10**9) > 10_000_000


def test_a_recovery_lasts_until_the_first_new_bucket_is_committed() -> None:
    costs = RecoveryCosts()
    recovery = Recovery(upto=2, entries=80_000, load_us=400_000, opening_us=100_000)
    recovery.replayed({1: 50_000}, took_us=1_500_000)
    recovery.replayed({2: 50_000}, took_us=2_500_000)
    assert recovery.finished({3: 1_000}, 200_000, costs) == 4_700_000
    assert (costs.entry_us, costs.row_us) == (5.0, 38.0)
    assert costs.fixed_us == 300_000, "to open the log, and for the next bucket"
    assert costs.predicted_us(80_000, 0) == 700_000, "nothing to replay, no step for it"
    assert costs.predicted_us(80_000, 100_000) == 4_700_000


def test_the_first_recovery_replaces_the_assumed_fixed_costs_later_ones_correct_them() -> None:
    costs = RecoveryCosts()
    recovery = Recovery(upto=3, entries=0, load_us=0, opening_us=0)
    recovery.finished({3: 1_000}, 900_000, costs)
    assert costs.fixed_us == 900_000
    Recovery(upto=9, entries=0, load_us=0, opening_us=0).finished({3: 1_000}, 500_000, costs)
    assert costs.fixed_us == pytest.approx(700_000), "the mean of two"
    for _ in range(50):
        Recovery(upto=9, entries=0, load_us=0, opening_us=0).finished({3: 1_000}, 500_000, costs)
    assert costs.fixed_us == pytest.approx(500_000, rel=0.01), "old ones are forgotten"


def test_without_logged_costs_the_assumed_ones_apply() -> None:
    """The newest checkpoint may be from another form of recovery."""
    assert RecoveryCosts.of(()) == RecoveryCosts()
    assert RecoveryCosts.of((5.0, 2.0, 9)) == RecoveryCosts(), "of another version"


def test_a_recovery_that_ends_with_an_empty_bucket_does_not_make_the_next_one_cheap() -> None:
    """The bucket needs no job. One with rows pays for planning the first jobs."""
    costs = RecoveryCosts()
    Recovery(upto=3, entries=0, load_us=1_000, opening_us=20_000).finished({}, 5_000, costs)
    assert (costs.recoveries, costs.fixed_us, costs.step_us) == (1, 1_000_000, 0)
    Recovery(upto=3, entries=0, load_us=1_000, opening_us=20_000).finished({4: 0}, 9_000_000, costs)
    assert costs.fixed_us > 4_000_000, "not cheap, but possibly expensive"


def test_a_slow_replay_of_few_rows_does_not_hide_the_fixed_costs() -> None:
    """Its time is that of the first jobs, which the next recovery needs for its first bucket."""
    costs = RecoveryCosts(row_us=50_000.0)
    recovery = Recovery(upto=3, entries=70, load_us=10_000, opening_us=20_000)
    recovery.replayed({2: 20, 3: 20}, took_us=1_800_000)
    recovery.finished({4: 20}, 380_000, costs)
    assert costs.fixed_us >= 400_000
