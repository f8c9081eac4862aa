"""The fit of growth curves finds known exponents, also with noise and a constant cost; the summary
compares only steps with equal results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import HoldfastError
from holdfast.experiments.growth import DIMENSIONS, jobs, required, summary, table
from holdfast.experiments.growth_bench import Written
from holdfast.experiments.growth_fit import fit, growth

SIZES = np.array([1e3, 1e4, 1e5, 5e5, 1e6, 2e6, 5e6])


@pytest.mark.parametrize("p", [0.3, 0.77, 1.0, 1.5])
def test_exact_points_give_their_exponent(p: float) -> None:
    found = fit(list(SIZES), list(50.0 + 4_000.0 * (SIZES / 5e6) ** p))
    assert found.p == pytest.approx(p, abs=0.02)
    assert found.a == pytest.approx(50.0, rel=0.25)
    assert found.residual < 0.01
    assert found.at(SIZES)[-1] == pytest.approx(4_050.0, rel=0.03)


def test_noise_of_some_percent_moves_the_exponent_little() -> None:
    rng = np.random.default_rng(7)
    for _ in range(5):
        noise = np.exp(rng.normal(0.0, 0.05, len(SIZES)))
        found = growth(list(SIZES), list((50.0 + 4_000.0 * SIZES / 5e6) * noise))
        assert found.exponent == pytest.approx(1.0, abs=0.15)
        assert not found.flat and found.certain


def test_a_constant_cost_is_flat_whatever_its_last_point() -> None:
    found = growth([1, 10, 100, 1_000], [80.0, 82.0, 79.0, 95.0])
    assert found.flat and found.exponent == found.slope < 0.1
    assert found.last_slope > 0.05


def test_growth_faster_than_linear_is_not_hidden_by_the_constant() -> None:
    x = np.array([1.0, 2, 5, 10, 20, 50, 100])
    found = growth(list(x), list(30.0 + 2.0 * x**1.6))
    assert not found.flat and found.exponent > 1.1


def test_an_exponent_from_few_points_is_uncertain() -> None:
    found = growth([1, 10, 100, 1_000], [50.0, 50.0, 51.0, 400.0])
    assert found.points_above == 1 and not found.flat and not found.certain


def test_pure_power_without_constant() -> None:
    found = growth([1, 2, 4, 8], [10.0, 20.0, 40.0, 80.0])
    assert not found.flat
    assert found.exponent == pytest.approx(1.0, abs=0.05)


def measured(x: int, step_ms: float) -> dict[str, Any]:
    """An invented point."""
    return {
        "x": x, "steps": 1_000, "step_ms": step_ms, "step_ms_p99": 2 * step_ms,
        "step_ms_mean": step_ms, "rows_out": 100.0, "bytes_written": 60_000,
        "job_bytes_written": 65_536, "state_bytes": 20 * x, "files": 10,
        "memory_mb": {"heap": 60.0, "python": 140.0},
    }  # fmt: skip


def results() -> dict[str, dict[str, Any]]:
    """Invented results: linear, with 10 ms of constant cost, except for windows and keys."""
    memory = {"heap_mb": 70.0, "python_peak_mb": 200.0, "limit_mb": 2_048.0}
    found = {}
    for job in jobs(quick=True):
        top = 300.0 if job.dimension not in ("keys", "window", "join_bound", "history") else 1.0
        points = [measured(x, 10.0 + top * x / job.xs[-1]) for x in job.xs]
        found[job.dimension] = {"points": points, "skipped": [], "memory": memory}
    return found


def test_the_summary_has_an_exponent_for_each_dimension_and_the_ratios() -> None:
    result = summary(results())
    assert list(result["exponents"]) == list(DIMENSIONS)
    assert result["exponents"]["columns"] == pytest.approx(1.0, abs=0.05)
    assert result["curves"]["window"]["flat"] and result["exponents"]["window"] < 0.05
    assert result["keys_step_ratio"] == pytest.approx(1.1, abs=0.01)
    assert result["keys_bytes_ratio"] == 3.0  # 1,000 keys of 20 bytes in each step
    assert result["window_ratio"] == pytest.approx(1.08, abs=0.02)
    assert result["driver_memory"]["peak_mb"] == 270.0
    assert "3.00 times the touched state written in 1,000 steps" in str(table(result).caption)


def test_steps_with_different_results_are_not_compared() -> None:
    found = results()
    found["join_bound"]["points"][-1]["rows_out"] = 900.0
    with pytest.raises(HoldfastError, match="expected equally many results at 10 and 600"):
        summary(found)


def test_sizes_of_ratios_are_always_measured() -> None:
    for quick in (True, False):
        for job in jobs(quick):
            assert set(required(job)) <= set(job.xs)
            assert list(job.xs) == sorted(set(job.xs))
            assert len(job.xs) >= 4 or job.dimension == "history"


def test_written_files_are_counted_once_and_rewritten_ones_again(tmp_path: Path) -> None:
    written = Written(str(tmp_path))
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "a.layer").write_bytes(b"x" * 100)
    (tmp_path / "job.path.1.parquet").write_bytes(b"x" * 10)
    written.look()
    written.look()
    assert (written.state_bytes, written.job_bytes, written.files) == (100, 10, 2)
    os.utime(tmp_path / "job.path.1.parquet", ns=(1, 1))
    (tmp_path / "path" / "a.layer").unlink()
    (tmp_path / "path" / "b.layer").write_bytes(b"x" * 300)
    written.look()
    assert (written.state_bytes, written.job_bytes, written.files) == (400, 20, 2)
    assert written.held_bytes() == 300
