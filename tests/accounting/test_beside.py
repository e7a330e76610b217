"""Numbers released beside the gradients: the accountant against dp-accounting, and against the loss
of the joint mechanism drawn coordinate by coordinate, in both directions.

False alarms: as in test_soundness_monte_carlo.py, five standard errors one-sided a comparison,
3e-7; there are fewer than 100, so 3e-5 in all. Seeds are fixed, so in fact always or never.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from quietgrad.accounting import epsilon, noise_multiplier
from quietgrad.accounting.beside import split_by_side_releases
from quietgrad.accounting.composition import compose
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.beside.values import releases_beside
from quietgrad.events import (
    EventSequence,
    PoissonGaussian,
    RandomizedClipping,
    SideRelease,
    event_from_json,
)

ERRORS = 5.0
DRAWS = 120_000
TARGETS = (0.2, 0.03, 3e-3)
LOSS, COUNT = SideRelease("loss", 5.0), SideRelease("count", 3.0)
BOTH = (LOSS, COUNT)


def test_gaussians_of_one_batch_are_those_of_dp_accounting() -> None:
    # Without sampling it composes the three by itself; nothing is said of an effective multiplier.
    event = PoissonGaussian(2.0, 1.0, 10, beside=BOTH)
    one = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(s) for s in (2.0, 5.0, 3.0)])
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_event.SelfComposedDpEvent(one, 10))
    assert epsilon(event, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_with_sampling_it_is_below_the_renyi_bound_of_the_composed_event() -> None:
    event = PoissonGaussian(1.0, 0.01, 500, beside=BOTH)
    one = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(s) for s in (1.0, 5.0, 3.0)])
    accountant = RdpAccountant()
    accountant.compose(dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.01, one), 500))
    renyi = accountant.get_epsilon(1e-5)
    alone = epsilon(replace(event, beside=()), 1e-5)
    assert 0.75 * renyi < epsilon(event, 1e-5) < renyi
    assert epsilon(event, 1e-5) > 1.05 * alone


def test_with_sampling_it_is_dp_accountings_at_the_effective_multiplier() -> None:
    # Andrew et al. 2021, Theorem 1, for two numbers: 1/s^2 = 1/sigma^2 + 1/nu^2 + 1/(2 sigma_b)^2.
    effective = (1.0 + 5.0**-2 + (2 * 1.5) ** -2) ** -0.5
    sampled = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(effective))
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_event.SelfComposedDpEvent(sampled, 50))
    event = PoissonGaussian(1.0, 0.05, 50, beside=BOTH)
    assert epsilon(event, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def joint_losses(event, direction, rng, *, part=0, moved=1.0):
    """[DRAWS] losses of a record of that part, from the noisy coordinates themselves: the record
    moves the gradients by Z / sigma and each number by ``moved`` / nu.
    """
    total, q = np.zeros(DRAWS), event.participation_rate
    for step in range(part, event.steps, event.bands):
        scale = np.ones(DRAWS)
        if isinstance(event.clipping, RandomizedClipping):
            k = event.clipping.sketch_dim
            scale = np.maximum((rng.chisquare(k, DRAWS) / k) ** -0.5, 1.0)
        mean = [scale / event.noise_multiplier]
        mean += [np.full(DRAWS, moved / s.noise_multiplier) for s in event.beside if s.at(step)]
        taken = rng.random(DRAWS) < q
        exponent = np.zeros(DRAWS)
        for m in mean:
            x = rng.standard_normal(DRAWS) + (m * taken if direction == "remove" else 0.0)
            exponent += m * x - m**2 / 2
        loss = exponent if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + exponent)
        total += loss if direction == "remove" else -loss
    return total


def worst_excess(event, losses, direction):
    """Largest excess of the drawn delta over the accountant's, in standard errors; and the smallest
    ratio of the two.
    """
    composed = getattr(compose(event), direction)
    excess, ratio = -math.inf, math.inf
    for target in TARGETS:
        eps = composed.epsilon(target)
        terms = -np.expm1(np.minimum(eps - losses, 0.0))
        excess = max(excess, (terms.mean() - composed.delta(eps)) / (terms.std() / DRAWS**0.5))
        ratio = min(ratio, terms.mean() / composed.delta(eps))
    return excess, ratio


MECHANISMS = [
    PoissonGaussian(1.0, 0.1, 10, beside=BOTH),
    PoissonGaussian(2.0, 1.0, 5, beside=BOTH),
    PoissonGaussian(1.5, 0.3, 12, beside=(LOSS, replace(COUNT, every=3))),
    PoissonGaussian(3.0, 0.3, 10, RandomizedClipping(8), beside=BOTH),
    PoissonGaussian(2.0, 0.1, 12, bands=3, beside=(LOSS, replace(COUNT, every=2))),
]


@pytest.mark.statistical
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("event", MECHANISMS, ids=range(len(MECHANISMS)))
def test_the_joint_mechanism_is_as_private_as_it_says(event, direction) -> None:
    rng = np.random.default_rng(20)
    for part in range(event.bands):
        losses = joint_losses(event, direction, rng, part=part)
        excess, ratio = worst_excess(event, losses, direction)
        assert excess < ERRORS
        if event.bands == 1:  # and no less: the numbers are those of this very mechanism
            assert ratio > 0.9


@pytest.mark.statistical
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_wrong_answers_are_noticed(direction) -> None:
    event = PoissonGaussian(1.0, 0.2, 10, beside=(SideRelease("count", 1.5),))
    rng = np.random.default_rng(21)
    right = joint_losses(event, direction, rng)
    assert worst_excess(event, right, direction)[0] < ERRORS
    # A count of 0 and 1 with noise for -1/2 and 1/2.
    doubled = joint_losses(event, direction, rng, moved=2.0)
    assert worst_excess(event, doubled, direction)[0] > 2 * ERRORS
    # A count that the accountant was not told of.
    assert worst_excess(replace(event, beside=()), right, direction)[0] > 2 * ERRORS
    # One at every step that is accounted for at every other.
    sparse = replace(event, beside=(SideRelease("count", 1.5, every=2),))
    assert worst_excess(sparse, right, direction)[0] > ERRORS


def test_a_release_every_few_steps_is_two_phases() -> None:
    event = PoissonGaussian(1.0, 0.01, 1000, beside=(SideRelease("loss", 1.0, every=10),))
    with_it = PoissonGaussian(2**-0.5, 0.01, 100)
    without = PoissonGaussian(1.0, 0.01, 900)
    expected = epsilon(EventSequence((with_it, without)), 1e-5)
    assert epsilon(event, 1e-5) == pytest.approx(expected, rel=1e-6)


@given(st.integers(1, 6), st.integers(1, 40), st.lists(st.integers(1, 7), min_size=1, max_size=2))
def test_no_part_is_counted_low(bands, steps, every) -> None:
    event = PoissonGaussian(
        1.0,
        0.1,
        max(bands, steps),
        bands=bands,
        beside=tuple(SideRelease(str(i), 2.0 + i, e) for i, e in enumerate(every)),
    )
    counted = []
    for phase in split_by_side_releases(event):
        squared = sum(
            s.noise_multiplier**-2 * (s.every == 1 or phase is event) for s in phase.beside
        )
        counted += [squared] * phase.compositions
    counted.sort(reverse=True)
    assert len(counted) == event.compositions
    for part in range(bands):
        met = [
            sum(s.noise_multiplier**-2 for s in event.beside if s.at(t))
            for t in range(part, event.steps, bands)
        ]
        for one, most in zip(sorted(met, reverse=True), counted, strict=False):
            assert one <= most * (1 + 1e-12)


def test_phases_with_numbers_beside_keep_them_when_they_merge() -> None:
    event = PoissonGaussian(1.0, 0.01, 200, beside=BOTH)
    halves = EventSequence((replace(event, steps=100),) * 2)
    assert epsilon(halves, 1e-5) == pytest.approx(epsilon(event, 1e-5), rel=1e-9)


@pytest.mark.grid(1, "two plans, one calibration")
@pytest.mark.parametrize("clipping", [None, RandomizedClipping(32)])
def test_calibration_solves_for_the_gradients_noise_with_the_numbers_in(clipping) -> None:
    methods = (TrainingLoss(share=0.05), AdaptiveClipping(own_noise=8.0, every=5))
    kept = {"sample_rate": 0.1, "steps": 20, "clipping": clipping}
    sigma = noise_multiplier(2.0, 1e-5, **kept, beside=lambda s: releases_beside(methods, s))
    event = PoissonGaussian(sigma, 0.1, 20, beside=releases_beside(methods, sigma))
    event = event if clipping is None else replace(event, clipping=clipping)
    assert 1.99 < epsilon(event, 1e-5) <= 2.0
    assert sigma > noise_multiplier(2.0, 1e-5, **kept)


def test_a_share_is_that_of_a_steps_budget() -> None:
    (side,) = releases_beside((TrainingLoss(share=0.1),), 1.3)
    effective = (1.3**-2 + side.noise_multiplier**-2) ** -0.5
    assert side.noise_multiplier**-2 == pytest.approx(0.1 * effective**-2)
    one, two = releases_beside((TrainingLoss(share=0.1), AdaptiveClipping(share=0.2)), 1.3)
    squares = [1.3**-2, one.noise_multiplier**-2, two.noise_multiplier**-2]
    assert [s / sum(squares) for s in squares] == pytest.approx([0.7, 0.1, 0.2])


def test_a_number_that_costs_more_than_the_target_is_refused() -> None:
    methods = (TrainingLoss(own_noise=0.5),)
    with pytest.raises(ValueError, match="more noise on what is released beside the gradients"):
        noise_multiplier(
            0.5, 1e-5, sample_rate=0.1, steps=50, beside=lambda s: releases_beside(methods, s)
        )


def test_events_with_numbers_beside_are_written_and_read() -> None:
    event = PoissonGaussian(1.0, 0.1, 10, RandomizedClipping(16), 2, BOTH)
    assert event_from_json(event.to_json()) == event
    assert "beside" not in replace(event, beside=()).to_json()


@pytest.mark.parametrize(
    ("nu", "every"), [(0.0, 1), (math.nan, 1), (1e-9, 1), (1.0, 0), (1.0, 1.5)]
)
def test_numbers_that_cannot_be_accounted_for_are_refused(nu, every) -> None:
    with pytest.raises((ValueError, TypeError), match=r"noise_multiplier|every"):
        SideRelease("count", nu, every)


@given(
    st.integers(1, 6),
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 5.5]), st.integers(1, 9)), max_size=3),
)
def test_kinds_of_steps_are_those_of_steps_gone_through(
    bands: int, more: int, numbers: list[tuple[float, int]]
) -> None:
    beside = tuple(SideRelease(f"number {i}", nu, k) for i, (nu, k) in enumerate(numbers))
    event = PoissonGaussian(1.0, 0.1, bands + more, bands=bands, beside=beside)
    moved = np.zeros(event.compositions * bands)
    for step in range(event.steps):
        moved[step] = sum(side.noise_multiplier**-2 for side in beside if side.at(step))
    places = np.sort(moved.reshape(-1, bands), axis=0).max(axis=1)
    found = [
        sum(side.noise_multiplier**-2 for side in phase.beside)
        for phase in split_by_side_releases(event)
        for _ in range(phase.compositions)
    ]
    assert sorted(found) == pytest.approx(places.tolist())
