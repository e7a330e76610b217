"""Delta and epsilon of a composed loss whose numbers are known, and of its two directions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quietgrad.accounting.composition import ComposedEvent, ComposedLoss, Discretisation, _error_of
from quietgrad.accounting.one_step import _connect_dots
from quietgrad.accounting.rounding import round_down, round_down_to, round_up, round_up_to

LOSS = ComposedLoss(np.array([-1.0, 0.5, 1.0, 2.0]), np.array([0.5, 0.2, 0.19, 0.1]), 0.01)
SMALL = ComposedLoss(np.array([-1.0, 0.5]), np.array([0.9, 0.1]), 0.0)
HOW = Discretisation(0.5, False, 1, 0.0, 1e-15)


def by_hand(epsilon: float) -> float:
    some = zip(LOSS.losses, LOSS.probabilities, strict=True)
    finite = sum(p * (1 - math.exp(epsilon - loss)) for loss, p in some if loss > epsilon)
    return finite + LOSS.infinity


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 0.5, 0.9, 1.5, 2.0, 9.0])
def test_delta_is_the_divergence_with_what_is_at_infinity(epsilon: float) -> None:
    assert LOSS.delta(epsilon) == pytest.approx(by_hand(epsilon), rel=1e-12)
    assert LOSS.deltas(np.array([0.0, epsilon, 9.5]))[1] == pytest.approx(by_hand(epsilon))


@pytest.mark.parametrize("delta", [0.011, 0.02, 0.05, 0.1, 0.2])
def test_epsilon_is_never_below_the_one_of_its_delta(delta: float) -> None:
    epsilon = LOSS.epsilon(delta)
    low, high = 0.0, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if by_hand(middle) > delta else (low, middle)
    assert high - 1e-12 <= epsilon <= high + 1e-9
    assert by_hand(epsilon) <= delta


def test_what_is_at_infinity_alone_is_no_finite_epsilon() -> None:
    assert LOSS.epsilon(0.0099) == math.inf
    assert math.isfinite(LOSS.epsilon(0.0101))


@pytest.mark.parametrize("swapped", [False, True])
def test_the_worse_direction_counts(swapped: bool) -> None:
    remove, add = (SMALL, LOSS) if swapped else (LOSS, SMALL)
    event = ComposedEvent(remove, add, HOW)
    assert event.delta(0.3) == LOSS.delta(0.3) > SMALL.delta(0.3)
    assert event.epsilon(0.05) == LOSS.epsilon(0.05) > SMALL.epsilon(0.05)


def test_what_transforms_may_have_taken_is_made_up_for() -> None:
    assert _error_of(np.array([0.5, -1e-9, 0.5])) == pytest.approx(3e-9)
    assert _error_of(np.array([0.5, 0.0, 0.5])) == 0.0


def test_no_mass_of_a_step_is_dropped() -> None:
    # Below the grid, two intervals, above it; the add direction's numbers are the same mirrored.
    upper, lower = np.array([0.1, 0.3, 0.4, 0.2]), np.array([0.3, 0.4, 0.25, 0.05])
    atoms = _connect_dots(upper, lower, -1, 0.5, 0.0)
    assert atoms.probabilities.sum() + atoms.infinity == pytest.approx(1.0)
    # Of each interval both masses stay; what lies below is raised to the first point.
    losses = 0.5 * np.arange(-1, 2)
    other = float(atoms.probabilities @ np.exp(-losses))
    assert other == pytest.approx(0.1 * math.exp(0.5) + 0.4 + 0.25 + 0.05)
    # Of what lies above, as much as the lower one's mass can explain stays at the last point.
    assert atoms.infinity == pytest.approx(0.2 - 0.05 * math.exp(0.5))
    with_lost = _connect_dots(upper, lower, -1, 0.5, 0.125)
    assert with_lost.infinity == pytest.approx(atoms.infinity + 0.125)


def test_printed_numbers_are_rounded_to_the_safe_side() -> None:
    assert (round_up(1.0001, 2), round_up(1.23, 2)) == ("1.01", "1.23")
    assert (round_down(1.0099, 2), round_down(1.23, 2)) == ("1.00", "1.23")
    assert (round_up_to(1.2301e-6, 3), round_down_to(1.2399e-6, 3)) == ("1.24e-6", "1.23e-6")
