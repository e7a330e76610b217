"""Numbers in numpy's short types, and fractions: counted as the numbers that they are. Before, what
was computed with them was rounded as they are, and epsilon fell with what was lost.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from quietgrad.accounting import (
    RunCount,
    epsilon,
    noise_multiplier,
    renyi_epsilon,
    selected_epsilon,
)
from quietgrad.accounting.one_step import one_step
from quietgrad.accounting.product import _ends
from quietgrad.accounting.scale_mixture import ScaleMixture
from quietgrad.events import EventSequence, PoissonGaussian, SideRelease

DELTA = 1e-5


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble, Fraction])
@pytest.mark.parametrize("rate", [0.0003, 0.003, 0.3])
def test_rates_and_noise_are_not_rounded(kind: Any, rate: float) -> None:
    for bands in (1, 3):
        given = PoissonGaussian(kind(0.9), kind(rate), 1000, bands=bands)
        same = PoissonGaussian(float(kind(0.9)), float(kind(rate)), 1000, bands=bands)
        assert epsilon(given, kind(DELTA)) == epsilon(same, float(kind(DELTA)))
    assert type(given.sample_rate) is type(given.noise_multiplier) is float


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int64])
def test_whole_numbers_do_not_start_again(kind: Any) -> None:
    parts = (PoissonGaussian(1.0, 0.01, kind(100)),) * 4
    assert epsilon(EventSequence(parts), DELTA) == epsilon(PoissonGaussian(1.0, 0.01, 400), DELTA)
    with_side = PoissonGaussian(1.0, 0.01, kind(100), beside=(SideRelease("loss", 5, kind(3)),))
    same = PoissonGaussian(1.0, 0.01, 100, beside=(SideRelease("loss", 5.0, 3),))
    assert epsilon(with_side, DELTA) == epsilon(same, DELTA)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_choices_and_orders_are_not_rounded(kind: Any) -> None:
    run, delta = PoissonGaussian(1.0, 0.01, 100), float(kind(1e-4))
    count, same = RunCount(kind(7.3), kind(0.7)), RunCount(float(kind(7.3)), float(kind(0.7)))
    assert selected_epsilon(run, count, kind(delta)) == selected_epsilon(run, same, delta)
    assert renyi_epsilon(run, kind(delta)) == renyi_epsilon(run, delta)


@pytest.mark.parametrize("target", [2.0, 8.0])
def test_a_target_in_a_short_type_is_not_exceeded(target: float) -> None:
    """Epsilons were rounded to float16 to be compared with it: 2.0009 was found to be 2."""
    given = dict(sample_rate=0.02, steps=500)
    found = noise_multiplier(np.float16(target), DELTA, **given)  # type: ignore[arg-type]
    assert found == noise_multiplier(target, DELTA, **given)  # type: ignore[arg-type]
    assert epsilon(PoissonGaussian(found, **given), DELTA) <= target  # type: ignore[arg-type]


def test_records_that_are_drawn_rarely_take_no_terabyte() -> None:
    # Before: 1.4e9 points, and MemoryError: the sum's standard deviation was taken for the scale
    # of its tails.
    mixture, interval = ScaleMixture(np.ones(1), np.ones(1), 0.0, 0.0), 1.6e-5
    rare = one_step(mixture, 0.6, 1e-5, -1, 200_000, interval).remove
    low, high = _ends([rare], [10_000], interval, 1e-15)
    assert high - low < 2**23
