"""The hutch++ envelope: its numbers against quadrature, its inequalities where a grid stands for a
proof, and the law itself against sketches that are drawn.

Statistical tests: a search chooses spectra by noisy scores, and what it found is measured once more
with fresh draws; five standard errors there, one-sided, 3e-7 a comparison, fewer than 400 of them:
false alarms below 1.2e-4. Fixed seeds: in fact always or never.
"""

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import integrate, special, stats

from quietgrad.accounting import envelope_cdf, noise_multiplier
from quietgrad.accounting.composition import compose
from quietgrad.accounting.hutch_plus_plus.columns import Grid, law_of_share
from quietgrad.accounting.hutch_plus_plus.exponent import bounded_exponent, exponents
from quietgrad.accounting.hutch_plus_plus.law import PLACE, PRICE, atoms, hull
from quietgrad.accounting.scale_mixture import LARGEST_CONVEX_SHIFT, convex_from, scale_mixture
from quietgrad.events import LARGEST_COUNTED_RATIO, PoissonGaussian, RandomizedClipping

from .nystroem_ratios import mixed_ratios, ratios

ERRORS = 5.0
RNG = 31


def hockey_stick(log_a, mu):
    """H(a; mu) of two normal laws with means mu apart."""
    return special.ndtr(mu / 2 - log_a / mu) - np.exp(log_a) * special.ndtr(-mu / 2 - log_a / mu)


# --- B(theta) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1e-4, 0.02, 0.25])
@pytest.mark.parametrize("phi", [1e-6, 0.1, 3.0, 60.0, 3000.0])
def test_what_a_column_takes_is_below_quadrature_and_near(ridge, phi):
    grid = Grid.of(ridge)
    found = grid.least_taken(np.full(grid.nodes.size, phi))
    for i in (3, 40, 150, 300, 450, 590, 600):
        c = (1 - grid.nodes[i] + ridge) / grid.nodes[i]

        def given_up(g, c=c):
            return -np.expm1(-phi * g * g / (g * g + c)) * stats.norm.pdf(g)

        bends = sorted({min(math.sqrt(c / max(phi, 1.0)), 1.0), min(math.sqrt(c), 3.0), 4.0})
        ends = [0.0, *bends, 14.0]
        taken = 2 * sum(
            integrate.quad(given_up, *pair, epsabs=0, epsrel=1e-11, limit=400)[0]
            for pair in itertools.pairwise(ends)
        )
        truth = -math.log1p(-taken)
        assert found[i] <= truth * (1 + 1e-9)
        assert found[i] >= truth * 0.985


def test_the_law_of_a_share_is_an_upper_bound_in_more_digits():
    share = np.concatenate([np.geomspace(1e-7, 0.5, 12), 1 - np.geomspace(0.4, 1e-4, 6), [1.0]])
    for l in (0.0, 1e-5, 0.01, 0.5, 1.0):
        found = law_of_share(np.array(l), share, 0.01)
        with mpmath.workdps(40):
            for q, value in zip(share.tolist(), found.tolist(), strict=True):
                if q == 1.0 or l == 0.0:
                    assert value == 1.0
                    continue
                exact = (1 - mpmath.mpf(l) + mpmath.mpf(0.01)) / l * q / (1 - mpmath.mpf(q))
                truth = mpmath.erf(mpmath.sqrt(exact / 2))
                assert truth <= value <= truth * (1 + 1e-11)


@pytest.mark.parametrize("seed", range(6))
def test_the_enclosure_lies_above_the_recursion_in_more_digits_and_near(seed):
    """The same recursion in extended precision with E exp(-phi q) by 20 000 values of g, nothing
    rounded upwards.
    """
    rng = np.random.default_rng(seed)
    k = int(rng.choice([2, 3, 4, 8]))
    theta = float(k * 10 ** rng.uniform(-1.2, 2.0))
    ridge = float(rng.choice([1e-4, 0.02]))
    n = 120
    grid = Grid.of(ridge, n)
    nodes = grid.nodes.astype(np.longdouble)
    g = np.geomspace(1e-6, 9, 20_001)
    middle = (g[1:] + g[:-1]) / 2
    weights = 2 * (special.ndtr(g[1:]) - special.ndtr(g[:-1]))
    squared = middle**2 * grid.nodes[1:, None]
    share = squared / (squared + 1 - grid.nodes[1:, None] + ridge)
    t, widths = np.longdouble(theta), np.diff(nodes)
    phi = t * nodes - np.longdouble(k) / 2 * np.log1p(2 * t * nodes / k)
    slopes = np.diff(phi) / widths
    for _ in range(k):
        slopes = np.maximum(np.maximum.accumulate(slopes), 0)
        phi = np.concatenate([[np.longdouble(0)], np.cumsum(slopes * widths)])
        lost = -np.expm1(-phi[1:, None].astype(float) * share) @ weights
        taken = np.concatenate([[0.0], -np.log1p(-lost)])
        slopes = slopes - np.diff(np.concatenate([[0], taken[:-1]])) / widths
    plain = max(0.0, float(np.max(np.cumsum(slopes * widths) / nodes[1:])))
    found = bounded_exponent(theta, k, grid)
    assert plain * (1 - 1e-4) <= found  # the quadrature's own error
    assert found <= plain * 1.02


