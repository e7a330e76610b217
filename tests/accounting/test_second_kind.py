"""The hutch++ envelope where the product over eigenvalues decides
(docs/hutchpp_envelope/moments.md): theta up to 1000 k, x down to 1e-5, probabilities down to 1e-19.
Nothing of this can be drawn plainly. So one strong direction beside dust is integrated, several of
them and spectra of finite rank are drawn with weights (small columns are drawn more often), and the
rare case is forced upon the real estimator.

What is drawn has fixed seeds, and spectra that searches for a violation ended with. Seen in fresh
draws: no share above one anywhere.
"""

import numpy as np
import pytest
import torch
from scipy import special, stats

from quietgrad.accounting.hutch_plus_plus import law
from quietgrad.accounting.hutch_plus_plus.exponent import Exponents, exponents
from quietgrad.accounting.hutch_plus_plus.law import FLOOR, distribution_bound, hull
from quietgrad.clipping.norms.estimators.hutch_plus_plus import hutch_plus_plus_norms
from quietgrad.clipping.norms.estimators.projections import Projections, Role
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.randomness import RandomKey

DIMS = [2, 3, 4, 8]
SMALL = np.array([1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7])
SCALES = 10.0 ** -np.arange(0.0, 3.6, 0.5)  # of columns that are drawn more often
ZERO = 2.0**-23  # the probability of a float32 number that is zero


# One strong direction of share 1 - dust. Given s, of law chi2(k), rho of it is left.


def one_direction(k, dust, n=4000):
    """rho [n], and its masses: s is at the upper end of its cell, so rho and R's spread are too
    small, never too large.
    """
    s = np.geomspace(stats.chi2.ppf(1e-40, k) + 1e-30, stats.chi2.isf(1e-14, k), n)
    mass = np.diff(stats.chi2.cdf(s, k))
    return (1 - dust) * dust / ((1 - dust) * s[1:] + dust), mass


def share_of_exponents(k, claimed):
    """The largest log E exp(-theta (R - 1)) over its bound, for theta from 30 k."""
    known, worst = exponents(claimed), 0.0
    large = known.thetas >= 30 * k
    theta = known.thetas[large, None]
    for dust in np.geomspace(1e-4, 0.3, 60):
        rho, mass = one_direction(k, dust, 1000)
        phi = theta * rho - k / 2 * np.log1p(2 * theta * rho / k)
        found = special.logsumexp(phi, 1, mass)
        worst = max(worst, float(np.max(found / known.bounds[large])))
    return worst


