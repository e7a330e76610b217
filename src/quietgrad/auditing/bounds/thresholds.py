"""Thresholds are chosen on some trials, and errors are counted on the others, so that choosing
costs no confidence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quietgrad.auditing.bounds.errors import ErrorCounts, epsilon_of_rates, gaussian_mu

# Quantiles of the scores: few, since the best of many looks better than it is; the tails are for
# large epsilons.
TAIL = (0.002, 0.005, 0.01, 0.02)
QUANTILES = np.concatenate([TAIL, np.linspace(0.05, 0.95, 19), 1 - np.array(TAIL)])
CAUTION = (
    1 - 1e-5
)  # confidence of the limits that thresholds are compared by: few errors in a tail may be luck


def errors_at(
    scores: NDArray[np.float64], included: NDArray[np.bool_], threshold: float
) -> ErrorCounts:
    """Errors of "present, if the score is above the threshold". A score that is no number is an
    error either way: it is above nothing and below nothing, and would never be one.
    """
    absent, present = scores[~included], scores[included]
    return ErrorCounts(
        int((~(absent <= threshold)).sum()),
        len(absent),
        int((~(present > threshold)).sum()),
        len(present),
    )


def best_threshold(
    scores: NDArray[np.float64], included: NDArray[np.bool_], worth: Callable[[float, float], float]
) -> float:
    """The threshold whose errors are worth most, as far as these scores can tell.

    Args:
        scores: [n], of the choosing trials; included: [n].
        worth: (false positive limit, false negative limit) -> what the bound would be.
    """
    candidates = np.unique(np.quantile(scores, QUANTILES))
    values = [
        worth(*errors_at(scores, included, float(c)).upper_rates(CAUTION)) for c in candidates
    ]
    best = max(values)
    if best <= 0:
        return float(np.median(scores))
    return float(candidates[int(np.argmax(values))])


def worth_for_epsilon(delta: float) -> Callable[[float, float], float]:
    """What ``lower_bound_clopper_pearson`` makes of two rates."""
    return lambda false_positive, false_negative: epsilon_of_rates(
        false_positive, false_negative, delta
    )


def worth_for_curve(false_positive: float, false_negative: float) -> float:
    """What the shape of a trade-off curve makes of two rates, taken as Gaussian for the choice
    alone.
    """
    return gaussian_mu(false_positive, false_negative)
