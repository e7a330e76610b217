"""How many guesses to make in one run, and at which thresholds to count errors: decided from the
plan alone, before any score is seen, so that the choice costs no confidence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quietgrad.auditing.bounds.errors import ErrorCounts
from quietgrad.auditing.bounds.guessing import count_correct, lower_bound_one_run
from quietgrad.auditing.bounds.thresholds import QUANTILES, errors_at
from quietgrad.auditing.scores.whitening import log_likelihood_ratio
from quietgrad.events import EventSequence, PrivacyEvent

SIMULATED = 200_000  # canaries,
DRAWS = 8_000_000  # or as many as give so many draws
FEWEST_SIMULATED = 5_000
SHARES = np.geomspace(0.01, 1.0, 16)


def simulated_scores(
    event: PrivacyEvent, count: int, draws: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[count] log-likelihood ratios of gradient canaries in the claimed mechanism with exact
    clipping, and their coins.
    """
    included = draws.random(count) < 0.5
    scores = np.zeros(count)
    for phase in event.events if isinstance(event, EventSequence) else (event,):
        mu, rate = 1 / phase.noise_multiplier, phase.participation_rate
        for _ in range(phase.compositions):
            taken = included & (draws.random(count) < rate)
            seen = draws.standard_normal(count) + mu * taken
            scores += log_likelihood_ratio(mu * seen, np.full(count, mu**2), rate)
    return scores, included


def number_of_guesses(
    event: PrivacyEvent, canaries: int, delta: float, confidence: float
) -> tuple[int, int]:
    """(k+, k-), how many of the highest scores to call in and of the lowest to call out, so that
    the bound expected of a perfect implementation is largest.

    Args:
        event: what is accounted for.
        canaries: m.
        delta, confidence: of the bound.
    """
    scores, included, draws = _expected(event)
    count = len(scores)
    best, chosen = -1.0, (canaries // 2, canaries - canaries // 2)
    for share in SHARES:
        for likely_part in (0.5, 1.0):
            guesses = max(2, round(share * canaries))
            likely = min(guesses, max(1, round(guesses * likely_part)))
            unlikely = guesses - likely
            many = (round(likely / canaries * count), round(unlikely / canaries * count))
            if sum(many) == 0 or sum(many) > count:
                continue
            accuracy = count_correct(scores, included, *many, draws) / sum(many)
            value = lower_bound_one_run(
                round(accuracy * guesses), guesses, canaries, delta, confidence
            )
            if value > best:
                best, chosen = value, (likely, unlikely)
    return chosen


def planned_threshold(
    event: PrivacyEvent, canaries: int, worth: Callable[[float, float], float], confidence: float
) -> float:
    """The threshold on a canary's log-likelihood ratio whose errors, as expected of a perfect
    implementation, are worth most.

    Args:
        event: what is accounted for.
        canaries: m, half of them in.
        worth: (false positive limit, false negative limit) -> what the bound would be.
        confidence: of the limits.
    """
    scores, included, _ = _expected(event)
    half = max(1, canaries // 2)

    def value(threshold: float) -> float:
        wrong, missed = errors_at(scores, included, threshold).rates
        return worth(
            *ErrorCounts(round(wrong * half), half, round(missed * half), half).upper_rates(
                confidence
            )
        )

    candidates = [float(c) for c in np.unique(np.quantile(scores, QUANTILES))]
    best = max(candidates, key=value)
    return best if value(best) > 0 else 0.0


def _expected(
    event: PrivacyEvent,
) -> tuple[NDArray[np.float64], NDArray[np.bool_], np.random.Generator]:
    draws = np.random.default_rng(
        0
    )  # made-up scores: nothing here is private or has to be unpredictable
    count = int(np.clip(DRAWS // event.compositions, FEWEST_SIMULATED, SIMULATED))
    return *simulated_scores(event, count, draws), draws
