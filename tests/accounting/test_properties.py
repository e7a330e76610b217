"""What must hold whatever the numbers: monotonicity, composition, consistency of epsilon, delta,
trade-off curve and calibration.

The events are drawn by hypothesis, always the same ones. Comparisons of two computed epsilons allow
what two grids may differ by (GRID); changes of an argument are by 5 % at least, whose effect is far
larger.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from quietgrad.accounting import (
    advantage,
    attack_success,
    delta,
    epsilon,
    noise_multiplier,
    trade_off,
)
from quietgrad.accounting.composition import compose
from quietgrad.events import (
    EventSequence,
    ExactClipping,
    PoissonGaussian,
    RandomizedClipping,
    event_from_json,
)

GRID = 3e-4


def few(examples):
    return settings(max_examples=examples)


def logarithmic(low, high):
    return st.floats(math.log10(low), math.log10(high)).map(lambda x: 10.0**x)


rates = st.one_of(st.just(1.0), logarithmic(1e-3, 0.9))
multipliers = logarithmic(0.7, 20.0)
step_counts = st.integers(1, 2000)
deltas = logarithmic(1e-8, 1e-3)
growths = st.floats(1.05, 4.0)
exact_events = st.builds(PoissonGaussian, multipliers, rates, step_counts)
# Rates below a few per cent make sketched events slow: a wide range of losses on a fine grid.
sketches = st.sampled_from([RandomizedClipping(32), RandomizedClipping(64)])
sketched_events = st.builds(
    PoissonGaussian, logarithmic(2.0, 20.0), logarithmic(0.03, 1.0), st.integers(1, 200), sketches
)
events = st.one_of(exact_events, exact_events, sketched_events)


def at_most(small, large):
    return 0.0 <= small <= large * (1 + GRID) + 1e-6


@few(15)
@given(events, deltas, growths)
def test_more_noise_costs_less(event, d, growth):
    noisier = replace(event, noise_multiplier=event.noise_multiplier * growth)
    assert at_most(epsilon(noisier, d), epsilon(event, d))


@few(15)
@given(events, deltas, growths)
def test_larger_delta_costs_less(event, d, growth):
    assert at_most(epsilon(event, min(d * growth, 0.5)), epsilon(event, d))


@few(15)
@given(events, deltas, growths)
def test_higher_rate_costs_more(event, d, growth):
    rate = min(1.0, event.sample_rate * growth)
    assert at_most(epsilon(event, d), epsilon(replace(event, sample_rate=rate), d))


@few(15)
@given(events, deltas, st.integers(2, 5))
def test_more_steps_cost_more(event, d, factor):
    assert at_most(epsilon(event, d), epsilon(replace(event, steps=event.steps * factor), d))


@few(8)
@given(sketched_events, deltas, st.sampled_from([(64, 32), (48, 24), (32, 16), (10**7, 128)]))
def test_fewer_projections_cost_more(event, d, dims):
    costs = [epsilon(replace(event, clipping=RandomizedClipping(k)), d) for k in dims]
    exact = epsilon(replace(event, clipping=ExactClipping()), d)
    assert at_most(exact, costs[0])
    assert at_most(costs[0], costs[1])


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.05, 4.0, 200), (1.0, 4.0, 20), (0.01, 1.0, 1000), (0.5, 1.0, 2)]
)
def test_ten_million_projections_are_exact_clipping(q, sigma, steps):
    """R is within about 1e-3 of 1, so Z is too, one-sided; its mean is above 1 by about 1e-4."""
    nearly = epsilon(PoissonGaussian(sigma, q, steps, RandomizedClipping(10**7)), 1e-5)
    exact = epsilon(PoissonGaussian(sigma, q, steps), 1e-5)
    assert exact <= nearly <= exact * (1 + 3e-4)


@few(9)
@given(events, deltas)
def test_one_band_is_plain(event, d):
    banded = replace(event, bands=1)
    assert banded.participation_rate == event.sample_rate
    assert banded.compositions == event.steps
    assert epsilon(banded, d) == epsilon(event, d)


@few(9)
@given(events, st.integers(1, 30), deltas)
def test_bands_compose_fewer_steps_at_a_higher_rate(event, bands, d):
    bands = min(bands, event.steps)
    banded = replace(event, bands=bands)
    assert banded.participation_rate == min(1.0, bands * event.sample_rate)
    assert banded.compositions == math.ceil(event.steps / bands)
    equivalent = replace(event, sample_rate=banded.participation_rate, steps=banded.compositions)
    assert epsilon(banded, d) == epsilon(equivalent, d)


@few(9)
@given(events, deltas, st.integers(1, 500))
def test_splitting_a_run_changes_nothing(event, d, more):
    whole, rest = replace(event, steps=event.steps + more), replace(event, steps=more)
    assert epsilon(EventSequence((event, rest)), d) == pytest.approx(
        epsilon(whole, d), abs=1e-9, rel=1e-9
    )


@few(5)
@given(exact_events, events, deltas)
def test_phases_compose(first, second, d):
    """At least the costlier phase, at most basic composition, and the order does not matter."""
    both = epsilon(EventSequence((first, second)), d)
    assert at_most(max(epsilon(first, d), epsilon(second, d)), both)
    assert at_most(both, epsilon(first, d / 2) + epsilon(second, d / 2))
    assert both == pytest.approx(epsilon(EventSequence((second, first)), d), rel=1e-9, abs=1e-9)


def test_a_short_phase_may_follow_a_banded_one():
    """The second phase has fewer steps than the first has bands."""
    first, second = PoissonGaussian(1.0, 0.01, 100, bands=4), PoissonGaussian(1.0, 0.01, 2)
    assert epsilon(EventSequence((first, second)), 1e-5) >= epsilon(first, 1e-5)


@few(8)
@given(
    st.floats(0.05, 20.0),
    logarithmic(0.01, 1.0),
    st.integers(1, 500),
    st.sampled_from([None, RandomizedClipping(64)]),
    deltas,
)
def test_calibration_meets_its_target(target, q, steps, clipping, d):
    sigma = noise_multiplier(target, d, sample_rate=q, steps=steps, clipping=clipping)
    spent = epsilon(PoissonGaussian(sigma, q, steps, clipping or ExactClipping()), d)
    assert target - 1e-2 <= spent <= target


@pytest.mark.parametrize(
    "before", [PoissonGaussian(5.0, 0.05, 100), EventSequence((PoissonGaussian(5.0, 0.05, 100),))]
)
def test_calibration_counts_what_was_spent_before(before):
    sigma = noise_multiplier(1.0, 1e-5, sample_rate=0.02, steps=300, before=before)
    assert sigma > noise_multiplier(1.0, 1e-5, sample_rate=0.02, steps=300)
    total = epsilon(
        EventSequence((PoissonGaussian(5.0, 0.05, 100), PoissonGaussian(sigma, 0.02, 300))), 1e-5
    )
    assert 1.0 - 1e-2 <= total <= 1.0


@few(15)
@given(events, logarithmic(1e-9, 0.5))
def test_epsilon_is_a_number_from_zero_up(event, d):
    value = epsilon(event, d)
    assert not math.isnan(value) and value >= 0


@few(10)
@given(events, st.floats(0.0, 30.0))
def test_delta_is_a_probability(event, e):
    assert 0.0 <= delta(event, e) <= 1.0
    assert delta(event, e + 0.1) <= delta(event, e) * (1 + 1e-9)


@few(15)
@given(exact_events, deltas)
def test_delta_undoes_epsilon(event, d):
    assert delta(event, epsilon(event, d)) <= d * (1 + 1e-6)


@pytest.mark.grid(1, "two kinds of sketches")
@pytest.mark.parametrize(("k", "sigma"), [(32, 4.0), (4, 20.0)])
def test_delta_undoes_epsilon_of_sketched_events(k, sigma):
    event = PoissonGaussian(sigma, 0.05, 100, RandomizedClipping(k))
    assert delta(event, epsilon(event, 1e-5)) <= 1e-5 * (1 + 1e-6)


ALPHAS = np.linspace(0.0, 1.0, 101)
BOTH_AND_WORSE = ["remove", "add", None]


@pytest.mark.parametrize("direction", BOTH_AND_WORSE)
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0, 20.0])
def test_trade_off_of_one_gaussian_step(sigma, direction):
    """The true curve is Phi(Phi^-1(1 - alpha) - mu) (Dong et al. 2022); ours is below it, by
    little.
    """
    true = special.ndtr(special.ndtri(1 - ALPHAS) - 1 / sigma)
    ours = trade_off(PoissonGaussian(sigma, 1.0, 1), ALPHAS, direction)
    assert np.all(ours <= true + 1e-12)
    assert np.all(ours >= true - 2e-3)


@pytest.mark.parametrize("direction", BOTH_AND_WORSE)
@pytest.mark.parametrize(
    "event",
    [
        PoissonGaussian(1.0, 0.05, 100),
        EventSequence(
            (PoissonGaussian(2.0, 0.05, 100), PoissonGaussian(1.5, 0.1, 5, RandomizedClipping(32)))
        ),
    ],
    ids=["exact", "phases"],
)
def test_trade_off_is_a_trade_off_function(event, direction):
    curve = trade_off(event, ALPHAS, direction)
    assert np.all(curve >= 0) and np.all(curve <= 1 - ALPHAS + 1e-12)
    assert np.all(np.diff(curve) <= 1e-12)
    # A supremum of straight lines is convex, the smaller of two suprema only nearly.
    if direction is not None:
        assert np.all(np.diff(curve, 2) >= -1e-9)
    # No test separates better than the advantage allows.
    assert np.all(curve >= 1 - ALPHAS - advantage(event) - 1e-3)


@few(10)
@given(events)
def test_deltas_of_many_epsilons_are_those_of_each(event):
    for loss in (compose(event).remove, compose(event).add):
        for grid in (np.linspace(0, 5, 40), np.zeros(1), loss.losses[loss.losses >= 0][::97]):
            each = [loss.delta(float(e)) for e in grid]
            np.testing.assert_allclose(loss.deltas(grid), each, rtol=1e-11)


@pytest.mark.grid(1, "two numbers of projections")
@pytest.mark.parametrize("k", [4, 32])
def test_attack_success_is_within_the_advantage(k):
    """True positive rate minus false positive rate is at most the advantage: two bounds of one
    event must not contradict that by much.
    """
    event = PoissonGaussian(10.0, 0.05, 100, RandomizedClipping(k))
    assert attack_success(event, 0.01) - 0.01 <= advantage(event) + 1e-3


@pytest.mark.parametrize("sigma", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("steps", [1, 50])
def test_advantage_of_the_gaussian_mechanism(sigma, steps):
    true = 2 * special.ndtr(math.sqrt(steps) / (2 * sigma)) - 1
    ours = advantage(PoissonGaussian(sigma, 1.0, steps))
    assert true * (1 - 1e-12) <= ours <= true * (1 + 1e-4)


@few(30)
@given(events, events)
def test_events_survive_json(first, second):
    hutch = PoissonGaussian(2.0, 0.1, 12, RandomizedClipping(8, "hutch", 77), bands=3)
    for event in (first, hutch, EventSequence((first, second, hutch))):
        assert event_from_json(json.loads(json.dumps(event.to_json()))) == event


def test_events_of_numpy_numbers_survive_json():
    """Checks accept numpy's whole numbers, and the ledger writes events as JSON."""
    event = PoissonGaussian(
        np.float64(1.5), np.float64(0.1), np.int64(12), RandomizedClipping(np.int64(8)), np.int32(2)
    )
    assert event_from_json(json.loads(json.dumps(event.to_json()))) == event


@pytest.mark.grid(1, "events between the extremes")
@pytest.mark.parametrize(
    ("q", "sigma", "steps", "clipping"),
    [
        (0.05, 4.0, 200, ExactClipping()),
        (1.0, 4.0, 20, ExactClipping()),
        (0.01, 1.0, 1000, ExactClipping()),
        (0.5, 1.0, 2, ExactClipping()),
        (0.05, 4.0, 200, RandomizedClipping(32)),
        (0.01, 1.0, 1000, RandomizedClipping(32)),
    ],
)
def test_finer_grid_changes_little_and_only_downwards(q, sigma, steps, clipping):
    event = PoissonGaussian(sigma, q, steps, clipping)
    usual = compose(event, tail_mass=1e-9).epsilon(1e-5)
    fine = compose(event, tail_mass=1e-9, refine=4).epsilon(1e-5)
    assert fine <= usual + 1e-6
    assert fine >= usual - 5e-4
