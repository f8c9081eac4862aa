"""How a cost grows: the fit of a + b x^p to measured points.

A step has a constant cost (planning, starting tasks), which hides the growth at small sizes. The
fit separates the two, provided that the growth dominates at enough points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

#: The growth dominates at points above this multiple of the constant. An exponent is certain if
#: there are `POINTS_MIN` of them.
RISE = 3.0
POINTS_MIN = 4
_EXPONENTS = np.linspace(0.05, 3.0, 119)
#: The constant is scanned as a share of the smallest measured cost.
_SHARES = np.concatenate([np.linspace(0.0, 0.98, 50), np.linspace(0.985, 1.2, 20)])


@dataclass(frozen=True, slots=True)
class Fit:
    """a + b x^p, by least squares of the logarithms."""

    a: float
    b: float
    p: float
    #: Root mean square of log(measured / fitted).
    residual: float

    def at(self, x: F64) -> F64:
        return np.asarray(self.a + self.b * x**self.p, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Growth:
    fit: Fit
    #: The exponent that counts: `fit.p`, or `slope` if the cost is flat.
    exponent: float
    #: Exponent of b x^p, without a constant.
    slope: float
    #: Exponent between the two largest sizes.
    last_slope: float
    #: Points above `RISE` times the constant of the fit.
    points_above: int
    #: Whether there are none. Constant and growth cannot be separated then: a fit with a constant
    #: would turn the noise of one point into any exponent.
    flat: bool

    @property
    def certain(self) -> bool:
        return self.points_above >= POINTS_MIN


def fit(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Scan a and p on a grid, with the best b >= 0 for each of them, and refine once. The squares
    are of logarithms, because the error of a measured time is a share of it."""
    xs, logs = np.asarray(x, dtype=np.float64), np.log(np.asarray(y, dtype=np.float64))
    low = float(np.exp(logs.min()))
    best = _best(xs, logs, _SHARES * low, _EXPONENTS)
    step_a, step_p = 0.02 * low, float(_EXPONENTS[1] - _EXPONENTS[0])
    near_a = np.clip(best.a + np.linspace(-step_a, step_a, 41), 0.0, None)
    near_p = np.clip(best.p + np.linspace(-step_p, step_p, 21), 0.01, None)
    return min(best, _best(xs, logs, near_a, near_p), key=lambda found: found.residual)


def _best(xs: F64, logs: F64, constants: F64, exponents: F64) -> Fit:
    scaled = xs / xs.max()  # powers of large sizes would lose digits
    powers = scaled[None, :] ** exponents[:, None]
    top = float(np.exp(logs.max()))
    # b is searched in logarithms as well, from none of the largest cost to all of it and more.
    factors = np.concatenate([[0.0], top * np.logspace(-4, 0.3, 44)])
    best: tuple[float, float, float, float] | None = None
    for constant in constants:
        grown = factors[None, :, None] * powers[:, None, :] + constant
        errors = ((np.log(np.maximum(grown, 1e-300)) - logs) ** 2).mean(axis=2)
        at_p, at_b = np.unravel_index(int(errors.argmin()), errors.shape)
        b, p = float(factors[at_b]), float(exponents[at_p])
        for _ in range(12):  # Gauss-Newton in b alone
            value = constant + b * powers[at_p]
            gradient = powers[at_p] / value
            norm = float((gradient**2).sum())
            if not norm > 0:
                break
            b = max(0.0, b + float((gradient * (logs - np.log(value))).sum()) / norm)
        value = np.maximum(constant + b * powers[at_p], 1e-300)
        error = float(((np.log(value) - logs) ** 2).mean())
        if error > errors[at_p, at_b]:
            b, error = float(factors[at_b]), float(errors[at_p, at_b])
        if best is None or error < best[3]:
            best = (float(constant), b, p, error)
    assert best is not None
    constant, b, p, error = best
    return Fit(constant, b / float(xs.max()) ** p, p, float(np.sqrt(error)))


def growth(x: Sequence[float], y: Sequence[float]) -> Growth:
    """The growth of a cost y with the size x; at least 3 points, with rising x."""
    found = fit(x, y)
    logs_x, logs_y = np.log(np.asarray(x, np.float64)), np.log(np.asarray(y, np.float64))
    slope = float(np.polyfit(logs_x, logs_y, 1)[0])
    last = float((logs_y[-1] - logs_y[-2]) / (logs_x[-1] - logs_x[-2]))
    above = int((np.asarray(y) > RISE * found.a).sum())
    return Growth(found, found.p if above else slope, slope, last, above, flat=not above)
