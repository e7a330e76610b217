"""The best of a random number of runs: the accountant's epsilon against the release itself, worked
out by quadrature and drawn, and against the bound of Papernot and Steinke (2022).

One run is a Gaussian release y, N(0, 1) or N(mu, 1), and its score is y or -y: the release of the
best has the density q(y) f'(p(y)), f the generating function of the number of runs.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from quietgrad.accounting import (
    RunCount,
    epsilon,
    selected_epsilon,
    selected_noise_multiplier,
)
from quietgrad.accounting.selection import counts
from quietgrad.accounting.selection.epsilon import _offset
from quietgrad.events import EventSequence, PoissonGaussian, RandomizedClipping, SideRelease

LAWS = [
    RunCount(3.0, 0.0),
    RunCount(10.0, 0.0),
    RunCount(10.0, 0.5),
    RunCount(2.0, 1.0),
    RunCount(10.0, 1.0),
    RunCount(30.0, 1.0),
    RunCount(10.0, 5.0),
    RunCount(0.7, math.inf),
    RunCount(10.0, math.inf),
]
GRID = np.linspace(-14.0, 14.0, 14_001)


def named(law: RunCount) -> str:
    return f"mean {law.mean:g}, shape {law.shape:g}"


@cache
def chances_of(law: RunCount) -> list[float]:
    """Of 0, 1, 2, ..., as far as they count."""
    reach = 4 * law.mean + 60 if law.poisson else 100 * law.mean / (1 + law.shape) + 60
    return [law.probability(k) for k in range(int(reach))]


def slope(law: RunCount, p: np.ndarray) -> np.ndarray:
    """f' by its series, from the probabilities."""
    total = np.zeros_like(p)
    for k, chance in reversed(list(enumerate(chances_of(law)))[1:]):  # Horner
        total = total * p + k * chance
    return total


def exact_delta(law: RunCount, mus: list[tuple[float, float]], eps: float) -> float:
    """Largest hockey-stick divergence, over both directions and both orders of scores, of the best
    run; which of the candidates (noise, moved or not, as (mean with, deviation)) it is, is seen.
    """
    worst = 0.0
    for order in (1.0, -1.0):
        densities = {}
        for moved in (0.0, 1.0):
            parts = [stats.norm(moved * mu, s) for mu, s in mus]
            p = np.mean([d.cdf(GRID) if order > 0 else d.sf(GRID) for d in parts], axis=0)
            steep = slope(law, p)
            densities[moved] = [d.pdf(GRID) * steep / len(parts) for d in parts]
        for a, b in ((0.0, 1.0), (1.0, 0.0)):
            gaps = [
                np.maximum(x - math.exp(eps) * y, 0.0)
                for x, y in zip(densities[a], densities[b], strict=True)
            ]
            worst = max(worst, sum(float(np.trapezoid(gap, GRID)) for gap in gaps))
    return worst


@pytest.mark.parametrize("law", LAWS, ids=named)
def test_probabilities_sum_to_one_and_have_the_mean(law: RunCount) -> None:
    chances = chances_of(law)
    assert sum(chances) == pytest.approx(1, abs=1e-12)
    assert sum(k * chance for k, chance in enumerate(chances)) == pytest.approx(law.mean)
    assert law.steepest == pytest.approx(law.mean)
    assert (chances[0] > 0) == law.poisson


@pytest.mark.parametrize("law", LAWS, ids=named)
def test_draws_follow_the_law(law: RunCount, monkeypatch: pytest.MonkeyPatch) -> None:
    known = random.Random(5)
    monkeypatch.setattr(counts.random, "SystemRandom", lambda: known)
    drawn = np.bincount([law.draw() for _ in range(20_000)])
    chances = np.array(chances_of(law))
    last = int(np.searchsorted(np.cumsum(chances), 0.99))
    seen = np.append(drawn[:last], drawn[last:].sum())
    wanted = np.append(chances[:last], 1 - chances[:last].sum()) * 20_000
    assert np.all(seen[wanted == 0] == 0)
    kept = wanted > 0
    # Fails for a right draw with probability 1e-6.
    assert stats.chisquare(seen[kept], wanted[kept]).pvalue > 1e-6


@pytest.mark.parametrize("law", [RunCount(1e4, 100.0), RunCount(500.0, math.inf)], ids=named)
def test_draws_of_the_largest_laws(law: RunCount) -> None:
    """No underflow makes the number certain."""
    drawn = {law.draw() for _ in range(12)}
    assert len(drawn) > 3 and all(0.4 * law.mean < number < 2 * law.mean for number in drawn)


