"""The hutch++ envelope against exact laws, far into the tails, where nothing can be drawn: a strong
direction of share l beside dust (so many weak ones that they are measured exactly, and hide the
strong one from the basis). Given G, of the strong direction rho = l d / (l s + d) is left, d =
1 - l, s of law chi2(k), and R = 1 - rho + rho X, X of law chi2(k)/k: integrals over s alone.
"""

import numpy as np
import pytest
from scipy import special, stats

from quietgrad.accounting.hutch_plus_plus.exponent import exponents
from quietgrad.accounting.hutch_plus_plus.law import distribution_bound, hull
from quietgrad.accounting.scale_mixture import convex_from, scale_mixture
from quietgrad.events import RandomizedClipping

DIMS = [2, 3, 4, 8, 16]
STRONG = 1 - np.geomspace(1e-5, 0.9, 14)


def cells(k, n):
    """Means and masses of chi2(k) in cells of equal ratio: 1e-16 is left out on either side."""
    edges = np.geomspace(stats.chi2.ppf(1e-16, k), stats.chi2.isf(1e-16, k), n + 1)
    mass, inside = (
        np.where(
            edges[1:] > j, -np.diff(stats.chi2.sf(edges, j)), np.diff(stats.chi2.cdf(edges, j))
        )
        for j in (k, k + 2)
    )
    return k * inside / mass, mass


def left(k, strong, exact=0.0, n=1500):
    """rho and its masses; ``exact``: a share that is measured exactly."""
    s, mass = cells(k, n)
    return (1 - exact) * strong * (1 - strong) / (strong * s + 1 - strong), mass


def exponent_share(k, claimed):
    """The largest log E exp(-theta (R - 1)) over the bound for ``claimed`` columns."""
    known, worst = exponents(claimed), 0.0
    theta = known.thetas[:, None]
    for strong in STRONG:
        rho, mass = left(k, strong)
        phi = theta * rho - k / 2 * np.log1p(2 * theta * rho / k)
        worst = max(worst, float(np.max(special.logsumexp(phi, 1, mass) / known.bounds)))
    return worst


def small_share(k, claimed):
    """The largest P(R <= x) over its bound, down to 1e-14."""
    x = np.concatenate([np.geomspace(1e-3, 0.3, 15), np.linspace(0.32, 0.999, 30)])
    bound, worst = distribution_bound(claimed, x), 0.0
    for strong in STRONG:
        for exact in (0.0, 0.3):
            rho, mass = left(k, strong, exact)
            at = np.maximum((x[:, None] - 1 + rho) / rho, 0.0)
            found = special.gammainc(k / 2, k * at / 2) @ mass
            worst = max(worst, float(np.max(np.where(found > 1e-14, found / bound, 0.0))))
    return worst


def shortfall_share(k, claimed):
    """The largest E (c - R)_+ - (c - 1)_+ over its bound."""
    c, worst = np.linspace(0.05, 1.9, 50), 0.0
    bound = hull(claimed, 0.02).at(c) - np.maximum(c - 1, 0)
    for strong in STRONG:
        rho, mass = left(k, strong)
        z = np.maximum((c[:, None] - 1 + rho) / rho, 0.0)
        short = z * special.gammainc(k / 2, k * z / 2) - special.gammainc(k / 2 + 1, k * z / 2)
        found = (rho * short) @ mass - np.maximum(c - 1, 0)
        worst = max(worst, float(np.max(np.where(found > 1e-12, found / bound, 0.0))))
    return worst


@pytest.mark.parametrize("k", DIMS)
def test_a_strong_direction_beside_dust_stays_below(k):
    assert 0.4 < exponent_share(k, k) <= 1  # and comes near
    assert 0.9 < small_share(k, k) <= 1
    assert shortfall_share(k, k) <= 1


@pytest.mark.parametrize("k", [2, 4, 8])
def test_below_a_claim_of_twice_or_four_times_as_many_columns_it_does_not(k):
    """Teeth: the tail notices twice as many, each of the three four times as many."""
    assert small_share(k, 2 * k) > 1.01
    assert exponent_share(k, 4 * k) > 2
    assert small_share(k, 4 * k) > 10
    assert shortfall_share(k, 4 * k) > 1.05


def divergences(r, mass, sigma, beside, log_a):
    """E H(a; mu(R)) for each a."""
    mu = np.sqrt(1 / (r * sigma**2) + beside)[:, None]
    upper = special.ndtr(mu / 2 - log_a / mu)
    return mass @ (upper - np.exp(log_a + special.log_ndtr(-mu / 2 - log_a / mu)))


@pytest.mark.parametrize("k", [2, 4, 16])
@pytest.mark.parametrize(("sigma", "beside"), [(0.36, 0.0), (0.5, 3.0), (1.5, 11.0), (4.0, 1.0)])
def test_every_divergence_of_a_step_is_below_that_of_the_law(k, sigma, beside):
    """Theorem 3 with Hutch++, near the least noise and the most beside it."""
    log_a = np.concatenate([-np.geomspace(1e-3, 30, 30), [0.0], np.geomspace(1e-3, 80, 50)])
    x, masses = cells(k, 500)
    start = convex_from(sigma, beside)
    assert start < 1
    law = scale_mixture(RandomizedClipping(k, "hutch++"), 1e-13, 256, start)
    claimed = divergences(law.scales**-2, law.weights, sigma, beside, log_a) + law.lost_mass
    for strong in (0.3, 0.9, 0.999):
        rho, mass = left(k, strong, n=60)
        r = (1 - rho[:, None] + rho[:, None] * x / k).ravel()
        found = divergences(r, np.outer(mass, masses).ravel(), sigma, beside, log_a)
        assert np.all(found <= claimed + 1e-12)
