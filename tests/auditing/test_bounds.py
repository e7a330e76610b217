"""Lower bounds from error counts: closed forms, agreement of the families, and how often they
exceed the truth.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from quietgrad.accounting import delta as delta_of
from quietgrad.accounting import epsilon
from quietgrad.auditing import (
    ErrorCounts,
    lower_bound_clopper_pearson,
    lower_bound_gaussian,
    lower_bound_trade_off,
)
from quietgrad.auditing.bounds import errors as bounds
from quietgrad.auditing.bounds.errors import gaussian_epsilon, lower_rate, upper_rate
from quietgrad.events import PoissonGaussian, SideRelease


@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-5), (1.0, 1e-5), (2.0, 1e-3), (4.0, 1e-6)])
def test_gaussian_epsilon_is_the_accountants(mu: float, delta: float) -> None:
    event = PoissonGaussian(1 / mu, 1.0, 1)
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon(event, delta), rel=2e-3)
    assert gaussian_epsilon(mu, delta) <= epsilon(event, delta) + 1e-9


def test_gaussian_epsilon_of_little_is_nothing() -> None:
    assert gaussian_epsilon(0.0, 1e-5) == 0
    assert gaussian_epsilon(1e-6, 1e-5) == 0
    assert gaussian_epsilon(1e4, 1e-5) == 200


def test_clopper_pearson_limits_are_scipys() -> None:
    for wrong, trials in [(0, 10), (3, 10), (10, 10), (7, 1000)]:
        expected = stats.binomtest(wrong, trials).proportion_ci(0.9, "exact")
        assert upper_rate(wrong, trials, 0.05) == pytest.approx(expected.high)
        assert lower_rate(wrong, trials, 0.05) == pytest.approx(expected.low)


def test_counts_without_errors_show_what_their_number_allows() -> None:
    # Both upper limits are u with (1 - u)^n = 0.025.
    n, delta = 500, 1e-5
    u = 1 - 0.025 ** (1 / n)
    found = lower_bound_clopper_pearson(ErrorCounts(0, n, 0, n), delta, 0.95)
    assert found == pytest.approx(math.log((1 - delta - u) / u))
    assert lower_bound_clopper_pearson(ErrorCounts(n // 2, n, n // 2, n), delta, 0.95) == 0
    assert lower_bound_clopper_pearson(ErrorCounts(n, n, n, n), delta, 0.95) == 0


def test_either_rate_may_be_the_small_one() -> None:
    one = lower_bound_clopper_pearson(ErrorCounts(1, 1000, 500, 1000), 1e-5)
    assert one == lower_bound_clopper_pearson(ErrorCounts(500, 1000, 1, 1000), 1e-5) > 3


@pytest.mark.parametrize("event", [PoissonGaussian(1.0, 1.0, 1), PoissonGaussian(3.0, 1.0, 4)])
def test_the_family_of_a_gaussian_mechanism_is_the_gaussian_one(event: PoissonGaussian) -> None:
    errors = ErrorCounts(200, 1000, 250, 1000)
    gaussian = lower_bound_gaussian(errors, 1e-5)
    assert lower_bound_trade_off(errors, event, 1e-5) == gaussian
    nearly = PoissonGaussian(
        event.noise_multiplier, 0.999999, event.steps
    )  # through the accountant
    assert lower_bound_trade_off(errors, nearly, 1e-5) == pytest.approx(gaussian, rel=0.02)


def test_the_family_bound_of_true_rates_is_the_claim() -> None:
    # Expected errors of the best test of one subsampled step, with so many trials that limits are
    # the rates.
    sigma, q, n = 0.8, 0.3, 10**7
    event = PoissonGaussian(sigma, q, 1)
    threshold = 1.0
    wrong = stats.norm.sf(threshold)
    missed = (1 - q) * stats.norm.cdf(threshold) + q * stats.norm.cdf(threshold - 1 / sigma)
    errors = ErrorCounts(round(wrong * n), n, round(missed * n), n)
    found = lower_bound_trade_off(errors, event, 1e-5)
    assert 0.97 * epsilon(event, 1e-5) <= found <= epsilon(event, 1e-5)
    # Twice the rate leaves errors that no noise multiplier near the claimed one allows.
    doubled = ErrorCounts(errors.false_positives, n, round((missed - q * 0.5) * n), n)
    assert lower_bound_trade_off(doubled, event, 1e-5) > epsilon(event, 1e-5)


@pytest.mark.statistical
def test_bounds_exceed_the_truth_no_more_often_than_stated() -> None:
    # 4000 audits of 300 + 300 runs at confidence 0.9. Exceeding has probability at most 0.1 an
    # audit; more than 460 of 4000 then has probability below 1e-3. Seeds are fixed.
    draws, mu, delta, trials, audits = np.random.default_rng(0), 1.0, 1e-3, 300, 4000
    truth = gaussian_epsilon(mu, delta)
    rate = float(stats.norm.cdf(-mu / 2))
    wrong, missed = draws.binomial(trials, rate, (2, audits))
    pairs, counts = np.unique(np.stack([wrong, missed]), axis=1, return_counts=True)
    above = {"gaussian": 0, "counts": 0}
    for (a, b), times in zip(pairs.T, counts, strict=True):
        errors = ErrorCounts(int(a), trials, int(b), trials)
        above["gaussian"] += times * (lower_bound_gaussian(errors, delta, 0.9) > truth)
        above["counts"] += times * (lower_bound_clopper_pearson(errors, delta, 0.9) > truth)
    assert above["gaussian"] <= 460 and above["counts"] <= 460
    assert above["gaussian"] > 0  # the bound is not vacuous


def test_delta_counts_against_the_bound() -> None:
    errors = ErrorCounts(0, 1000, 100, 1000)
    assert lower_bound_clopper_pearson(errors, 0.5) < lower_bound_clopper_pearson(errors, 1e-5)
    assert delta_of(PoissonGaussian(1.0, 1.0, 1), 1.0) > 0


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((1, 0, 0, 5), "absent=0"),
        ((6, 5, 0, 5), "false_positives=6"),
        ((0, 5, -1, 5), "false_negatives=-1"),
        ((0.5, 5, 0, 5), "false_positives=0.5"),
    ],
)
def test_impossible_counts_are_refused(counts: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ErrorCounts(*counts)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 1.5, math.nan])
def test_a_confidence_outside_zero_and_one_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        lower_bound_gaussian(ErrorCounts(1, 5, 1, 5), 1e-5, confidence)


@pytest.mark.parametrize("limit", [0.4, 0.99, 1.0, 1.3, 2.9])
def test_the_epsilon_is_that_of_a_noise_multiplier_which_is_refuted(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The search ends between one that is refuted and one that is not: more noise, less epsilon.
    monkeypatch.setattr(
        bounds, "trade_off", lambda event, *_: [float(event.noise_multiplier > limit)]
    )
    monkeypatch.setattr(bounds, "epsilon", lambda event, delta: event.noise_multiplier)
    counts = bounds.ErrorCounts(10, 1000, 10, 1000)
    found = bounds.lower_bound_trade_off(counts, PoissonGaussian(1.0, 0.1, 10), 1e-5)
    assert limit < found <= limit * 1.006


def test_all_noise_of_the_family_grows_by_one_factor() -> None:
    # Mutant: that of numbers beside stays as it is, so less noise on the gradients seems likely.
    event = PoissonGaussian(2.0, 0.5, 3, beside=(SideRelease("n", 3.0),))
    found = bounds._with_noise(event, 1.0)
    assert (found.noise_multiplier, found.beside) == (1.0, (SideRelease("n", 1.5),))