@pytest.mark.grid(9, "laws of the number of runs times events")
@pytest.mark.parametrize("sigma", [0.6, 1.5, 5.0])
@pytest.mark.parametrize("law", LAWS, ids=named)
def test_no_release_exceeds_the_bound(law: RunCount, sigma: float) -> None:
    run = PoissonGaussian(sigma, 1.0, 1)
    for delta in (1e-2, 1e-5):
        bound = selected_epsilon(run, law, delta)
        assert exact_delta(law, [(1 / sigma, 1.0)], bound) <= delta
        # Not by being empty: the true epsilon is above a run's own, and not far below the bound.
        if law.mean >= 3:
            assert bound > epsilon(run, delta)
            assert exact_delta(law, [(1 / sigma, 1.0)], bound / 3) > delta


@pytest.mark.grid(9, "laws of the number of runs times events")
@pytest.mark.parametrize("sigma", [0.6, 1.5, 5.0])
@pytest.mark.parametrize("law", LAWS, ids=named)
def test_the_bound_is_its_formula(law: RunCount, sigma: float) -> None:
    """Worked out anew: c is the largest log ratio of f' at p and p', over the Gaussian's trade-off
    curve, and m times the run's delta at the bound without c is delta.
    """
    mu = 1 / sigma
    better = np.linspace(-12.0, 12.0, 20_001)  # quantiles of the chance of a better run
    steep, moved = slope(law, stats.norm.sf(better)), slope(law, stats.norm.sf(better + mu))
    c = float(np.max(np.log(steep) - np.log(moved)))
    for delta in (1e-2, 1e-5):
        e = selected_epsilon(PoissonGaussian(sigma, 1.0, 1), law, delta) - c
        own = stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)
        assert law.mean * own == pytest.approx(delta, rel=0.03)


@pytest.mark.parametrize(
    "law", [RunCount(10.0, 0.0), RunCount(10.0, 1.0), RunCount(10.0, math.inf)]
)
def test_a_run_alone_is_too_little(law: RunCount) -> None:
    """The tests can fail: choosing has a price."""
    run = PoissonGaussian(1.0, 1.0, 1)
    assert exact_delta(law, [(1.0, 1.0)], epsilon(run, 1e-3)) > 5e-3


@pytest.mark.parametrize("law", LAWS, ids=named)
def test_candidates_that_differ(law: RunCount) -> None:
    """Two noises drawn by a fair coin: the bound is of the mixture, below that of the worse one."""
    runs = [PoissonGaussian(1.0, 1.0, 1), PoissonGaussian(4.0, 1.0, 1)]
    for delta in (1e-2, 1e-4):
        both = selected_epsilon(runs, law, delta)
        each = [selected_epsilon(run, law, delta) for run in runs]
        assert each[1] < both < each[0]
        assert exact_delta(law, [(1.0, 1.0), (1.0, 4.0)], both) <= delta
        assert selected_epsilon([runs[0]] * 3, law, delta) == each[0]


@pytest.mark.statistical
@pytest.mark.parametrize("law", [RunCount(6.0, 0.0), RunCount(6.0, 1.0), RunCount(6.0, math.inf)])
def test_drawn_releases_stay_within_it(law: RunCount) -> None:
    """Three subsampled steps; the score is their sum, or its negative. For sets of outcomes that a
    score above a threshold makes, P(S) - e^eps P'(S) is at most delta: five standard errors.
    """
    draws, rng = 60_000, np.random.default_rng(3)
    run = PoissonGaussian(0.8, 0.5, 3)
    chances = np.array(chances_of(law)[:400])
    best: dict[tuple[int, bool], np.ndarray] = {}
    for moved in (False, True):
        number = rng.choice(chances.size, size=draws, p=chances / chances.sum())
        tops = {1: np.full(draws, -np.inf), -1: np.full(draws, -np.inf)}
        for k in range(number.max()):
            score = rng.normal(0, 0.8, (draws, 3)).sum(1)
            if moved:
                score += (rng.random((draws, 3)) < 0.5).sum(1)
            live = number > k
            for sign, top in tops.items():
                top[live] = np.maximum(top[live], sign * score[live])
        best |= {(sign, moved): top for sign, top in tops.items()}
    found = []
    for delta in (0.1, 0.02):
        eps, alone = selected_epsilon(run, law, delta), epsilon(run, delta)
        for sign in (1, -1):
            for a, b in ((False, True), (True, False)):
                first, second = best[sign, a], best[sign, b]
                ends = np.quantile(first, np.linspace(0.01, 0.99, 99))
                for inside in (lambda x, t: x > t, lambda x, t: x <= t):
                    p = np.array([inside(first, t).mean() for t in ends])
                    other = np.array([inside(second, t).mean() for t in ends])
                    error = np.sqrt((p + math.exp(2 * eps) * other) / draws)
                    assert np.all(p - math.exp(eps) * other <= delta + 5 * error)
                    found.append(np.max(p - math.exp(alone) * other) - delta)
    assert max(found) > 0.02  # a run's own epsilon is exceeded


