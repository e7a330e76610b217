"""The smallest noise multiplier that keeps an event within a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from scipy import optimize

from quietgrad.accounting.phases import grouped
from quietgrad.accounting.spending import epsilon as epsilon_of
from quietgrad.checks import as_plain, require_delta, require_positive
from quietgrad.events import (
    ClippingClaim,
    EventSequence,
    ExactClipping,
    PoissonGaussian,
    PrivacyEvent,
    SideRelease,
)

SMALLEST_MULTIPLIER = 1e-2
LARGEST_MULTIPLIER = 1e6
# Calibration ends within this of the target epsilon (absolute, and relative for small targets).
EPSILON_TOLERANCE = 4e-4
COARSE_SHARE = 0.2  # of the groups that many unlike phases are composed in
USUAL_POWER = 1.3
LARGEST_REFINEMENT = 8


def noise_multiplier(
    target_epsilon: float,
    target_delta: float,
    *,
    sample_rate: float,
    steps: int,
    clipping: ClippingClaim | None = None,
    bands: int = 1,
    before: PrivacyEvent | None = None,
    beside: Callable[[float], tuple[SideRelease, ...]] | None = None,
) -> float:
    """Smallest noise multiplier found with epsilon at most the target.

    Args:
        target_epsilon: above 0.
        target_delta: in (0, 1).
        sample_rate: q = expected batch size over number of records.
        steps: T.
        clipping: exact (default) or randomized.
        bands: b, 1 for independent noise.
        before: what was already released on the same data; the target covers both.
        beside: sigma -> what is released beside the gradients, of the same batches; the target
            covers it too.

    Returns:
        sigma with ``epsilon(event with sigma) <= target_epsilon``, and within 1e-2 of it.

    Raises:
        ValueError: for bad arguments, or where no noise multiplier up to 1e6 meets the target, such
            as where what is released beside the gradients costs more by itself.
    """
    require_positive("target_epsilon", target_epsilon)
    require_delta("target_delta", target_delta)
    template = PoissonGaussian(1.0, sample_rate, steps, clipping or ExactClipping(), bands)

    def event(sigma: float) -> PrivacyEvent:
        side = () if beside is None else beside(sigma)
        phase = replace(template, noise_multiplier=sigma, beside=side)
        if before is None:
            return phase
        earlier = before.events if isinstance(before, EventSequence) else (before,)
        return EventSequence((*earlier, phase))

    return calibrate(lambda sigma: epsilon_of(event(sigma), target_delta), target_epsilon)


def calibrate(epsilon_at: Callable[[float], float], target_epsilon: float) -> float:
    """Solves epsilon_at(sigma) <= target for the smallest sigma, epsilon_at decreasing.

    Works on log sigma against log epsilon, where the curve is nearly straight, and returns the side
    that meets the target.
    """
    target_epsilon = as_plain(target_epsilon)  # what is compared with a short float is rounded
    tolerance = min(EPSILON_TOLERANCE, 4e-4 * target_epsilon)
    seen: dict[float, float] = {}

    def excess(log_sigma: float) -> float:
        value = epsilon_at(math.exp(log_sigma))
        seen[log_sigma] = value
        # Bounded, so that infinite epsilons still bracket; zero epsilons sit far below.
        return min(math.log(max(value, 1e-12) / target_epsilon), 50.0)

    low = high = 0.0
    step = 0.5
    value = excess(0.0)
    while value > 0:
        low = high
        high = min(high + step, math.log(LARGEST_MULTIPLIER))
        step = min(2 * step, max(0.3, value))
        value = excess(high)
        if value > 0 and high >= math.log(LARGEST_MULTIPLIER):
            raise ValueError(
                f"target_epsilon={target_epsilon} is not met by any noise multiplier up to "
                f"{LARGEST_MULTIPLIER:g}; allow a larger "
                "epsilon or delta, fewer steps, a smaller sampling rate, with sketches a larger "
                "sketch_dim, or more noise on what is released beside the gradients"
            )
    if low == high:
        while value <= 0:
            high = low
            low -= step
            step *= 2
            if low < math.log(SMALLEST_MULTIPLIER):
                if excess(math.log(SMALLEST_MULTIPLIER)) <= 0:
                    return SMALLEST_MULTIPLIER
                low = math.log(SMALLEST_MULTIPLIER)
                break
            value = excess(low)
    # A target slightly inside the wanted one, so that the root itself already meets it.
    shift = math.log1p(-tolerance / (2 * target_epsilon))
    root_tolerance = -shift / 8
    if excess_of(seen[high], target_epsilon) <= shift:
        optimize.brentq(
            lambda x: excess(x) - shift, low, high, xtol=root_tolerance, rtol=1e-12, maxiter=60
        )
    meeting = [x for x, e in seen.items() if e <= target_epsilon]
    return math.exp(min(meeting))


def calibrate_by_groups(
    event_at: Callable[[float], PrivacyEvent], delta: float, target_epsilon: float
) -> float:
    """As ``calibrate`` of the event's epsilon, for events of many unlike phases, whose epsilon is
    costly: a bound by a few groups is solved first, and meets the target; the full one then takes
    back what that gave away, in a few evaluations.
    """

    def coarse(scale: float) -> float:
        event = event_at(scale)
        if isinstance(event, EventSequence):
            event = EventSequence(grouped(event.events, COARSE_SHARE))
        return epsilon_of(event, delta)

    def full(scale: float) -> float:
        return epsilon_of(event_at(scale), delta)

    target_epsilon = as_plain(target_epsilon)
    scale = calibrate(coarse, target_epsilon)
    tolerance = min(EPSILON_TOLERANCE, 4e-4 * target_epsilon)
    wanted = target_epsilon - tolerance / 2
    meeting, value, power = [], full(scale), USUAL_POWER
    for _ in range(LARGEST_REFINEMENT):
        meeting += [scale] if value <= target_epsilon else []
        if target_epsilon - tolerance <= value <= target_epsilon or not 0 < value < math.inf:
            break
        other = scale * (value / wanted) ** (1 / power)
        found = full(other)
        if 0 < found < math.inf and found != value:  # epsilon goes like scale^-power
            power = min(max(math.log(found / value) / math.log(scale / other), 0.2), 5.0)
        scale, value = other, found
    return min(meeting) if meeting else calibrate(full, target_epsilon)


def excess_of(epsilon: float, target: float) -> float:
    return math.log(max(epsilon, 1e-12) / target)
