"""Gradients that depend on what was released before: the worst record that chooses in every step,
from its own loss so far, how its gradient is made, against the composition of one law a step
(docs/hutchpp_envelope/mixtures.md, theorem 5).

The best choice is found backwards by dynamic programming over the loss so far, with every loss
rounded down to a grid and what leaves it dropped: a lower bound of the worst record's delta.
"""

import functools
import math

import numpy as np
import pytest
from scipy import signal, special, stats

from quietgrad.accounting.composition import compose
from quietgrad.events import PoissonGaussian, RandomizedClipping

STEP, REACH = 2e-3, 6.0
LOSSES = np.arange(-REACH, REACH + STEP / 2, STEP)


def cells(k, n):
    """Means and masses of chi2(k) in cells of equal ratio; smallest and largest 1e-13 left out."""
    edges = np.geomspace(stats.chi2.ppf(1e-13, k), stats.chi2.isf(1e-13, k), n + 1)
    mass, inside = (np.diff(stats.chi2.cdf(edges, j)) for j in (k, k + 2))
    keep = mass > 1e-14
    return (k * inside[keep] / mass[keep]), mass[keep]


def rank_one(k):
    """By Hutch: R = chi2(k)/k."""
    r, mass = cells(k, 200)
    return r / k, mass


def strong(k, share):
    """By Hutch++: a strong direction beside dust, see ``test_strong_direction``."""
    s, of_s = cells(k, 30)
    x, of_x = cells(k, 60)
    rho = (share * (1 - share) / (share * s + 1 - share))[:, None]
    return (1 - rho + rho * x / k).ravel(), np.outer(of_s, of_x).ravel()


EXACT = (np.ones(1), np.ones(1))
CHOICES = {
    "convex": lambda k: [EXACT, rank_one(k)],
    "hutch++": lambda k: [EXACT, strong(k, 0.5), strong(k, 0.95)],
}


def loss_masses(law, sigma, q, direction):
    """[n] masses of one step's loss in [LOSSES, LOSSES + STEP), in the means over R."""
    total = np.zeros(LOSSES.size)
    edges = np.append(LOSSES, LOSSES[-1] + STEP)
    signed = edges if direction == "remove" else -edges
    inner = np.expm1(signed) + q
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.where(inner > 0, np.log(inner / q), -np.inf)
    for r, mass in zip(*law, strict=True):
        mu = r**-0.5 / sigma
        x = odds / mu + mu / 2
        if direction == "remove":
            below = (1 - q) * special.ndtr(x) + q * special.ndtr(x - mu)
        else:
            below = special.ndtr(-x)
        total += mass * np.diff(below)
    return total


@functools.cache
def worst_delta(envelope, k, sigma, q, steps, epsilon, direction, chosen=None):
    """Of the best choice in every step, or of always ``chosen``."""
    laws = CHOICES[envelope](k)
    laws = laws if chosen is None else [laws[chosen]]
    masses = [loss_masses(law, sigma, q, direction) for law in laws]
    value = np.maximum(-np.expm1(epsilon - LOSSES), 0.0)
    zero = round(REACH / STEP)
    for _ in range(steps):
        padded = np.pad(value, (zero, zero), constant_values=(0.0, value[-1]))
        after = [signal.fftconvolve(padded, mass[::-1], mode="valid") for mass in masses]
        value = np.max(after, axis=0)
    return float(value[zero])


def claimed(envelope, k, sigma, q, steps, epsilon, direction):
    event = PoissonGaussian(sigma, q, steps, RandomizedClipping(k, envelope))
    composed = compose(event, tail_mass=1e-9)
    return (composed.remove if direction == "remove" else composed.add).delta(epsilon)


RUNS = [
    ("convex", 4, 2.0, 0.3, 5, 0.5),
    ("convex", 16, 1.5, 0.3, 6, 0.7),
    ("convex", 8, 3.0, 1.0, 3, 1.2),
    ("hutch++", 4, 2.0, 0.3, 5, 0.5),
    ("hutch++", 8, 1.0, 0.2, 6, 0.6),
]


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("run", RUNS)
def test_a_record_that_chooses_by_what_was_released_stays_below(run, direction):
    found, bound = worst_delta(*run, direction), claimed(*run, direction)
    assert 0.7 * bound < found <= bound


def test_choosing_is_worth_something():
    """Else nothing is tested here: no fixed choice does as well."""
    run = RUNS[0]
    fixed = [worst_delta(*run, "remove", chosen) for chosen in range(2)]
    assert worst_delta(*run, "remove") > max(fixed) * (1 + 1e-4)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_half_the_columns_that_are_claimed_are_noticed(direction):
    _, k, *others = RUNS[0]
    assert worst_delta("convex", k, *others, direction) > claimed(
        "convex", 2 * k, *others, direction
    )


def test_the_dynamic_programme_knows_the_gaussian_mechanism():
    """Exact norms, q = 1: one normal loss in all."""
    sigma, steps, epsilon = 2.0, 4, 1.0
    mu = math.sqrt(steps) / sigma
    truth = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(
        -mu / 2 - epsilon / mu
    )
    found = worst_delta("convex", 4, sigma, 1.0, steps, epsilon, "remove", chosen=0)
    assert truth * (1 - 0.03) <= found <= truth