def test_a_recursion_that_takes_too_much_is_seen():
    """Teeth of the last test: shares that are a tenth too large move B by as much."""
    grid = Grid.of(1e-4, 120)
    wrong = Grid(grid.nodes, np.minimum(grid.shares * 1.1, 1.0), grid.masses)
    assert bounded_exponent(13.0, 8, wrong) < bounded_exponent(13.0, 8, grid) * 0.95


def test_a_column_is_worth_as_much_whatever_order_the_grid_is_refined_in():
    """Any grid gives a bound; finer ones give lower ones, by little."""
    coarse, usual, fine = (Grid.of(0.02, n, m) for n, m in ((150, 25), (600, 50), (1200, 100)))
    for theta in (2.0, 30.0, 800.0):
        found = [bounded_exponent(theta, 4, grid) for grid in (coarse, usual, fine)]
        assert found[2] <= found[1] <= found[0] <= found[2] * 1.08
        assert found[1] <= found[2] * 1.02


SPECTRA = {
    "flat": np.ones(40),
    "strong and dust": np.concatenate([[1.0], np.full(60, 0.5 / 60)]),
    "power": np.arange(1, 80.0) ** -1.0,
    "one more than columns": None,
}


@pytest.mark.statistical
@pytest.mark.parametrize("k", [2, 4, 8, 32])
@pytest.mark.parametrize("name", SPECTRA)
def test_exponential_moments_stay_below(k, name):
    spectrum = np.ones(k + 1) if SPECTRA[name] is None else SPECTRA[name]
    found = ratios(spectrum, k, 4000, np.random.default_rng(RNG))
    known = exponents(k)
    for theta, bound in zip(known.thetas, known.bounds, strict=True):
        if bound > 6:  # dominated by draws that do not occur
            break
        values = np.exp(-theta * (found - 1))
        error = values.std() / math.sqrt(values.size)
        assert values.mean() - ERRORS * error <= math.exp(bound)


# --- convexity ---------------------------------------------------------------------------------


def convex_beyond(room):
    """Whether r -> H(a; mu(r)) is convex where mu^2 <= room, over a grid of (L, sigma, c)."""
    for sigma in (0.4, 1.0, 6.0):
        for c in (0.0, 1.0, 8.0):
            if room <= c:
                continue
            r = np.linspace(1 / (sigma**2 * (room - c)), 4.0, 4001)
            mu = np.sqrt(1 / (r * sigma**2) + c)
            for log_a in np.concatenate(
                [-np.geomspace(1e-3, 6, 12), [0], np.geomspace(1e-3, 25, 24)]
            ):
                if np.diff(hockey_stick(log_a, mu), 2).min() < -1e-13:
                    return False
    return True


def test_a_steps_divergence_is_convex_where_it_is_said_to_be():
    assert convex_beyond(LARGEST_CONVEX_SHIFT)
    assert not convex_beyond(60.0)  # teeth


def test_a_tangent_at_r0_costs_less_than_the_mass_that_is_moved_for_it():
    """Theorem 3: r0 |h'(r0)| <= PRICE (h(r0 / PLACE) - h(r0)), everywhere, and hardly less."""
    worst = 0.0
    for mu in np.geomspace(0.05, math.sqrt(12), 20):
        for share in (0.02, 0.1, 0.3, 0.6, 0.9, 1.0):  # of mu^2 that is the gradients'
            own = mu**2 * share
            log_a = np.linspace(-60, 60, 961)
            d = mu / 2 - log_a / mu
            slope = np.exp(-(d**2) / 2) / math.sqrt(2 * math.pi) * own / (2 * mu)
            further = math.sqrt(mu**2 + (PLACE - 1) * own)
            m = np.linspace(mu, further, 41)[:, None]
            inner = np.exp(-((m / 2 - log_a / m) ** 2) / 2) / math.sqrt(2 * math.pi)
            gain = integrate.simpson(inner, x=m[:, 0], axis=0)
            known = slope > 1e-250
            worst = max(worst, float(np.max(slope[known] / gain[known])))
    assert 0.9 * PRICE < worst <= PRICE, worst


