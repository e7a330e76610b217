"""The composed privacy loss of a worst-case record, drawn step by step, against the accountant's
delta in both directions.

Worst case: with exact clipping a contribution of norm C in every sampled step; with a sketch a
gradient of rank one, R = chi2(k)/k, so a contribution of norm C R^(-1/2) (what lies beyond C if R
is small, and below C if R is large). delta(eps) = E max(0, 1 - exp(eps - L)), L the composed loss
under the upper distribution.

False alarms: a right accountant fails one comparison with probability 3e-7 (five standard errors,
one-sided, normal approximation: every estimate has hundreds of terms), and there are fewer than
250, so in some comparison with probability below 8e-5. Seeds are fixed, so in fact always or never.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from quietgrad.accounting.composition import compose
from quietgrad.events import ExactClipping, PoissonGaussian, RandomizedClipping

ERRORS = 5.0
DRAWS = 120_000
TARGETS = (0.2, 0.03, 3e-3)  # deltas whose epsilons are tried

EXACT = [
    PoissonGaussian(0.7, 0.02, 20),
    PoissonGaussian(1.0, 0.02, 50),
    PoissonGaussian(1.0, 0.2, 5),
    PoissonGaussian(2.0, 0.5, 20),
    PoissonGaussian(4.0, 0.9, 50),
    PoissonGaussian(1.0, 1.0, 1),
]
SKETCHED = [
    PoissonGaussian(1.0, 0.05, 20, RandomizedClipping(32)),
    PoissonGaussian(3.0, 0.3, 50, RandomizedClipping(32)),
    PoissonGaussian(2.0, 1.0, 5, RandomizedClipping(32)),
    PoissonGaussian(2.0, 0.05, 50, RandomizedClipping(8)),
    PoissonGaussian(3.0, 0.5, 20, RandomizedClipping(8)),
    PoissonGaussian(1.0, 1.0, 1, RandomizedClipping(8)),
    PoissonGaussian(3.0, 0.1, 20, RandomizedClipping(4)),
    PoissonGaussian(5.0, 0.5, 5, RandomizedClipping(4)),
    PoissonGaussian(4.0, 1.0, 1, RandomizedClipping(4)),
]
DIRECTIONS = ["remove", "add"]
pytestmark = pytest.mark.statistical


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float  # standard


def composed_losses(event, direction, rng, *, envelope=False):
    """[DRAWS] composed losses under the upper distribution. ``envelope``: Z is raised to 1 where it
    is below, the law that is accounted for.
    """
    total = np.zeros(DRAWS)
    q = event.sample_rate
    for _ in range(event.steps):
        scale = np.ones(DRAWS)
        if isinstance(event.clipping, RandomizedClipping):
            k = event.clipping.sketch_dim
            scale = (rng.chisquare(k, DRAWS) / k) ** -0.5
            scale = np.maximum(scale, 1.0) if envelope else scale
        mu = scale / event.noise_multiplier
        x = rng.standard_normal(DRAWS)
        if direction == "remove":
            x += mu * (rng.random(DRAWS) < q)
        exponent = mu * x - mu**2 / 2
        loss = exponent if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent)
        total += loss if direction == "remove" else -loss
    return total


def estimate_delta(losses, epsilon):
    terms = -np.expm1(np.minimum(epsilon - losses, 0.0))
    return Estimate(float(terms.mean()), float(terms.std() / math.sqrt(terms.size)))


def is_sound(claimed, estimate):
    return estimate.value - ERRORS * estimate.error <= claimed


def is_tight(claimed, estimate):
    return claimed <= 1.5 * estimate.value + ERRORS * estimate.error


def claims(event, direction):
    """(epsilon, delta) pairs of the accountant for one direction: at each target delta, and at
    epsilon = 0.
    """
    composed = compose(event, tail_mass=1e-7)
    loss = composed.remove if direction == "remove" else composed.add
    epsilons = {0.0, *(loss.epsilon(target) for target in TARGETS)}
    return [(e, loss.delta(e)) for e in sorted(epsilons)]


@pytest.mark.grid(5, "both directions of a few events")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("event", EXACT)
def test_exact_clipping_is_sound_and_tight(event, direction):
    losses = composed_losses(event, direction, np.random.default_rng(11))
    for epsilon, claimed in claims(event, direction):
        estimate = estimate_delta(losses, epsilon)
        assert is_sound(claimed, estimate), (epsilon, claimed, estimate)
        assert is_tight(claimed, estimate), (epsilon, claimed, estimate)


@pytest.mark.grid(6, "both directions of a few events")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("event", SKETCHED)
def test_randomized_clipping_is_sound_for_a_gradient_of_rank_one(event, direction):
    losses = composed_losses(event, direction, np.random.default_rng(12))
    for epsilon, claimed in claims(event, direction):
        estimate = estimate_delta(losses, epsilon)
        assert is_sound(claimed, estimate), (epsilon, claimed, estimate)


@pytest.mark.grid(4, "both directions of a few events")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("event", SKETCHED[::2])
def test_randomized_clipping_is_tight_for_its_envelope(event, direction):
    losses = composed_losses(event, direction, np.random.default_rng(13), envelope=True)
    for epsilon, claimed in claims(event, direction):
        estimate = estimate_delta(losses, epsilon)
        assert is_sound(claimed, estimate), (epsilon, claimed, estimate)
        assert is_tight(claimed, estimate), (epsilon, claimed, estimate)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_accountant_that_believes_in_more_noise_is_caught(direction):
    event = PoissonGaussian(1.0, 0.2, 5)
    losses = composed_losses(event, direction, np.random.default_rng(14))
    wrong = claims(PoissonGaussian(1.5, 0.2, 5), direction)
    assert not all(is_sound(claimed, estimate_delta(losses, epsilon)) for epsilon, claimed in wrong)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_accountant_that_believes_in_less_noise_is_caught(direction):
    event = PoissonGaussian(1.5, 0.2, 5)
    losses = composed_losses(event, direction, np.random.default_rng(15))
    wrong = claims(PoissonGaussian(1.0, 0.2, 5), direction)
    assert not all(is_tight(claimed, estimate_delta(losses, epsilon)) for epsilon, claimed in wrong)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("event", [e for e in SKETCHED if e.clipping.sketch_dim == 4])
def test_an_accountant_that_ignores_the_sketch_is_caught(event, direction):
    losses = composed_losses(event, direction, np.random.default_rng(16))
    exact = PoissonGaussian(event.noise_multiplier, event.sample_rate, event.steps, ExactClipping())
    assert not all(
        is_sound(claimed, estimate_delta(losses, epsilon))
        for epsilon, claimed in claims(exact, direction)
    )
