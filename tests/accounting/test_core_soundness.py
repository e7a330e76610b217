"""The accountant against simulation: worst-case inputs, both directions, exact and sketched; and a wrong accountant is caught."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from quietgrad.accounting.composition import compose
from quietgrad.accounting.envelope import envelope_cdf
from quietgrad.accounting.hutch_envelope import mean_chi2_cdf, two_valued_cdf
from quietgrad.accounting.scale_mixture import scale_mixture
from quietgrad.facts import ExactClipping, PoissonGaussian, RandomizedClipping

DRAWS = 400_000
SETTINGS = [
    (1.0, 0.02, 20, None),
    (0.8, 0.1, 5, None),
    (2.0, 1.0, 5, None),
    (1.5, 0.3, 20, None),
    (1.0, 1.0, 1, None),
    (1.5, 0.1, 20, 32),
    (1.0, 0.3, 5, 32),
    (2.0, 1.0, 5, 32),
    (1.5, 0.1, 20, 8),
    (2.5, 0.5, 10, 8),
    (3.0, 0.2, 10, 4),
    (4.0, 1.0, 2, 4),
]


def simulated_losses(sigma: float, q: float, steps: int, k: int | None, direction: str, seed: int) -> np.ndarray:
    """Composed privacy losses of a rank-one gradient under its own law of R, the worst spectrum below 1."""
    rng = np.random.default_rng(seed)
    total = np.zeros(DRAWS)
    for _ in range(steps):
        z = 1.0 if k is None else (rng.chisquare(k, DRAWS) / k) ** -0.5
        mu = z / sigma
        x = rng.standard_normal(DRAWS)
        if direction == "remove":
            x = x + mu * (rng.random(DRAWS) < q)
        with np.errstate(divide="ignore"):
            loss = np.logaddexp(np.log1p(-q) if q < 1 else -np.inf, math.log(q) + mu * x - mu**2 / 2)
        total += loss if direction == "remove" else -loss
    return total


@pytest.mark.statistical
@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_simulated_delta_lies_below_the_accountants(setting, direction) -> None:
    """False alarm below 3e-6 per comparison (five standard errors), 48 comparisons."""
    sigma, q, steps, k = setting
    clipping = ExactClipping() if k is None else RandomizedClipping(k)
    composed = getattr(compose(PoissonGaussian(sigma, q, steps, clipping), tail_mass=1e-10), direction)
    losses = simulated_losses(sigma, q, steps, k, direction, seed=7)
    for epsilon in (0.0, 1.0):
        terms = np.maximum(-np.expm1(epsilon - losses), 0.0)
        error = 5 * float(terms.std()) / math.sqrt(DRAWS) + 1e-6
        estimate = float(terms.mean())
        assert estimate <= composed.delta(epsilon) + error
        if k is None:  # tight as well: exact clipping loses nothing but rounding
            assert composed.delta(epsilon) <= estimate * 1.01 + error


@pytest.mark.statistical
def test_a_wrong_accountant_is_caught() -> None:
    """The same comparison rejects an accountant that ignores the sketch, or takes sigma 1.5 times too large."""
    sigma, q, steps, k = 3.0, 0.2, 10, 4
    losses = simulated_losses(sigma, q, steps, k, "remove", seed=8)
    terms = np.maximum(-np.expm1(1.0 - losses), 0.0)
    estimate, error = float(terms.mean()), 5 * float(terms.std()) / math.sqrt(DRAWS)
    for wrong in (PoissonGaussian(sigma, q, steps), PoissonGaussian(1.5 * sigma, q, steps, RandomizedClipping(64))):
        assert estimate > compose(wrong, tail_mass=1e-10).remove.delta(1.0) + error


@pytest.mark.parametrize("k", [2, 4, 32])
def test_two_valued_spectra_stay_below_both_envelopes(k) -> None:
    """Adversarial spectra: the supremum is reached by two-valued ones; a dense search finds none above the envelopes."""
    for d in (2, 16, 512, 4096):
        hutch, mixed = RandomizedClipping(k, "hutch", d), RandomizedClipping(k)
        x = np.concatenate([np.linspace(0.05, 1.0, 15), 1 + np.geomspace(1e-5, 1.5, 40)])
        for i in np.unique(np.geomspace(1, d, 8).astype(int)):
            for j in {d - i, 1} - {0}:
                if i + j > d:
                    continue
                for share in (0.05, 0.3, 0.5, 0.8, 0.95, i / (i + j), min(0.99, 1.7 / math.sqrt(d))):
                    law = two_valued_cdf(x, np.full_like(x, i), np.full_like(x, j), np.full_like(x, share), k)
                    assert np.all(law <= envelope_cdf(hutch, x) + 1e-6), (d, i, j, share)
                    assert np.all(law <= envelope_cdf(mixed, x) + 1e-6), (d, i, j, share)


@pytest.mark.statistical
@pytest.mark.parametrize("k", [2, 4, 32])
def test_random_spectra_stay_below_the_mixed_envelope(k) -> None:
    """With an exact share alpha. Dvoretzky-Kiefer-Wolfowitz: false alarm below 1e-9 per law, 60 laws."""
    rng = np.random.default_rng(3)
    n = 20_000
    margin = math.sqrt(math.log(2 / 1e-9) / (2 * n))
    x = np.linspace(0.02, 1.5, 300)
    for _ in range(20):
        terms = int(rng.integers(1, 40))
        weights = rng.dirichlet(np.full(terms, rng.choice([0.1, 1.0, 10.0])))
        alpha = float(rng.choice([0.0, rng.random()]))
        r = alpha + (1 - alpha) * (rng.chisquare(k, (n, terms)) / k) @ weights
        empirical = np.searchsorted(np.sort(r), x, side="right") / n
        assert np.all(empirical <= envelope_cdf(RandomizedClipping(k), x) + margin)


def test_the_papers_printed_envelopes_are_violated() -> None:
    """E5 (widest layer only), E6 (exchanged cases) and E13 (x_plus): a true law lies clearly above what is printed."""
    x = np.linspace(1.0, 2.0, 400)
    assert float((mean_chi2_cdf(x, 64) - mean_chi2_cdf(x, 32)).max()) == pytest.approx(0.0719, abs=1e-3)
    below = np.linspace(0.3, 1.0, 200)
    assert float((mean_chi2_cdf(below, 32) - mean_chi2_cdf(below, 32 * 2048)).max()) > 0.4
    beyond = np.array(1.0001)
    assert beyond > 1 + 2 / (32 * 2048)
    assert mean_chi2_cdf(beyond, 32) > mean_chi2_cdf(beyond, 32 * 2048) + 0.02


@pytest.mark.parametrize("k", [2, 8, 32])
def test_discretised_scale_is_stochastically_larger(k) -> None:
    mixture = scale_mixture(RandomizedClipping(k), 1e-10, 96)
    assert mixture.weights.sum() + mixture.lost_mass == pytest.approx(1.0, abs=1e-12)
    # P(Y_discrete <= y) >= F_Y(y) at every y.
    y = np.linspace(0.001, 0.999, 999)
    support = mixture.scales**-2.0
    discrete = np.array([mixture.weights[support <= v].sum() for v in y]) + mixture.lost_mass
    assert np.all(discrete >= special.gammainc(k / 2, k * y / 2) - 1e-12)
