"""Envelopes of randomized clipping: distribution functions that lie above that of R for every
gradient.

R = sketched / true squared norm = alpha + sum_j lambda_j chi2_j(k)/k with alpha + sum_j lambda_j =
1. An envelope is the distribution function of a stochastic lower bound Y of R: F_Y(x) >= P(R <= x)
   for every x, alpha and lambda.
Sources: DP-SGD-RC, Theorem 5.1 and Algorithms 3 and 4, with errata E5, E6 and E10 (docs/errata.md);
docs/privacy/sketches.md; below one docs/hutchpp_envelope/below_one.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from quietgrad.accounting.hutch_envelope import hutch_envelope, mean_chi2_cdf
from quietgrad.accounting.hutch_plus_plus.law import distribution_bound, smallest_ratio
from quietgrad.events import RandomizedClipping

Array = NDArray[np.float64]


def envelope_cdf(clipping: RandomizedClipping, x: ArrayLike) -> Array:
    """F_Y at x (any shape). See the module docstring for what it bounds."""
    points = np.asarray(x, dtype=np.float64)
    if clipping.envelope in ("mixed", "convex"):
        return np.where(points < 1.0, mean_chi2_cdf(points, clipping.sketch_dim), 1.0)
    if clipping.envelope == "hutch++":
        return np.where(points < 1.0, distribution_bound(clipping.sketch_dim, points), 1.0)
    assert clipping.total_rank is not None
    return hutch_envelope(clipping.sketch_dim, clipping.total_rank).cdf(points)


def envelope_quantile(clipping: RandomizedClipping, probability: float) -> float:
    """Largest y known to have F_Y(y) <= probability, for small probabilities (mixed,
    convex and Hutch agree below 1).
    """
    if clipping.envelope == "hutch++":
        return smallest_ratio(clipping.sketch_dim, probability)
    y = float(stats.gamma.ppf(probability, clipping.sketch_dim / 2, scale=2 / clipping.sketch_dim))
    y = min(y, 1.0 - 1e-9)
    while mean_chi2_cdf(np.array(y), clipping.sketch_dim) > probability:
        y *= 1 - 1e-12
    return y


def envelope_upper_end(clipping: RandomizedClipping) -> float:
    """The y at which discretisation stops: what lies above counts as lying there."""
    if clipping.envelope != "hutch":
        return 1.0
    assert clipping.total_rank is not None
    return hutch_envelope(clipping.sketch_dim, clipping.total_rank).upper_end
