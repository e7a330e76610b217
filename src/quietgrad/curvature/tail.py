"""From the top of a spectrum to all of its positive part: a power law in log-log (NoiseCurve, equation 2, as corrected by erratum E8).

    log mu_i = c (log p_plus - log i)^a + log mu_tail,   1 <= i <= p_plus

c and a are fitted to the top k by least squares in log mu; p_plus is where the tail ends, mu_tail what it ends at.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, least_squares

from quietgrad.checks import require_at_least, require_int, require_positive

Floats = NDArray[np.float64]

TAIL_VALUE = 1e-6
FEWEST = 3


def extend_spectrum(top: ArrayLike, tail_index: int, tail_value: float = TAIL_VALUE) -> Floats:
    """All positive eigenvalues: the top ones as they are, the others from the fitted curve.

    Args:
        top: [k] largest eigenvalues; those not above ``tail_value`` are left out.
        tail_index: p_plus, more than k.
        tail_value: mu_tail, between 1e-6 and 1e-5 in the paper.

    Returns:
        [p_plus] descending float64.

    Raises:
        ValueError, TypeError: fewer than three eigenvalues above tail_value, or p_plus not above their number.
    """
    values = _usable(top, tail_value)
    require_int("tail_index", tail_index)
    if tail_index <= len(values):
        raise ValueError(
            f"tail_index={tail_index} is not above the {len(values)} eigenvalues given; the tail ends after them"
        )
    curve = _curve(_fit(values, tail_index, tail_value), np.arange(1, tail_index + 1), tail_index, tail_value)
    rest = np.minimum(curve[len(values) :], values[-1])
    return np.concatenate([values, rest])


def automatic_tail_index(top: ArrayLike, positive_mass: float, most: int, tail_value: float = TAIL_VALUE) -> int:
    """The p_plus at which the extended spectrum sums to the mass of the positive eigenvalues, which ``positive_part`` measures on public data.

    Args:
        top: [k] largest eigenvalues.
        positive_mass: sum of all positive eigenvalues.
        most: largest p_plus, the number of parameters.
        tail_value: mu_tail.

    Returns:
        p_plus in k + 1 .. most: the nearer end where no value in between gives the mass.
    """
    values = _usable(top, tail_value)
    require_positive("positive_mass", positive_mass)
    fewest = len(values) + 1
    require_at_least("most", most, fewest, "the number of parameters exceeds that of the top eigenvalues")

    def excess(log_index: float) -> float:
        return float(extend_spectrum(values, round(np.exp(log_index)), tail_value).sum()) - positive_mass

    low, high = np.log(fewest), np.log(most)
    if excess(low) >= 0:
        return fewest
    if excess(high) <= 0:
        return most
    return min(most, max(fewest, round(np.exp(brentq(excess, low, high, xtol=1e-4)))))


def _usable(top: ArrayLike, tail_value: float) -> Floats:
    require_positive("tail_value", tail_value)
    values = np.sort(np.asarray(top, dtype=np.float64).ravel())[::-1]
    if not np.isfinite(values).all():
        raise ValueError("top holds eigenvalues that are not finite")
    kept = values[values > tail_value]
    if len(kept) < FEWEST:
        raise ValueError(
            f"top holds {len(kept)} eigenvalues above tail_value={tail_value:g}; a curve needs at least {FEWEST}: compute more of them"
        )
    return kept


def _fit(values: Floats, tail_index: int, tail_value: float) -> tuple[float, float]:
    """(log c, a): a straight line in log-log of the logs to start from, then least squares in log mu."""
    logs = np.log(values) - np.log(tail_value)
    lags = np.log(tail_index) - np.log(np.arange(1, len(values) + 1))
    slope, intercept = np.polyfit(np.log(lags), np.log(logs), 1)

    def misfit(x: Floats) -> Floats:
        return np.exp(x[0]) * lags ** x[1] - logs

    found = least_squares(misfit, [intercept, max(float(slope), 1e-3)], bounds=([-np.inf, 1e-6], [np.inf, 50.0]))
    return float(found.x[0]), float(found.x[1])


def _curve(coefficients: tuple[float, float], index: NDArray[np.int64], tail_index: int, tail_value: float) -> Floats:
    log_c, a = coefficients
    lags = np.maximum(np.log(tail_index) - np.log(index), 0.0)
    return np.asarray(tail_value * np.exp(np.exp(log_c) * lags**a), dtype=np.float64)