def test_where_convexity_is_of_no_use_the_first_order_is_taken():
    assert convex_from(0.3) == 1.0 and convex_from(1.0, 12.0) == 1.0
    assert 1 / 12 <= convex_from(1.0) <= 1 / 12 * 2 ** (1 / 8) * 1.001
    claim = RandomizedClipping(8, "hutch++")
    first = scale_mixture(claim, 1e-10, 64, 1.0)
    assert first.scales.min() == 1.0
    second = scale_mixture(claim, 1e-10, 64, convex_from(2.0))
    assert second.scales.min() >= claim.smallest_scale == LARGEST_COUNTED_RATIO**-0.5


# --- the law -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 8, 32])
@pytest.mark.parametrize("r0", [0.003, 0.1, 0.6])
@pytest.mark.parametrize("bins", [16, 256])
def test_atoms_are_a_law_above_the_hull(k, r0, bins):
    y, weights, lost = atoms(k, r0, 1e-12, bins)
    assert np.all(np.diff(y) > 0) and np.all(weights > 0) and 0 <= lost <= 1e-12
    assert float(weights.sum() + lost) == pytest.approx(1.0, abs=1e-12)
    knots = hull(k, r0).knots
    c = np.unique(np.concatenate([np.linspace(r0, knots[-1], 300), knots[knots > r0]]))
    below = (weights * np.maximum(c[:, None] - y, 0.0)).sum(axis=1)
    found = hull(k, r0).at(c)
    found = c + np.minimum.accumulate(found - c)  # its slope is at most 1
    # Moved mass lies lower, so the law's function is above the hull but for its value at r0.
    assert np.all(below + hull(k, r0).at(np.array([r0])) >= found - 1e-12)
    assert float(y @ weights) <= 1.0


def test_more_columns_cost_less_and_never_less_than_exact():
    def sigma(clipping):
        return noise_multiplier(1.0, 1e-5, sample_rate=0.05, steps=20, clipping=clipping)

    exact = sigma(None)
    found = [sigma(RandomizedClipping(k, "hutch++")) for k in (8, 32)]
    assert exact < found[1] < found[0] < sigma(RandomizedClipping(32))


# --- adversarial search --------------------------------------------------------------------------


def violation(found, k):
    """Largest excess, in standard errors, of P(R <= x) and of E (c - R)_+ over what k claims."""
    x = np.concatenate([np.linspace(0.3, 0.99, 24), 1 - np.geomspace(1e-3, 0.3, 12)])
    n = found.size
    share = (found[:, None] <= x).mean(axis=0)
    bound = envelope_cdf(RandomizedClipping(k, "hutch++"), x)
    error = np.sqrt(np.maximum(bound * (1 - bound), 1.0 / n) / n)
    first = (share - bound) / error
    c = np.linspace(0.4, 1.5, 45)
    terms = np.maximum(c - found[:, None], 0.0)
    errors = terms.std(axis=0) / math.sqrt(n) + 1e-4 / math.sqrt(n)
    second = (terms.mean(axis=0) - hull(k, 0.1).at(c)) / errors
    return float(max(first.max(), second.max()))


def record_of(genes, k, largest):
    """Genes in [0, 1] to layers: strong directions, a power law's tail, a second layer, an exact
    share.
    """
    strong = round(genes[0] * 2 * k)
    rank = round(largest ** (0.2 + 0.8 * genes[1]))
    tail = np.arange(1, rank + 1.0) ** (-3 * genes[2])
    tail *= 10 ** (3 * genes[3] - 2) * max(strong, 1) / tail.sum()
    first = np.concatenate([np.ones(strong) * (1 + genes[4] * np.arange(strong)), tail])
    layers = [((1 - 0.5 * genes[5]) * (1 - 0.4 * max(genes[6] - 0.5, 0)), first)]
    if genes[5] > 0.4:
        layers.append((0.9 * (1 - layers[0][0]), np.ones(int(1 + 2 * k * genes[7]))))
    return layers


def evolved(k, claimed, rng, largest=160, generations=4, crowd=8, draws=500):
    """The record whose law is furthest above what ``claimed`` columns claim."""

    def score(genes):
        found = mixed_ratios(record_of(genes, k, largest), k, draws, rng)
        return violation(found, claimed)

    people = [rng.random(8) for _ in range(crowd)]
    scored = sorted(((score(g), tuple(g)) for g in people), reverse=True)
    for _ in range(generations):
        parents = [np.array(g) for _, g in scored[:3]]
        children = [
            np.clip(parents[rng.integers(3)] + 0.2 * rng.standard_normal(8), 0, 1)
            for _ in range(crowd)
        ]
        scored = sorted([*scored, *((score(g), tuple(g)) for g in children)], reverse=True)[:crowd]
    return [record_of(np.array(g), k, largest) for _, g in scored[:2]]


@pytest.mark.statistical
@pytest.mark.parametrize("k", [2, 4, 8, 16, 32])
def test_an_evolutionary_search_finds_nothing_above_the_envelope(k):
    rng = np.random.default_rng(RNG + k)
    for record in evolved(k, k, rng):
        assert violation(mixed_ratios(record, k, 8000, rng), k) <= ERRORS