@pytest.mark.parametrize("law", LAWS, ids=named)
def test_against_the_renyi_bound(law: RunCount) -> None:
    """dp-accounting's, the theorems of the paper. Both are upper bounds; this one is tighter
    for such runs, and above a run's own epsilon.
    """
    run = PoissonGaussian(2.0, 0.05, 200)
    if law.mean < 1:
        return  # not offered there
    accountant = RdpAccountant()
    step = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0))
    whole = dp_accounting.SelfComposedDpEvent(step, 200)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(whole, law.mean, law.shape))
    renyi = accountant.get_epsilon(1e-5)
    assert epsilon(run, 1e-5) < selected_epsilon(run, law, 1e-5) < renyi


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 5.0])
def test_pure_epsilon_costs_two_plus_shape(shape: float) -> None:
    """Corollary 3 of the paper: a run of epsilon e costs (2 + eta) e, one of them its own."""

    class Pure:
        def delta(self, eps: float) -> float:
            return max(0.0, (1 - math.exp(eps - 0.7)) * 0.5)

    profile: Any = Pure()
    assert _offset(profile, RunCount(1e4, shape)) <= 0.7 * (1 + shape) * (1 + 1e-9)
    assert _offset(profile, RunCount(1e4, shape)) > 0.69 * (1 + shape)
    assert _offset(profile, RunCount(1.0, shape)) == 0


@pytest.mark.parametrize("law", [RunCount(10.0), RunCount(10.0, math.inf)], ids=named)
def test_every_plan_is_counted(law: RunCount) -> None:
    """Bands are fewer compositions at a higher rate; a sketch and a side release cost more; phases
    compose.
    """
    plain = PoissonGaussian(1.5, 0.01, 120)
    of = lambda event: selected_epsilon(event, law, 1e-5)  # noqa: E731
    banded = PoissonGaussian(1.5, 0.01, 120, bands=4)
    assert of(banded) == pytest.approx(of(PoissonGaussian(1.5, 0.04, 30)), rel=1e-6)
    sketched = PoissonGaussian(1.5, 0.01, 120, RandomizedClipping(32))
    beside = PoissonGaussian(1.5, 0.01, 120, beside=(SideRelease("loss", 6.0),))
    assert of(plain) < of(sketched) < math.inf and of(plain) < of(beside)
    halves = (PoissonGaussian(1.5, 0.01, 60), PoissonGaussian(1.5, 0.01, 60))
    assert of(EventSequence(halves)) == pytest.approx(of(plain), rel=1e-3)
    assert of(plain) > epsilon(plain, 1e-5)


def test_one_run_always_costs_what_it_costs() -> None:
    run = PoissonGaussian(1.0, 0.01, 500)
    assert selected_epsilon(run, RunCount(1.0), 1e-5) == pytest.approx(epsilon(run, 1e-5), rel=1e-6)


@pytest.mark.parametrize("shape", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("more", [2e-16, 1e-13, 1e-11, 1e-9])
def test_hardly_more_than_one_run_is_a_law_too(more: float, shape: float) -> None:
    law = RunCount(1 + more, shape)
    assert 1 <= law.steepest <= 1 + 2 * more and law.draw() == 1
    event = PoissonGaussian(1.0, 1.0, 1)
    one = selected_epsilon(event, RunCount(1.0), 1e-5)
    assert one <= selected_epsilon(event, law, 1e-5) <= one + 0.1


@pytest.mark.parametrize("law", [RunCount(20.0), RunCount(5.0, math.inf)], ids=named)
def test_calibration_meets_the_target(law: RunCount) -> None:
    sigma = selected_noise_multiplier(3.0, 1e-5, law, sample_rate=0.02, steps=300, bands=3)
    found = selected_epsilon(PoissonGaussian(sigma, 0.02, 300, bands=3), law, 1e-5)
    assert 2.99 < found <= 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5,), "mean=0.5"),
        ((0.0, math.inf), "mean"),
        ((math.nan,), "mean"),
        ((1e6,), "at most 10000 runs"),
        ((501.0, math.inf), "at most 500 runs"),
        ((3.0, -1.0), "shape=-1.0"),
        ((3.0, math.nan), "shape=nan"),
        ((3.0, 1e3), "shape=1000.0"),
    ],
)
def test_refused_laws(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunCount(*arguments)


def test_refused_requests() -> None:
    run = PoissonGaussian(1.0, 0.01, 10)
    with pytest.raises(ValueError, match="no candidate"):
        selected_epsilon([], RunCount(3.0), 1e-5)
    with pytest.raises(ValueError, match="delta"):
        selected_epsilon(run, RunCount(3.0), 0.0)
    with pytest.raises(ValueError, match="target_epsilon"):
        selected_noise_multiplier(0.0, 1e-5, RunCount(3.0), sample_rate=0.1, steps=10)
