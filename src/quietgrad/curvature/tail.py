"""From the top of a spectrum to all of its positive part: a power law in log-log (NoiseCurve,
equation 2, as corrected by erratum E8).

    log mu_i = c (log p_plus - log i)^a + log mu_tail,   1 <= i <= p_plus

c and a are fitted to the top k by least squares in log mu; p_plus is where the tail ends, mu_tail
what it ends at.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, least_squares

from quietgrad.checks import SettingsWarning, require_at_least, require_int, require_positive

Floats = NDArray[np.float64]

TAIL_VALUE = 1e-6
FEWEST = 3
ROUNDING = 4 * float(
    np.finfo(np.float64).eps
)  # share of the mass that sums of so many terms may err by
LOG_TOLERANCE = 0.05


def extend_spectrum(top: ArrayLike, tail_index: int, tail_value: float = TAIL_VALUE) -> Floats:
    """All positive eigenvalues: the top ones as they are, the others from the fitted curve.

    Args:
        top: [k] largest eigenvalues; those not above ``tail_value`` are left out.
        tail_index: p_plus, more than k.
        tail_value: mu_tail, between 1e-6 and 1e-5 in the paper.

    Returns:
        [p_plus] descending float64.

    Raises:
        ValueError, TypeError: fewer than three eigenvalues above tail_value, or p_plus not above
            their number.
    """
    values = _usable(top, tail_value)
    require_int("tail_index", tail_index)
    if tail_index <= len(values):
        raise ValueError(
            f"tail_index={tail_index} is not above the {len(values)} eigenvalues given; the tail "
            "ends after them"
        )
    curve = _curve(
        _fit(values, tail_index, tail_value), np.arange(1, tail_index + 1), tail_index, tail_value
    )
    rest = np.minimum(curve[len(values) :], values[-1])
    return np.concatenate([values, rest])


def automatic_tail_index(
    top: ArrayLike, positive_mass: float, most: int, tail_value: float = TAIL_VALUE
) -> int:
    """The p_plus at which the extended spectrum sums to the mass of the positive eigenvalues, which
    ``positive_part`` measures on public data.

    Args:
        top: [k] largest eigenvalues.
        positive_mass: sum of all positive eigenvalues.
        most: largest p_plus, the number of parameters.
        tail_value: mu_tail.

    Returns:
        p_plus in k + 1 .. most: the nearer end where no value in between gives the mass.

    Warns:
        UserWarning: if the top eigenvalues hold so much of the mass that rounding (2e-16 of it)
        hides what the tail adds: p_plus is then not known to within 5 %. So it is
            where the tail's share is below about 1e-12; such a tail is below what can be measured,
            too.
    """
    values = _usable(top, tail_value)
    require_positive("positive_mass", positive_mass)
    fewest = len(values) + 1
    require_at_least(
        "most", most, fewest, "the number of parameters exceeds that of the top eigenvalues"
    )
    missing = positive_mass - math.fsum(
        values
    )  # what the tail has to add: a small difference of large numbers
    hidden = ROUNDING * positive_mass

    def excess(log_index: float) -> float:
        return (
            math.fsum(extend_spectrum(values, round(np.exp(log_index)), tail_value)[len(values) :])
            - missing
        )

    low, high = float(np.log(fewest)), float(np.log(most))
    at_low, at_high = excess(low), excess(high)
    if at_low >= hidden:
        return fewest
    if at_high <= -hidden:
        return most
    if at_low >= 0 or at_high <= 0:
        found = low if at_low >= 0 else high
    else:
        found = float(brentq(excess, low, high, xtol=1e-4))
    below, above = found - LOG_TOLERANCE, found + LOG_TOLERANCE
    if (below > low and excess(below) > -hidden) or (above < high and excess(above) < hidden):
        warnings.warn(
            f"the {len(values)} top eigenvalues hold all but a share of "
            f"{max(missing, 0.0) / positive_mass:.1g} of positive_mass: rounding hides the tail, "
            "so where it ends is not "
            "known to within 5 %; set tail_index yourself, or pass fewer of the top eigenvalues",
            SettingsWarning,
            stacklevel=2,
        )
    return min(most, max(fewest, round(np.exp(found))))


def _usable(top: ArrayLike, tail_value: float) -> Floats:
    require_positive("tail_value", tail_value)
    values = np.sort(np.asarray(top, dtype=np.float64).ravel())[::-1]
    if not np.isfinite(values).all():
        raise ValueError("top holds eigenvalues that are not finite")
    kept = values[values > tail_value]
    if len(kept) < FEWEST:
        raise ValueError(
            f"top holds {len(kept)} eigenvalues above tail_value={tail_value:g}; a curve needs at "
            f"least {FEWEST}: compute more of them"
        )
    return kept


def _fit(values: Floats, tail_index: int, tail_value: float) -> tuple[float, float]:
    """(log c, a): a straight line in log-log of the logs to start from, then least squares in log
    mu.
    """
    logs = np.log(values) - np.log(tail_value)
    lags = np.log(tail_index) - np.log(np.arange(1, len(values) + 1))
    slope, intercept = np.polyfit(np.log(lags), np.log(logs), 1)

    def misfit(x: Floats) -> Floats:
        return np.exp(x[0]) * lags ** x[1] - logs

    found = least_squares(
        misfit, [intercept, max(float(slope), 1e-3)], bounds=([-np.inf, 1e-6], [np.inf, 50.0])
    )
    return float(found.x[0]), float(found.x[1])


def _curve(
    coefficients: tuple[float, float], index: NDArray[np.int64], tail_index: int, tail_value: float
) -> Floats:
    log_c, a = coefficients
    lags = np.maximum(np.log(tail_index) - np.log(index), 0.0)
    return np.asarray(tail_value * np.exp(np.exp(log_c) * lags**a), dtype=np.float64)
