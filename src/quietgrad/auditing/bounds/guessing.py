"""Auditing with one run: how many of m independent coins an attacker may guess, and what the number
says of epsilon.

Theorem (Steinke, Nasr and Jagielski 2023, Theorem 5.2 and Corollary 5.4). Let S be uniform on {-1,
+1}^m, let M be (epsilon, delta)-differentially private in each of the m coins, and let T in {-1, 0,
+1}^m be computed from M(S), with r entries that are not 0 (guesses; 0 abstains). With W binomial(r,
e^epsilon / (1 + e^epsilon)), for every v

    P[ at least v entries of T equal those of S ]  <=  P[W >= v] + 2 m delta max_{1 <= i <= v} P[v >
    W >= v - i] / i.

For delta = 0 (their Proposition 5.1): given T and S_1 .. S_(i-1), the odds of S_i are at most
e^epsilon, so one guess after the other is right with probability at most that of a coin of W. With
delta, each coin is in addition given away with probability of order delta; F is how many are, its
expectation is of order m delta, and the worst law of F puts its mass on the number i whose gain P[v
> W >= v - i] per coin is largest. Another bound, also true and smaller for large deltas: F >= 1 has
probability at most m delta, so P[W >= v] + m delta.

Why it may be applied to a run of DP-SGD: a canary is a record of its own; all other records and the
coins of their sampling are fixed, and known to the attacker, as in the definition of differential
privacy.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from quietgrad.auditing.bounds.errors import LARGEST_EPSILON, require_confidence
from quietgrad.checks import require_at_least, require_finite, require_int


def p_value_one_run(
    correct: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> float:
    """Upper bound of the probability of so many right guesses under (epsilon, delta)-differential
    privacy.

    Args:
        correct: v, right guesses.
        guesses: r, a number fixed before the scores were seen.
        canaries: m.
        epsilon: at least 0.
        delta: in [0, 1).
    """
    _require_counts(correct, guesses, canaries)
    require_finite("epsilon", epsilon)
    require_at_least("epsilon", epsilon, 0, "it is a privacy loss")
    _require_delta_or_zero(delta)
    if correct == 0:
        return 1.0
    right = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, right))
    if delta == 0:
        return min(1.0, beta)
    sizes = np.arange(1, correct + 1)
    below = np.cumsum(stats.binom.pmf(correct - sizes, guesses, right))
    gain = float((below / sizes).max())
    return min(1.0, beta + canaries * delta * min(2 * gain, 1.0))


def lower_bound_one_run(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """Largest epsilon that the guesses refute: the run is (epsilon, delta)-differentially private
    for no smaller one, with this confidence.

    Args:
        correct, guesses, canaries, delta: see ``p_value_one_run``.
        confidence: one minus the probability that a mechanism which meets its claim yields a larger
            value.

    Returns:
        At least 0; 0 where nothing is refuted.
    """
    require_confidence(confidence)
    level = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return p_value_one_run(correct, guesses, canaries, epsilon, delta) < level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if high > LARGEST_EPSILON:
            return LARGEST_EPSILON
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def count_correct(
    scores: np.ndarray, included: np.ndarray, likely: int, unlikely: int, order: np.random.Generator
) -> int:
    """Right guesses where the ``likely`` highest scores are called in and the ``unlikely`` lowest
    out. Ties are broken at random.

    Args:
        scores: [m], higher where the attack believes more in the canary's presence.
        included: [m] booleans, the coins.
        likely, unlikely: k+ and k-.
        order: breaks ties.
    """
    require_guesses(likely, unlikely, len(scores))
    ranked = np.lexsort((order.random(len(scores)), scores))
    guessed_in = included[ranked[len(scores) - likely :]] if likely else included[:0]
    return int(guessed_in.sum()) + int((~included[ranked[:unlikely]]).sum())


def require_guesses(likely: int, unlikely: int, canaries: int) -> None:
    """Refuses numbers of guesses that cannot be made: a negative one would be taken off those that
    were, and more of them would seem right.
    """
    for name, value in (("likely", likely), ("unlikely", unlikely)):
        require_int(name, value)
        require_at_least(name, value, 0, "it is a number of guesses")
    if likely + unlikely > canaries:
        raise ValueError(
            f"likely + unlikely = {likely + unlikely} guesses exceed the {canaries} canaries"
        )


def _require_counts(correct: int, guesses: int, canaries: int) -> None:
    for name, value in (("correct", correct), ("guesses", guesses), ("canaries", canaries)):
        require_int(name, value)
    if not 0 <= correct <= guesses <= canaries or canaries < 1:
        raise ValueError(
            f"correct={correct}, guesses={guesses}, canaries={canaries} must satisfy 0 <= correct "
            "<= guesses <= canaries, with at least one canary"
        )


def _require_delta_or_zero(delta: float) -> None:
    require_finite("delta", delta)
    if not 0 <= delta < 1:
        raise ValueError(f"delta={delta!r} must be in [0, 1)")
