"""Below one: of all means of ones and copies of chi2(k)/k, one copy alone is the likeliest to be
small (docs/hutchpp_envelope/below_one.md), and the functions that this is computed with.
"""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import special, stats

from quietgrad.accounting.hutch_plus_plus.law import ROUNDING

from .chi_square_sums import law_of_ratio

X = np.array([0.1, 0.3, 0.6, 0.8, 0.9, 0.97, 0.999, 1.0])
INVERSION = {2: 1e-9, 4: 1e-9, 8: 1e-9}  # of what lies a whole span off


def moved(k, weights, receiver, giver, share):
    """What P(R <= x) gains at ``X`` where ``giver`` hands a share of its weight to ``receiver``."""
    other = weights.copy()
    other[receiver] += share * weights[giver]
    other[giver] -= share * weights[giver]
    return law_of_ratio(X, other, k) - law_of_ratio(X, weights, k)


@pytest.mark.parametrize("k", INVERSION)
def test_weight_that_moves_to_the_largest_makes_small_values_likelier(k):
    """The step of the proof, not its end alone."""
    rng = np.random.default_rng(11 + k)
    for _ in range(80):
        terms = int(rng.integers(2, 7))
        weights = np.sort(rng.dirichlet(np.full(terms, 10 ** rng.uniform(-0.7, 1.5))))[::-1]
        gained = moved(k, weights, 0, int(rng.integers(1, terms)), rng.uniform(0.05, 0.95))
        assert np.all(gained >= -INVERSION[k])


def test_weight_that_moves_to_another_does_not_always():
    """Teeth: the proof needs the largest. Above one it fails for the largest, too."""
    weights = np.array([0.9, 0.05, 0.05])
    assert np.min(moved(4, weights, 1, 2, 0.998)) < -1e-4
    even = law_of_ratio(np.array([1.4]), [0.5, 0.5], 4)
    assert float(even[0]) > stats.chi2.cdf(4 * 1.4, 4) + 0.02


@pytest.mark.parametrize("k", [2, 4, 6])
def test_the_density_with_two_more_exponentials_rises_up_to_one(k):
    """d/d(weight) P(R <= x) is (l_1 - l_2) / a times w'(x), w the density of R with an exponential
    number more for either weight: by its definition, for two terms, on a grid.
    """
    a, step = k / 2, 2e-4
    x = np.arange(0.0, 1.0 + step, step)
    for large in (0.5, 0.6, 0.9, 0.99):
        one, two = (stats.gamma.pdf(x, a + 1, scale=s / a) for s in (large, 1 - large))
        density = np.convolve(one, two)[: x.size] * step
        assert np.all(np.diff(density) >= -1e-6 * density.max())


def lower_gamma(a, x):
    """P(a, x) of a whole number a, by a sum of positive terms in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        z = Decimal(x)
        term = (-z).exp()
        for n in range(1, a + 1):
            term = term * z / n
        total, n = term, a
        while term > total * Decimal(10) ** -40:
            n += 1
            term = term * z / n
            total += term
        return total


@pytest.mark.parametrize("k", [2, 8, 64, 512, 740, 938, 2048])
def test_the_incomplete_gamma_function_errs_by_a_tenth_of_what_is_allowed(k):
    for probability in (1e-25, 1e-20, 1e-15, 1e-10, 1e-5, 1e-2, 0.4):
        x = float(special.gammaincinv(k / 2, probability))
        for a in (k // 2, k // 2 + 1):
            truth = lower_gamma(a, x)
            found = Decimal(float(special.gammainc(a, x)))
            assert abs(found / truth - 1) <= Decimal(ROUNDING / 10)
