"""The envelopes lie above the law of R for every gradient, and the scales made from them are
stochastically larger than the true ones.

R = exact_share + sum_j weight_j chi2_j(k)/k. Its law is computed by numerical inversion for random
and for adversarially chosen spectra, and measured on real
sketches of matrices. Statistical tests: Dvoretzky-Kiefer-Wolfowitz (Massart 1990), one-sided,
FALSE_ALARM for each of 21 comparisons, so below 3e-8 altogether; fixed seeds.
"""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from quietgrad.accounting import envelope_cdf
from quietgrad.accounting.hutch_envelope import hutch_envelope
from quietgrad.accounting.scale_mixture import scale_mixture
from quietgrad.events import ExactClipping, RandomizedClipping

from .chi_square_sums import INVERSION_ERROR, law_of_ratio

FALSE_ALARM = 1e-9
DIMS = [2, 4, 32]
# (k, D): a Hutch envelope takes a second to build and is then kept, so all tests share these.
PAIRS = [
    (2, 2),
    (2, 16),
    (2, 4096),
    (4, 3),
    (4, 256),
    (4, 4096),
    (32, 2),
    (32, 16),
    (32, 2048),
    (32, 4096),
]
BELOW_ONE = np.array([0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 0.9999])


def mean_chi2(x, degrees):
    return stats.chi2.cdf(np.asarray(x) * degrees, degrees)


def excess(law, clipping, x):
    return float(np.max(law - envelope_cdf(clipping, x)))


@pytest.mark.parametrize("k", DIMS)
def test_inversion_knows_chi_squares(k):
    x = np.linspace(0.05, 2.5, 30)
    for terms in (1, 2, 7, 300):
        ours = law_of_ratio(x, [1 / terms], k, [terms])
        np.testing.assert_allclose(ours, mean_chi2(x, k * terms), atol=INVERSION_ERROR, rtol=0)
    np.testing.assert_allclose(
        law_of_ratio(x, [0.5, 0.5], k), mean_chi2(x, 2 * k), atol=INVERSION_ERROR, rtol=0
    )


@pytest.mark.parametrize("k", DIMS)
def test_mixed_envelope_bounds_random_spectra(k):
    rng = np.random.default_rng(21)
    for _ in range(25):
        terms = int(rng.integers(1, 12))
        weights = rng.dirichlet(np.full(terms, 10 ** rng.uniform(-1.5, 1)))
        share = rng.choice([0.0, rng.uniform(0, 0.99)])
        law = law_of_ratio(BELOW_ONE, weights, k, exact_share=share)
        assert excess(law, RandomizedClipping(k), BELOW_ONE) <= INVERSION_ERROR


@pytest.mark.grid(4, "widths between the extremes")
@pytest.mark.parametrize("k", DIMS)
@pytest.mark.parametrize("x", [0.5, 0.8, 0.99])
def test_mixed_envelope_bounds_the_worst_spectrum_and_is_reached(k, x):
    """An optimiser over four weights and the exact share, started nearly even, climbs to the
    envelope (all weight on one term) and not above.
    """
    point = np.array([x])

    def law(z):
        weights = np.exp(z[:4] - z[:4].max())
        return float(
            law_of_ratio(point, weights / weights.sum(), k, exact_share=0.9 * special.expit(z[4]))[
                0
            ]
        )

    found = []

    def objective(z):
        found.append(law(z))
        return -found[-1]

    optimize.minimize(
        objective, [0.5, 0.2, 0.0, 0.0, -2.0], method="Nelder-Mead", options={"maxfev": 200}
    )
    limit = float(envelope_cdf(RandomizedClipping(k), x))
    assert max(found) <= limit + INVERSION_ERROR
    assert max(found) >= 0.97 * limit


def test_mixed_envelope_is_one_from_one_on():
    assert np.all(envelope_cdf(RandomizedClipping(4), [1.0, 1.5, 10.0]) == 1.0)
    assert np.all(envelope_cdf(RandomizedClipping(4), [-1.0, 0.0]) == 0.0)


def around_one(k, rank):
    """Points of the middle region, around its end, and beyond."""
    middle = hutch_envelope(k, rank).x_plus - 1
    return 1 + middle * np.array(
        [1e-9, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0, 1.001, 1.1, 1.5, 2.0, 4.0]
    )


def hutch_points(k, rank):
    return np.concatenate([BELOW_ONE, [1.0], around_one(k, rank), [1.05, 1.2, 1.5, 2.0, 3.0]])


@pytest.mark.grid(4, "widths between the extremes")
@pytest.mark.parametrize(("k", "rank"), [*PAIRS, (2, 1), (32, 1)])
def test_hutch_envelope_bounds_random_spectra(k, rank):
    rng = np.random.default_rng(22)
    x = hutch_points(k, rank)
    for _ in range(6):
        terms = int(rng.integers(1, min(rank, 300) + 1))
        weights = rng.dirichlet(np.full(terms, 10 ** rng.uniform(-1.5, 2)))
        law = law_of_ratio(x, weights, k)
        assert excess(law, RandomizedClipping(k, "hutch", rank), x) <= INVERSION_ERROR


