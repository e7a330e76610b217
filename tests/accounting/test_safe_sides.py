"""On which side of a bound its pieces are: groups of steps, trade-off curves, Renyi moments and
what searches end with. Each test names the mutant that it is for.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import special

from quietgrad.accounting import calibrate, trade_off
from quietgrad.accounting.beside import joined
from quietgrad.accounting.composition import ComposedLoss, _mixture
from quietgrad.accounting.phases import grouped, merge_equal_phases
from quietgrad.accounting.renyi.moments import renyi_divergence
from quietgrad.accounting.scale_mixture import convex_from, scale_mixture
from quietgrad.accounting.selection import epsilon as selection
from quietgrad.events import (
    EventSequence,
    ExactClipping,
    PoissonGaussian,
    RandomizedClipping,
    SideRelease,
)


def test_only_steps_of_one_kind_are_a_group() -> None:
    """Mutants: groups, or equal phases, that forget how was clipped, or what is beside."""
    clippings = (ExactClipping(), RandomizedClipping(4), RandomizedClipping(32))
    kinds = list(itertools.product(clippings, ((), (SideRelease("a", 5.0),))))
    each = tuple(
        PoissonGaussian(1.0 + 0.01 * (i // 2), 0.1, 1, clipping, beside=beside)
        for i in range(20)
        for clipping, beside in kinds
    )
    few = grouped(each)
    assert len(few) < len(merge_equal_phases(each)) == len(each) / 2
    for kind in kinds:
        assert sum(p.steps for p in few if (p.clipping, p.beside) == kind) == 20


def test_a_turn_that_was_broken_off_is_not_made_up_for_by_another() -> None:
    """Mutant: two phases of three steps in two bands joined to six, three compositions of four."""
    broken = PoissonGaussian(1.0, 0.1, 3, bands=2)
    assert sum(p.compositions for p in merge_equal_phases((broken, broken))) == 4
    whole = PoissonGaussian(1.0, 0.1, 4, bands=2)
    assert merge_equal_phases((whole, whole)) == (PoissonGaussian(1.0, 0.1, 8, bands=2),)


def test_what_is_beside_counts_where_a_step_is_said_to_be_convex() -> None:
    """Mutant: the law of a step with numbers beside it convex from where it is without them."""
    claim = RandomizedClipping(16, "convex")
    phase = PoissonGaussian(0.5, 0.1, 1, claim, beside=(SideRelease("a", 3.0**-0.5),))
    assert convex_from(0.5) < convex_from(0.5, 3.0) < 1
    made = _mixture(phase, 1e-9, 64, True)
    right, wrong = (
        joined(scale_mixture(claim, 1e-9, 64, convex_from(0.5, c)), phase) for c in (3.0, 0.0)
    )
    assert np.array_equal(made.scales, right.scales) and np.array_equal(made.weights, right.weights)
    assert not np.array_equal(right.scales, wrong.scales)


RATES = np.linspace(0.01, 0.99, 25)
THRESHOLDS = np.linspace(-9.0, 12.0, 40_001)


def errors(sigma: float, q: float) -> tuple[np.ndarray, np.ndarray]:
    """Chances, of one sampled step, to be below a threshold without the record, and with it."""
    without = special.ndtr(THRESHOLDS)
    return without, (1 - q) * without + q * special.ndtr(THRESHOLDS - 1 / sigma)


@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.2), (1.0, 0.05)])
def test_errors_of_a_sampled_step_are_bounded_in_each_direction(sigma: float, q: float) -> None:
    """Mutants: directions exchanged, the larger bound of both. Without sampling they are one."""
    event = PoissonGaussian(sigma, q, 1)
    without, with_it = errors(sigma, q)
    # Who tests for presence says it above a threshold, who tests for absence below.
    presence = np.interp(RATES, 1 - without[::-1], with_it[::-1])
    absence = np.interp(RATES, with_it, 1 - without)
    assert np.abs(presence - absence).max() > 0.01
    for direction, exact in (("remove", presence), ("add", absence)):
        bound = trade_off(event, RATES, direction)  # type: ignore[arg-type]
        assert np.all(bound <= exact + 1e-6) and np.all(bound >= exact - 0.01)
    worse = trade_off(event, RATES)
    assert np.all(worse <= np.minimum(presence, absence) + 1e-6)
    assert np.all(worse >= np.minimum(presence, absence) - 0.01)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("q", [1e-4, 0.05, 0.6])
def test_a_divergence_is_rounded_up(sigma: float, q: float) -> None:
    """Mutant: allowances for rounding taken off. Whole orders are finite sums of positive terms."""
    for order in (2, 3, 8, 20):
        k = np.arange(order + 1)
        chances = special.gammaln(order + 1) - special.gammaln(k + 1)
        chances -= special.gammaln(order - k + 1)
        logs = chances + (order - k) * math.log1p(-q) + k * math.log(q)
        exact = special.logsumexp(logs + k * (k - 1) / (2 * sigma**2)) / (order - 1)
        found = renyi_divergence(sigma, q, order)
        assert exact * (1 + 1e-13) < found or found == order / (2 * sigma**2)
        assert found <= exact * (1 + 1e-9) + 1e-11


@pytest.mark.parametrize("halvings", [1, 3, 6])
def test_a_search_that_ends_early_ends_above(
    halvings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: the side where the condition does not hold."""
    monkeypatch.setattr(selection, "HALVINGS", halvings)
    found = selection._smallest(lambda e: e >= 0.3, 0.0, 1.0)
    assert 0.3 <= found <= 0.3 + 2.0**-halvings


