"""The bound of one run: the paper's own number, a brute-force reading of the theorem, and
mechanisms whose epsilon and delta are known.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from quietgrad.auditing import lower_bound_one_run, p_value_one_run
from quietgrad.auditing.bounds.guessing import count_correct


def test_the_papers_example() -> None:
    # Appendix D of the paper: 75 of 100 guesses right, 1000 canaries, delta 1e-4, 95 %.
    assert lower_bound_one_run(75, 100, 1000, 1e-4, 0.95) == pytest.approx(0.673, abs=1e-3)


@pytest.mark.parametrize(
    ("correct", "guesses", "canaries"), [(9, 10, 10), (30, 40, 200), (1, 3, 5), (3, 3, 3)]
)
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_the_theorem_term_by_term(
    correct: int, guesses: int, canaries: int, epsilon: float
) -> None:
    delta = 1e-4
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [
        math.comb(guesses, k) * right**k * (1 - right) ** (guesses - k) for k in range(guesses + 1)
    ]
    gain = max(sum(mass[correct - i : correct]) / i for i in range(1, correct + 1))
    expected = sum(mass[correct:]) + canaries * delta * min(2 * gain, 1)
    assert p_value_one_run(correct, guesses, canaries, epsilon, delta) == pytest.approx(
        min(expected, 1), rel=1e-9
    )
    without = p_value_one_run(correct, guesses, canaries, epsilon, 0.0)
    assert without == pytest.approx(sum(mass[correct:]), rel=1e-9)


def test_what_the_bound_grows_with() -> None:
    bounds = [lower_bound_one_run(v, 100, 1000, 1e-5) for v in (50, 60, 70, 80, 90, 100)]
    assert bounds == sorted(bounds) and bounds[0] == 0 < bounds[2]
    assert lower_bound_one_run(80, 100, 1000, 1e-3) < lower_bound_one_run(80, 100, 1000, 1e-6)
    assert lower_bound_one_run(80, 100, 1000, 1e-5, 0.999) < lower_bound_one_run(
        80, 100, 1000, 1e-5, 0.9
    )
    assert lower_bound_one_run(0, 0, 10, 1e-5) == 0


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomized_response_is_found_out_but_not_slandered(epsilon: float) -> None:
    # Each coin is told truly with probability e^eps / (1 + e^eps): exactly eps. 20000 runs at
    # confidence 0.9; more than 2150 above the truth has probability below 1e-3.
    m, runs = 400, 20_000
    draws = np.random.default_rng(1)
    correct = draws.binomial(m, math.exp(epsilon) / (1 + math.exp(epsilon)), runs)
    values, counts = np.unique(correct, return_counts=True)
    found = np.array([lower_bound_one_run(int(v), m, m, 0.0, 0.9) for v in values])
    assert counts[found > epsilon].sum() <= 2150
    assert np.average(found, weights=counts) > epsilon - 0.25


@pytest.mark.statistical
@pytest.mark.parametrize("together", [1, 10, 60])
def test_giving_coins_away_with_probability_delta_is_covered(together: int) -> None:
    """With probability m delta / i some i coins are given away, each with probability delta: (eps,
    delta) exactly, and the law that the theorem's last term is about.
    """
    m, epsilon, delta, confidence, runs = 60, 0.5, 2e-3, 0.9, 40_000
    draws = np.random.default_rng(2)
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    told = draws.random(runs) < m * delta / together
    correct = np.where(
        told, together + draws.binomial(m - together, right, runs), draws.binomial(m, right, runs)
    )
    values, counts = np.unique(correct, return_counts=True)
    above = sum(
        int(n)
        for v, n in zip(values, counts, strict=True)
        if lower_bound_one_run(int(v), m, m, delta, confidence) > epsilon
    )
    assert above <= 4190  # 4000 expected at most; more has probability below 1e-3
    if together == 60:  # and without the term it is not covered where confidence is asked for
        no_term = sum(
            int(n)
            for v, n in zip(values, counts, strict=True)
            if lower_bound_one_run(int(v), m, m, 0.0, 0.999) > epsilon
        )
        assert no_term > 65  # 40 allowed


def test_guesses_are_the_ends_of_the_order() -> None:
    order = np.random.default_rng(0)
    scores = np.array([5.0, 1.0, 3.0, 2.0, 4.0])
    included = np.array([True, False, True, True, False])
    assert count_correct(scores, included, 1, 1, order) == 2
    assert count_correct(scores, included, 2, 2, order) == 2  # 5 right, 4 wrong; 1 right, 2 wrong
    assert count_correct(scores, included, 0, 2, order) == 1
    assert count_correct(scores, included, 5, 0, order) == 3
    with pytest.raises(ValueError, match="exceed the 5 canaries"):
        count_correct(scores, included, 3, 3, order)


@pytest.mark.statistical
def test_ties_are_broken_by_chance() -> None:
    # Scores that say nothing must not be turned into knowledge by the order of the records:
    # Binomial(4000, 1/2) is within 200 of 2000 but for probability 3e-10.
    included = np.arange(4000) < 2000
    right = count_correct(np.zeros(4000), included, 2000, 2000, np.random.default_rng(3))
    assert abs(right - 2000) < 200
    assert stats.binom.sf(2200, 4000, 0.5) < 1e-9


@pytest.mark.parametrize(
    ("counts", "delta", "message"),
    [
        ((5, 4, 10), 1e-5, "correct=5"),
        ((1, 20, 10), 1e-5, "guesses=20"),
        ((1, 2, 3), 1.0, "delta=1.0"),
    ],
)
def test_impossible_guesses_are_refused(
    counts: tuple[int, int, int], delta: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lower_bound_one_run(*counts, delta)
