"""Renyi divergences of a step: the Poisson-sampled Gaussian mechanism, the one that ``composition``
composes.

Of its two directions, D(mixture || Gaussian) is the larger at every order (Mironov, Talwar and
Zhang, Renyi Differential Privacy of the Sampled Gaussian Mechanism, 2019, corollary 7):

    (a - 1) D_a = log A_a,    A_a = E (1 - q + q exp(x / sigma - 1 / (2 sigma^2)))^a,  x ~ N(0, 1).

A_a is a trapezoidal sum. The integrand is analytic for |Im x| < pi sigma, and there at most
exp((Im x)^2 / 2) times its value at Re x; so with |Im x| <= 30 h and a step h <= sigma / 10 the sum
is off by a share of exp(450 h^2 - 187) at most (Trefethen and Weideman 2014, theorem 5.1). What is
left out beyond both ends is a share below exp(-790), as A_a is at least 1 and at least
q^a exp(a (a - 1) / (2 sigma^2)), and its integrand at most that of 1 - q + q exp(a ...).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

STEP = 0.02
FEWEST_NOISE = 0.1  # below it, moments are those of the mechanism without sampling
ENDS = 40.0
ROUNDING = 1e-12  # of log A_a, absolute and relative


@lru_cache(maxsize=2**16)  # scripts ask again after every epoch
def renyi_divergence(sigma: float, q: float, order: float) -> float:
    """D_a of one step, in both directions.

    Args:
        sigma: noise multiplier.
        q: sampling rate.
        order: a, above 1.

    Returns:
        An upper bound, above the least one by rounding alone where sigma is at least 0.1.
    """
    without_sampling = order / (2 * sigma**2)
    if q == 1 or sigma < FEWEST_NOISE:
        return without_sampling
    step = min(STEP, sigma / 10)
    ends = ENDS + math.sqrt(2 * (order - 1) * math.log(1 / q))
    x = np.arange(-ends, order / sigma + ends, step)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + x / sigma - 1 / (2 * sigma**2))
    exponents = order * loss - x**2 / 2
    top = float(exponents.max())
    log_moment = top + math.log(step * np.exp(exponents - top).sum() / math.sqrt(2 * math.pi))
    log_moment = max(log_moment, 0.0) * (1 + ROUNDING) + ROUNDING
    return min(log_moment / (order - 1), without_sampling)
