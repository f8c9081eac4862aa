"""The estimates of the experiment `cec`, from times that are known."""

from __future__ import annotations

import numpy as np

from holdfast.experiments.cec_sweeps import CHUNK, ROWS, compared

REPEATS = 5


def test_a_slower_form_differs_from_noise() -> None:
    rng = np.random.default_rng(1)
    drift = 1 + 0.3 * np.sin(np.arange(100) / 10)  # of the machine, common to all forms
    took_s = {
        name: list(slower * drift * rng.uniform(0.9, 1.1, 100))
        for name, slower in (("none", 1.0), ("again", 1.0), ("literal", 1.25))
    }
    found = compared(took_s, REPEATS)
    assert found["ratio"]["none"] == 1 and found["ratio_90"]["none"] == [1, 1]
    low, high = found["ratio_90"]["again"]
    assert low < 1 < high and high - low < 0.05
    assert 0.78 < found["ratio"]["literal"] < 0.82
    assert len(found["ratios"]["literal"]) == REPEATS


def test_a_rare_long_chunk_counts() -> None:
    """A checkpoint that is seldom but long: the median of the chunks would not show it."""
    none = [1.0] * 100
    seldom = [6.0 if number % 10 == 0 else 1.0 for number in range(100)]
    found = compared({"none": none, "default": seldom}, REPEATS)
    assert found["ratio"]["default"] == round(100 / 150, 3)
    assert found["rows_per_s"]["none"] == [CHUNK * ROWS] * REPEATS