@pytest.mark.statistical
@pytest.mark.parametrize("k", [2, 8])
def test_the_search_finds_that_four_times_as_many_columns_are_too_many(k):
    """Teeth."""
    rng = np.random.default_rng(RNG + k)
    record = evolved(k, 4 * k, rng, generations=2)[0]
    assert violation(mixed_ratios(record, k, 8000, rng), 4 * k) > 2 * ERRORS


@pytest.mark.statistical
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.5])
def test_long_spectra_stay_below(decay):
    """D = 4096."""
    found = ratios(np.arange(1, 4097.0) ** -decay, 8, 300, np.random.default_rng(RNG))
    assert violation(found, 8) <= ERRORS


@pytest.mark.statistical
def test_the_claim_for_a_hutch_parameter_is_caught():
    """A gradient of rank one, measured by Hutch: R is chi2(k)/k."""
    found = np.random.default_rng(RNG).chisquare(8, 8000) / 8
    assert violation(found, 8) > 2 * ERRORS


@pytest.mark.statistical
def test_a_reused_sketch_is_caught():
    """P = S: the tail of Hutch++ is then zero, and R the head alone."""
    rng = np.random.default_rng(RNG)
    basis = np.linalg.qr(rng.standard_normal((4000, 20, 8)))[0]
    assert violation((basis**2).sum(axis=(1, 2)) / 20, 8) > 2 * ERRORS


# --- composed runs -------------------------------------------------------------------------------

RUNS = [
    (PoissonGaussian(1.0, 0.05, 10, RandomizedClipping(8, "hutch++")), np.ones(12)),
    (PoissonGaussian(3.0, 0.3, 10, RandomizedClipping(8, "hutch++")), np.ones(20)),
    (PoissonGaussian(2.0, 1.0, 4, RandomizedClipping(4, "hutch++")), np.ones(6)),
    (PoissonGaussian(1.0, 1.0, 1, RandomizedClipping(4, "hutch++")), np.ones(7)),
    (PoissonGaussian(0.6, 0.1, 4, RandomizedClipping(16, "hutch++")), np.ones(20)),
    (PoissonGaussian(0.3, 0.2, 2, RandomizedClipping(16, "hutch++")), np.ones(20)),
    (PoissonGaussian(4.0, 0.5, 20, RandomizedClipping(2, "hutch++")), np.ones(4)),
    (PoissonGaussian(2.0, 0.2, 10, RandomizedClipping(4, "hutch++")), SPECTRA["strong and dust"]),
    (PoissonGaussian(1.5, 0.5, 6, RandomizedClipping(2, "hutch++")), SPECTRA["power"]),
    (PoissonGaussian(2.0, 1.0, 2, RandomizedClipping(2, "hutch++")), np.ones(3)),
]
DRAWS = 60_000


def losses(event, spectrum, k, direction, rng):
    """[DRAWS] composed losses of a record with this spectrum in every step, sketched by k columns.

    Values of R are drawn once, 6000 of them, and then from those: what that adds is allowed for.
    """
    known = ratios(spectrum, k, 6000, rng)
    total, q = np.zeros(DRAWS), event.sample_rate
    for _ in range(event.steps):
        mu = rng.choice(known, DRAWS) ** -0.5 / event.noise_multiplier
        x = rng.standard_normal(DRAWS)
        if direction == "remove":
            x += mu * (rng.random(DRAWS) < q)
        exponent = mu * x - mu**2 / 2
        loss = exponent if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent)
        total += loss if direction == "remove" else -loss
    return total


def excess(event, spectrum, k, direction):
    """Largest excess of delta over the accountant's, in standard errors."""
    found = losses(event, spectrum, k, direction, np.random.default_rng(RNG))
    composed = compose(event, tail_mass=1e-7)
    claimed = composed.remove if direction == "remove" else composed.add
    worst = -math.inf
    for epsilon in {0.0, *(claimed.epsilon(target) for target in (0.2, 0.03, 3e-3))}:
        terms = -np.expm1(np.minimum(epsilon - found, 0.0))
        error = terms.std() / math.sqrt(DRAWS) + 1e-12
        worst = max(worst, (terms.mean() - claimed.delta(epsilon)) / error)
    return worst


@pytest.mark.statistical
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_composed_runs_stay_below_the_accountant(run, direction):
    event, spectrum = RUNS[run]
    assert excess(event, spectrum, event.clipping.sketch_dim, direction) <= ERRORS


@pytest.mark.statistical
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_composed_runs_with_fewer_columns_than_claimed_are_caught(direction):
    event = PoissonGaussian(0.8, 1.0, 12, RandomizedClipping(32, "hutch++"))
    assert excess(event, np.ones(3), 2, direction) > ERRORS