def two_valued(x, k, rank, heavy, odds):
    """``heavy`` terms with ``odds`` times the even weight's odds, the rest even."""
    share = heavy / rank * odds / (1 - heavy / rank + heavy / rank * odds)
    return law_of_ratio(x, [share / heavy, (1 - share) / (rank - heavy)], k, [heavy, rank - heavy])


@pytest.mark.grid(3, "widths between the extremes")
@pytest.mark.parametrize(("k", "rank"), PAIRS)
def test_hutch_envelope_bounds_adversarial_spectra(k, rank):
    """A few heavy terms and the rest even is what exceeds the even spectrum furthest above 1
    (erratum E13).
    """
    x = hutch_points(k, rank)
    clipping = RandomizedClipping(k, "hutch", rank)
    for heavy in sorted({1, 2, max(1, rank // 3), rank - 1}):
        if heavy < rank:
            for odds in (1.02, 1.5, 4.0, 1.7 * math.sqrt(rank), 10 * rank):
                assert excess(two_valued(x, k, rank, heavy, odds), clipping, x) <= INVERSION_ERROR
    for terms in {1, 2, rank // 2, rank} - {0}:
        assert excess(mean_chi2(x, k * terms), clipping, x) <= INVERSION_ERROR


@pytest.mark.parametrize(("k", "rank"), [(2, 2), (4, 256), (32, 16), (32, 4096)])
def test_hutch_envelope_bounds_what_an_optimiser_finds(k, rank):
    """Three different weights, one of each of the first two, above 1: the largest excess found over
    several starts stays at or below zero.
    """
    x = around_one(k, rank)
    clipping = RandomizedClipping(k, "hutch", rank)
    envelope = envelope_cdf(clipping, x)

    def largest_excess(z):
        counts = np.array([1, 1, rank - 2])[: min(rank, 3)]
        parts = np.exp(np.append(np.clip(z, -30, 30), 0.0))[: counts.size]
        parts /= parts.sum()
        return float(np.max(law_of_ratio(x, parts / counts, k, counts) - envelope))

    worst = -1.0
    for start in (-math.log(rank), -0.5 * math.log(rank), 2.0):
        found = optimize.minimize(
            lambda z: -largest_excess(z),
            [start, start - 0.5],
            method="Nelder-Mead",
            options={"maxfev": 40},
        )
        worst = max(worst, -found.fun)
    assert worst <= INVERSION_ERROR


@pytest.mark.parametrize(("k", "rank"), [*PAIRS, (32, 1)])
def test_hutch_envelope_is_a_distribution_function_below_the_mixed_one(k, rank):
    x = np.unique(np.concatenate([np.linspace(0, 3, 1001), hutch_points(k, rank)]))
    hutch, mixed = (
        envelope_cdf(RandomizedClipping(k, "hutch", rank), x),
        envelope_cdf(RandomizedClipping(k), x),
    )
    assert np.all(np.diff(hutch) >= 0)
    assert np.all((hutch >= 0) & (hutch <= 1))
    assert np.all(hutch <= mixed)
    assert envelope_cdf(RandomizedClipping(k, "hutch", rank), 50.0) == pytest.approx(1.0, abs=1e-9)


def test_widest_layer_is_not_the_rank():
    """Erratum E5: two layers of rank one, k = 32. The rank of the widest layer, 1, claims a law
    that the true one exceeds by 0.072.
    """
    x = np.linspace(1.0, 2.0, 2001)
    over = law_of_ratio(x, [0.5, 0.5], 32) - envelope_cdf(RandomizedClipping(32, "hutch", 1), x)
    assert over.max() == pytest.approx(0.072, abs=5e-4)
    assert x[over.argmax()] == pytest.approx(1.22, abs=0.01)
    assert (
        excess(law_of_ratio(x, [0.5, 0.5], 32), RandomizedClipping(32, "hutch", 2), x)
        <= INVERSION_ERROR
    )


def test_exchanged_cases_are_violated():
    """Erratum E6: the even law below 1 and the one-term law above, as printed, lie below the true
    laws by half.
    """
    k, rank = 32, 2048
    below, above = np.linspace(0.5, 0.999, 500), np.linspace(1.001, 2.0, 500)
    assert np.max(law_of_ratio(below, [1.0], k) - mean_chi2(below, k * rank)) > 0.4
    assert np.max(law_of_ratio(above, [1 / rank], k, [rank]) - mean_chi2(above, k)) > 0.4


def test_printed_x_plus_is_too_small():
    """Erratum E13: at x = 1.0001, beyond the printed 1 + 2/(kD), one term alone is above the even
    law by 0.025.
    """
    k, rank, x = 32, 2048, np.array([1.0001])
    assert x[0] > 1 + 2 / (k * rank)
    assert float(law_of_ratio(x, [1.0], k)[0] - mean_chi2(x, k * rank)[0]) == pytest.approx(
        0.025, abs=1e-3
    )


def sketched_ratios(layers, exact_square, k, draws, rng):
    """[draws] values of R: each layer's gradient [p, d] is projected by a fresh P [p, k] with
    entries of variance 1/k; squares add up.
    """
    estimate = np.full(draws, float(exact_square))
    for gradient in layers:
        projections = rng.standard_normal((draws, k, gradient.shape[0])) / math.sqrt(k)
        estimate += ((projections @ gradient) ** 2).sum(axis=(1, 2))
    return estimate / (exact_square + sum(float((g**2).sum()) for g in layers))


def rank_one(norm):
    return np.outer([norm, 0.0], [0.6, 0.8, 0.0])


LAYERS = {
    "one-rank-one": ([rank_one(1.0)], 0.0),
    "two-rank-one": ([rank_one(1.0), rank_one(1.0)], 0.0),
    "full-rank": ([np.eye(3), np.ones((2, 3)) + np.eye(2, 3)], 0.0),
    "half-exact": ([rank_one(1.0)], 1.0),
}


def dkw(draws):
    return math.sqrt(math.log(1 / FALSE_ALARM) / (2 * draws))


def empirical_excess(ratios, clipping):
    ordered = np.sort(ratios)
    return float(
        np.max(np.arange(1, ordered.size + 1) / ordered.size - envelope_cdf(clipping, ordered))
    )


@pytest.mark.grid(4, "widths between the extremes")
@pytest.mark.statistical
@pytest.mark.parametrize("k", [2, 4, 32])
@pytest.mark.parametrize("name", LAYERS)
def test_real_sketches_stay_below_the_envelopes(name, k):
    layers, exact_square = LAYERS[name]
    ratios = sketched_ratios(layers, exact_square, k, 40_000, np.random.default_rng(23))
    assert empirical_excess(ratios, RandomizedClipping(k)) <= dkw(40_000)
    if exact_square == 0:
        rank = sum(min(g.shape) for g in layers)
        assert empirical_excess(ratios, RandomizedClipping(k, "hutch", rank)) <= dkw(40_000)


@pytest.mark.statistical
def test_real_sketches_reject_wrong_envelopes():
    """The same statistic sees erratum E5, an exact share under the Hutch envelope (E12), and a k
    that is claimed too large.
    """
    rng = np.random.default_rng(24)
    two = sketched_ratios(*LAYERS["two-rank-one"], 32, 40_000, rng)
    assert empirical_excess(two, RandomizedClipping(32, "hutch", 1)) > dkw(40_000)
    half = sketched_ratios(*LAYERS["half-exact"], 32, 40_000, rng)
    assert empirical_excess(half, RandomizedClipping(32, "hutch", 1)) > dkw(40_000)
    one = sketched_ratios(*LAYERS["one-rank-one"], 32, 40_000, rng)
    assert empirical_excess(one, RandomizedClipping(64)) > dkw(40_000)


CLIPPINGS = [
    RandomizedClipping(2),
    RandomizedClipping(4),
    RandomizedClipping(32),
    RandomizedClipping(10**7),
    RandomizedClipping(4, "hutch", 1),
    RandomizedClipping(8, "hutch", 2),
    RandomizedClipping(32, "hutch", 2048),
]


@pytest.mark.grid(8, "widths between the extremes")
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
@pytest.mark.parametrize("bins", [3, 24, 96, 256])
def test_discrete_scale_is_stochastically_larger(clipping, bins):
    """At every y the discrete Y has at least the envelope's mass at or below it: Z = Y^(-1/2) is at
    least as large.
    """
    tail = 1e-10
    mixture = scale_mixture(clipping, tail, bins)
    assert float(mixture.weights.sum() + mixture.lost_mass) == pytest.approx(1.0, abs=1e-12)
    assert np.all(mixture.weights > 0) and 0 <= mixture.lost_mass <= tail
    y = mixture.scales**-2
    assert np.all(np.diff(y) > 0)
    at = np.unique(
        np.concatenate(
            [np.geomspace(1e-12, 5.0, 3000), y, np.nextafter(y, 0), y * 0.999, y * 1.001]
        )
    )
    # A scale rounded to 1e-16 may sit a hair above the edge that it stands for.
    discrete = mixture.lost_mass + np.concatenate([[0.0], np.cumsum(mixture.weights)])
    discrete = discrete[np.searchsorted(y * (1 - 1e-14), at, side="right")]
    assert np.all(discrete >= envelope_cdf(clipping, at) - 1e-12)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
def test_more_bins_overstate_less(clipping):
    def mean_log_scale(bins):
        mixture = scale_mixture(clipping, 1e-10, bins)
        return float(mixture.weights @ np.log(mixture.scales))

    overstated = np.array([mean_log_scale(bins) for bins in (12, 24, 96, 256)])
    assert np.all(np.diff(overstated) <= 1e-12)
    assert overstated[2] - overstated[3] <= 0.02


def test_exact_clipping_has_one_scale():
    mixture = scale_mixture(ExactClipping(), 1e-10, 256)
    assert (
        mixture.scales.tolist() == [1.0]
        and mixture.weights.tolist() == [1.0]
        and mixture.lost_mass == 0.0
    )