def test_a_scale_that_misses_the_target_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the smallest of all scales that were tried. Here the second one is too small, as
    epsilon falls faster than is guessed.
    """

    def falling(event: EventSequence, _: float) -> float:
        return sum(8.0 / phase.noise_multiplier**3 for phase in event.events)

    tried: list[float] = []

    def event_at(scale: float) -> EventSequence:
        tried.append(scale)
        return EventSequence((PoissonGaussian(scale, 0.1, 1), PoissonGaussian(2 * scale, 0.1, 1)))

    def coarser(phases: tuple[PoissonGaussian, ...], _: float) -> tuple[PoissonGaussian, ...]:
        return (phases[0], phases[0])

    monkeypatch.setattr(calibrate, "epsilon_of", falling)
    monkeypatch.setattr(calibrate, "grouped", coarser)
    found = calibrate.calibrate_by_groups(event_at, 1e-5, 1.0)
    assert 0.999 <= falling(event_at(found), 1e-5) <= 1.0
    assert min(tried) < found


@pytest.mark.parametrize("envelope", ["mixed", "convex", "hutch++", "hutch"])
@pytest.mark.parametrize("convex", [0.1, 1.0])
def test_what_lies_below_the_least_ratio_counts_as_delta(envelope: str, convex: float) -> None:
    """Mutant: it is dropped."""
    claim = RandomizedClipping(8, envelope, 16 if envelope == "hutch" else None)  # type: ignore[arg-type]
    mixture = scale_mixture(claim, 1e-3, 64, convex)
    assert 0 < mixture.lost_mass <= 1e-3 * (1 + 1e-9)
    assert mixture.weights.sum() + mixture.lost_mass == pytest.approx(1.0, abs=1e-9)


def test_broken_turns_in_one_group_count_as_whole_ones() -> None:
    """Mutant: their steps added up, three and three in two bands, and then rounded up once."""
    each = tuple(PoissonGaussian(1.0 + 0.001 * i, 0.1, 3, bands=2) for i in range(300))
    few = grouped(each, 0.05)
    assert len(few) < 20 and sum(p.compositions for p in few) == 600


def test_noise_that_nearly_meets_the_target_does_not() -> None:
    """Mutant: a thousandth more than the target is taken for it."""

    def epsilon_at(sigma: float) -> float:
        return 1.0005 if sigma < 2.0 else 0.9 * 2.0 / sigma

    found = calibrate.calibrate(epsilon_at, 1.0)
    assert epsilon_at(found) <= 1.0 and found <= 2.01


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_an_epsilon_keeps_its_delta_in_the_arithmetic_that_runs(scale):
    """Solved between two points of the grid it may be a rounding too small."""
    numbers = np.random.default_rng(7)
    losses = np.sort(numbers.normal(0, scale, 4000))
    composed = ComposedLoss(losses, numbers.dirichlet(np.ones(4000)) * (1 - 1e-14), 1e-14)
    for delta in (*np.geomspace(1e-13, 0.2, 200), composed.delta(losses[3000])):
        found = composed.epsilon(float(delta))
        assert composed.delta(found) <= delta
        assert found == 0.0 or composed.delta(found * (1 - 1e-4)) > delta
