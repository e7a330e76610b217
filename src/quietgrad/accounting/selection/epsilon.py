"""What it costs to make a random number of runs and to release the best one alone.

Let Q be one run with everything that the choice looks at, d(e) its delta at epsilon e, and K the
number of runs, f(x) = E[x^K]. With a total order of outcomes (ties broken at random) the release
has the density Q(y) f'(p), p the probability that a run is no better than y, averaged over the
tie. For a neighbour write Q', p'. Then for every e, with m = E[K] = f'(1), the largest value of f':

    delta of the release at (e + c)  <=  m d(e),  if f'(p) <= exp(c) f'(p') for all y:

where Q exceeds exp(e) Q', what exceeds it has mass at most d(e), times f' <= m; the rest is
exp(e) Q'(y) f'(p) <= exp(e + c) Q'(y) f'(p').

*Truncated negative binomial.* f'(p) is proportional to u^-(eta + 1), u = g + (1 - g)(1 - p), and
1 - p, the probability of a better run, obeys 1 - p' <= exp(h) (1 - p) + d(h) for every h. So
u' <= exp(h) u + (1 - g) d(h) - g (exp(h) - 1) <= exp(h) u once (1 - g) d(h) <= g (exp(h) - 1), and
c = (eta + 1) h for the smallest such h. (No h gives a smaller ratio for all u at once.) *Poisson.*
f'(p) is proportional to exp(m p), p - p' <= d(0), and c = m d(0).

For pure epsilon this is (2 + eta) epsilon, Corollary 3 of Papernot and Steinke (2022); the form
with the whole of d is after A. Koskela, R. Redberg and Y.-X. Wang, Privacy Profiles for Private
Selection, 2024. It needs no Renyi moments, so it holds for randomized clipping too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quietgrad.accounting.calibrate import calibrate
from quietgrad.accounting.composition import ComposedEvent, compose
from quietgrad.accounting.selection.counts import RunCount
from quietgrad.accounting.spending import TAIL_SHARES, power_of_ten
from quietgrad.checks import as_plain, require_delta, require_positive
from quietgrad.events import (
    ClippingClaim,
    ExactClipping,
    PoissonGaussian,
    PrivacyEvent,
    SideRelease,
)

HALVINGS = 50


def selected_epsilon(
    runs: PrivacyEvent | Sequence[PrivacyEvent], count: RunCount, delta: float
) -> float:
    """Epsilon of a whole tuning: a number of runs is drawn, each run's settings are drawn uniformly
    from the candidates, and only the best run is released.

    Args:
        runs: what one run of each candidate releases; one event where all are alike. A run's score
            must follow from what it releases and public data.
        count: the law of the number of runs. The number itself must stay secret.
        delta: of the whole, in (0, 1).

    Returns:
        An upper bound at least 0; infinity where no finite one can be shown.

    Raises:
        ValueError: for delta outside (0, 1), or no candidate.
    """
    require_delta("delta", delta)
    delta = as_plain(delta)
    candidates = Counter((runs,) if isinstance(runs, PrivacyEvent) else tuple(runs))
    if not candidates:
        raise ValueError("runs=() holds no candidate; give the event of one run of each")
    best = math.inf
    for share in TAIL_SHARES:
        tail = power_of_ten(share * delta / max(count.steepest, 1.0))
        parts = [(compose(event, tail_mass=tail), n) for event, n in candidates.items()]
        profile = _Profile(parts)
        best = min(best, profile.epsilon(delta / count.steepest) + _offset(profile, count))
        limited = any(part.discretisation.range_limited for part, _ in parts)
        if not limited and math.isfinite(best):
            break
    return best


def selected_noise_multiplier(
    target_epsilon: float,
    target_delta: float,
    count: RunCount,
    *,
    sample_rate: float,
    steps: int,
    clipping: ClippingClaim | None = None,
    bands: int = 1,
    beside: Callable[[float], tuple[SideRelease, ...]] | None = None,
) -> float:
    """Smallest noise multiplier found for every run, with epsilon of the whole tuning at most the
    target.

    Args:
        target_epsilon: above 0, of the whole.
        target_delta: in (0, 1), of the whole.
        count: the law of the number of runs.
        sample_rate, steps, clipping, bands, beside: of one run, as for ``noise_multiplier``.

    Returns:
        sigma with ``selected_epsilon(event with sigma, count, delta) <= target_epsilon``.

    Raises:
        ValueError: for bad arguments, or where no noise multiplier up to 1e6 meets the target.
    """
    require_positive("target_epsilon", target_epsilon)
    require_delta("target_delta", target_delta)
    template = PoissonGaussian(1.0, sample_rate, steps, clipping or ExactClipping(), bands)

    def whole(sigma: float) -> float:
        side = () if beside is None else beside(sigma)
        event = replace(template, noise_multiplier=sigma, beside=side)
        return selected_epsilon(event, count, target_delta)

    return calibrate(whole, target_epsilon)


@dataclass(frozen=True)
class _Profile:
    """Delta of one run at every epsilon, its candidate drawn uniformly: the mean of the candidates'
    (which one was drawn is part of the outcome).
    """

    parts: Sequence[tuple[ComposedEvent, int]]

    def delta(self, epsilon: float) -> float:
        total = sum(n for _, n in self.parts)
        return sum(n * part.delta(epsilon) for part, n in self.parts) / total

    def epsilon(self, delta: float) -> float:
        """An epsilon >= 0 whose delta is at most this; near the smallest."""
        each = [part.epsilon(delta) for part, _ in self.parts]
        low, high = min(each), max(each)
        if low == high or (math.isinf(high) and self.delta(_largest(self.parts)) > delta):
            return high
        high = min(high, _largest(self.parts))
        return _smallest(lambda e: self.delta(e) <= delta, low, high)


def _offset(profile: _Profile, count: RunCount) -> float:
    """c: the logarithm of the largest ratio of f' at p and p'."""
    if count.poisson:
        return count.mean * profile.delta(0.0)
    x = count.log_odds  # at h = x the condition is d(h) <= 1
    better, halt = -math.expm1(-x), math.exp(-x)
    return (count.shape + 1) * _smallest(
        lambda h: better * profile.delta(h) <= halt * math.expm1(h), 0.0, x
    )


def _largest(parts: Sequence[tuple[ComposedEvent, int]]) -> float:
    """Above it delta is constant."""
    return max(float(loss.losses[-1]) for part, _ in parts for loss in (part.remove, part.add))


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Near the smallest argument from which on a condition holds, on the side where it does; it
    holds at ``high``.
    """
    if holds(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