@pytest.mark.parametrize("k", DIMS)
def test_large_theta_stays_below_and_half_as_many_columns_more_do_not(k):
    assert 0.98 < share_of_exponents(k, k) <= 1
    assert share_of_exponents(k, 3 * k // 2 + 1) > 1


def small_shares(k, zero=0.0, x=SMALL):
    """[x] the largest P(R <= x). ``zero``: of each number of either sketch, P(|number| <= y) is
    enlarged by so much; then the probability that s is small and the one that the tail is are
    bounded each by cubes around the balls that they are of.
    """
    worst = np.zeros(x.size)
    for i, at in enumerate(x):
        for part in np.linspace(0.02, 0.98, 25):
            dust = part * at
            if zero:
                s = max(((1 - dust) * dust / (1 - at) - dust) / (1 - dust), 0.0)
                sides = np.sqrt(2 / np.pi * np.array([s, k * (at - dust) / (1 - at)])) + zero
                found = np.prod(np.minimum(sides, 1.0)) ** k
            else:
                rho, mass = one_direction(k, dust)
                rest = np.maximum((at - 1 + rho) / rho, 0.0)
                found = special.gammainc(k / 2, k * rest / 2) @ mass
            worst[i] = max(worst[i], found)
    return worst


@pytest.mark.parametrize("k", DIMS)
def test_small_ratios_are_rarer_than_claimed(k):
    found, bound = small_shares(k), distribution_bound(k, SMALL)
    assert np.all(found <= bound)
    assert np.all(found[SMALL >= 0.01] > 0)
    # Shares of chi2(k)/k where it decided before: the claim is another.
    assert bound[SMALL == 1e-3] < 0.01 * special.gammainc(k / 2, k * 1e-3 / 2)


@pytest.mark.parametrize("k", DIMS)
def test_zeros_among_float32_numbers_are_below_the_claim(k):
    """Beside dust both sketches have to fail. Below 1e-12 no ratio falls: margins."""
    x = np.array([1e-12, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3])
    assert np.all(small_shares(k, ZERO, x) <= 0.01 * distribution_bound(k, x))
    # The second sketch's alone, as for Hutch: what counts where chi2(k)/k decides.
    tail = (np.sqrt(2 / np.pi * k * x) + ZERO) ** k
    assert np.all(tail[x < 1e-11] * ZERO**k <= distribution_bound(k, x[x < 1e-11]))


def test_zeros_of_the_generator_are_as_rare_as_that():
    """|number| <= y has at most the normal probability and 2^-23. 1.7e7 draws, 5 deviations."""
    source = RandomKey.from_seed(1).generator("projection", 0, "zeros")
    y, n, blocks = np.array([0.0, 1e-6, 1e-5, 1e-4]), 1 << 22, 4
    found = np.zeros(y.size)
    for _ in range(blocks):
        drawn = np.abs(source.standard_normal(n, dtype="float32"))
        found += (drawn[drawn <= 1e-4, None] <= y).sum(axis=0)
    most = n * blocks * (np.sqrt(2 / np.pi) * y + ZERO)
    assert np.all(found <= most + 5 * np.sqrt(most))
    assert found[-1] > 0.9 * most[-1]


@pytest.mark.parametrize("k", DIMS)
def test_what_is_short_of_small_c_is_below_the_hull(k):
    c = np.geomspace(0.012, 0.6, 25)
    bound, worst = hull(k, 0.02).at(c), 0.0
    for dust in np.geomspace(1e-4, 0.5, 40):
        rho, mass = one_direction(k, dust)
        z = np.maximum((c[:, None] - 1 + rho) / rho, 0.0)
        short = z * special.gammainc(k / 2, k * z / 2) - special.gammainc(k / 2 + 1, k * z / 2)
        found = np.maximum(rho * short, 0.0) @ mass
        worst = max(worst, float(np.max(np.where(found > 1e-13, found / bound, 0.0))))
    assert 0 < worst <= 1


def test_bounds_that_floating_point_cannot_hold_say_nothing():
    """A law of two values, whose exponential moment is known: with theta above 702 the weight of a
    tangent underflows, and once made E (c - R)_+ out to be 1e-11.
    """
    low, p = 0.005, 1e-5
    high = (1 - p * low) / (1 - p)
    for theta in np.linspace(690.0, 760.0, 36):
        moment = np.logaddexp(np.log(p) + theta * (1 - low), np.log1p(-p) + theta * (1 - high))
        known = Exponents(np.array([theta]), np.array([moment]))
        c, claimed = law._by_exponent(known, 0.004)
        truth = p * np.maximum(c - low, 0) + (1 - p) * np.maximum(c - high, 0)
        assert np.all(claimed >= truth * (1 - 1e-9)), theta


# Several strong directions, drawn with weights.


def weights(squares, count):
    """Log of the normal density over that of the mixture over ``SCALES``, for ``count`` numbers
    of sum of squares ``squares``.
    """
    with np.errstate(over="ignore"):
        each = [-count * np.log(s) - squares / 2 * (s**-2 - 1) for s in SCALES]
    return np.log(SCALES.size) - special.logsumexp(each, axis=0)


def beside_dust(strong, k, draws, rng, often):
    """rho [draws, n] of n directions beside dust, and log weights. The columns' entries for the
    first ``often`` directions are small more often.
    """
    strong = np.asarray(strong)
    dust = 1 - strong.sum()
    g = rng.standard_normal((draws, strong.size, k))
    g[:, :often] *= rng.choice(SCALES, draws)[:, None, None]
    b = np.sqrt(strong)[:, None] * g
    inner = np.linalg.inv(np.eye(strong.size) + b @ b.transpose(0, 2, 1) / dust)
    left = np.sqrt(strong)[:, None] * inner * np.sqrt(strong)
    rho = np.maximum(np.linalg.eigvalsh(left)[:, ::-1], 0.0)
    return rho, weights((g[:, :often] ** 2).sum(axis=(1, 2)), often * k)


def of_finite_rank(spectrum, k, draws, rng, power):
    """rho of a spectrum of rank k + m, and log weights: the m directions that are left are a
    uniform frame, drawn by an angular central Gaussian law.
    """
    spectrum = np.asarray(spectrum)
    n, m = spectrum.size, spectrum.size - k
    scale = spectrum**power / np.exp(np.log(spectrum**power).mean())
    frame = np.linalg.qr(rng.standard_normal((draws, n, m)) * np.sqrt(scale)[:, None])[0]

    def form(values):
        return np.einsum("nij,i,nik->njk", frame, 1 / values, frame)

    log_weight = n / 2 * np.linalg.slogdet(form(scale))[1]
    return 1 / np.linalg.eigvalsh(form(spectrum)), log_weight


def log_moment(rho, log_weight, k, theta):
    """log E exp(-theta (R - 1)) and its standard error."""
    e = (theta * rho - k / 2 * np.log1p(2 * theta * rho / k)).sum(axis=1) + log_weight
    v = np.exp(e - e.max())
    return np.log(v.mean()) + e.max(), v.std() / v.mean() / np.sqrt(v.size)


def small_probability(rho, log_weight, k, x, rng):
    """P(R <= x) and its standard error: the largest rho's number is integrated, others are small
    more often.
    """
    draws, n = rho.shape
    others = rng.gamma(k / 2, 2 / k, (draws, n - 1)) * rng.choice(SCALES, draws)[:, None] ** 2
    log_weight = log_weight + weights(k * others.sum(axis=1), k * (n - 1))
    rest = x - 1 + rho.sum(axis=1) - (rho[:, 1:] * others).sum(axis=1)
    values = special.gammainc(k / 2, k * np.maximum(rest / rho[:, 0], 0.0) / 2)
    values = values * np.exp(log_weight)
    return values.mean(), values.std() / np.sqrt(draws)


def dusty(*shares, dust):
    strong = np.array(shares, dtype=float)
    return strong / strong.sum() * (1 - dust)


CASES = [
    (k, dusty(*shares, dust=dust))
    for k in DIMS
    for shares in ((1.0,), (1, 1), (1, 0.1), (1, 1, 1), (1,) * 6, (0.21, 0.18, 0.165, 0.155, 0.147))
    for dust in (2e-3, 0.03, 0.15)
]


def known_moments(rho, log_weight, k):
    """[m, 2]: shares of bounds, where they are known to a fifth of their standard error."""
    known = exponents(k)
    for theta, bound in zip(known.thetas[::3].tolist(), known.bounds[::3].tolist(), strict=True):
        value, error = log_moment(rho, log_weight, k, theta)
        if theta >= 3 * k and error < 0.1:
            yield (value - 4 * error) / bound


@pytest.mark.parametrize("k", DIMS)
def test_several_directions_beside_dust_stay_below(k):
    rng, shares, reached = np.random.default_rng(k), [], 0
    for _, strong in (case for case in CASES if case[0] == k):
        rho, log_weight = beside_dust(strong, k, 3000, rng, rng.integers(1, strong.size + 1))
        shares += list(known_moments(rho, log_weight, k))
        for x in SMALL[2:]:
            found, error = small_probability(rho, log_weight, k, x, rng)
            if 0 < error < 0.25 * found:
                reached += 1
                assert found - 4 * error <= distribution_bound(k, np.array(x))
    assert 0.9 < max(shares) <= 1
    assert len(shares) > 50 and reached > 12


@pytest.mark.parametrize("k", DIMS)
def test_spectra_of_finite_rank_stay_below(k):
    rng, shares, reached = np.random.default_rng(k), [], 0
    for more in (1, 2):
        for strong in (1, more):
            for dust in (3e-4, 5e-3, 0.1, 0.6):
                weak = np.full(k + more - strong, dust / (k + more - strong))
                spectrum = np.append(np.full(strong, (1 - dust) / strong), weak)
                for power in (0.5, 1.0):
                    rho, log_weight = of_finite_rank(spectrum, k, 2000, rng, power)
                    shares += list(known_moments(rho, log_weight, k))
                    for x in SMALL[3:]:
                        found, error = small_probability(rho, log_weight, k, x, rng)
                        if 0 < error < 0.25 * found:
                            reached += 1
                            assert found - 4 * error <= distribution_bound(k, np.array(x))
    assert 0.2 < max(shares) <= 1
    assert len(shares) > 30 and reached > 5


# The real estimator, where its sketches fail.


class Failing(Projections):
    """The first row of each sketch, which a strong direction meets, is smaller by these factors."""

    factors: dict[str, float]

    def gaussian(self, stream: str, role: Role, rows: int, columns: int) -> torch.Tensor:
        drawn = super().gaussian(stream, role, rows, columns).clone()
        drawn[0] *= self.factors[role]
        return drawn


def measured_and_ideal(k, dust, factors):
    """Squared: what a record is divided by, and the estimate in exact arithmetic, of a strong
    first row beside noise.
    """
    generator = torch.Generator().manual_seed(3)
    noise, row = (torch.randn(n, 40, generator=generator) for n in (60, 1))
    matrix = noise * (dust**0.5 / noise.norm())
    matrix[0] += row[0] * ((1 - dust) ** 0.5 / row.norm())
    drawn = Failing(RandomKey.from_seed(k))
    object.__setattr__(drawn, "factors", factors)
    uses = [DenseFactors(torch.eye(60)[None, None], matrix[None, None])]
    found = hutch_plus_plus_norms(uses, "w", k, drawn, torch.float32)
    exact = matrix.double()
    ranges, tails = (
        exact.mT @ drawn.gaussian("w", role, 60, k).double() for role in ("range", "tail")
    )
    q = torch.linalg.qr(ranges).Q
    ideal = (exact @ q).square().sum() + (tails - q @ (q.mT @ tails)).square().sum()
    return float(((found.squared + found.slack).sqrt() + found.margin).square()), float(ideal)


@pytest.mark.parametrize("k", DIMS)
@pytest.mark.parametrize("dust", [0.3, 0.01, 1e-4])
def test_the_estimator_is_above_the_ideal_one_where_sketches_fail(k, dust):
    smallest = np.inf
    for columns in (1.0, 1e-2, 1e-4, 1e-6, 0.0):
        for tail in (1.0, 1e-2, 0.0):
            found, ideal = measured_and_ideal(k, dust, {"range": columns, "tail": tail})
            assert found >= ideal, (columns, tail)
            smallest = min(smallest, ideal)
    assert smallest < dust + 0.35  # the basis still meets k of 40 directions


def test_the_floor_is_above_what_bounds_on_rounding_fail_with():
    """Six bounds of 1e-24 each, 200 layers of 32 blocks; and no claim is below the floor where
    chi2(k)/k is not.
    """
    assert FLOOR >= 6 * 1e-24 * 200 * 32
    x = np.geomspace(1e-6, 0.5, 40)
    plain = special.gammainc(8, 8 * x)
    assert np.all(distribution_bound(16, x) >= np.minimum(plain, FLOOR))
