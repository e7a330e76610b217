"""From an event to epsilon, delta and the trade-off curve.

Every value is an upper bound of the privacy loss (a lower bound, for trade-off curves) under the
add-or-remove-one-record relation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietgrad.accounting.composition import ComposedLoss, Discretisation, compose
from quietgrad.checks import as_plain, require_delta, require_finite
from quietgrad.events import EventSequence, PoissonGaussian, PrivacyEvent, RandomizedClipping

Array = NDArray[np.float64]
Direction = Literal["remove", "add"]

# Share of delta that truncation may use. The smallest serves almost always; the others are tried
# when randomized clipping with few projections stretches the range of losses so far that the grid
# had to be coarsened.
TAIL_SHARES = (1e-4, 1e-2, 0.1)
SMALLEST_TAIL = 1e-14

# Above this epsilon a sketch's tail decides, and a bound of its law in distribution may be the
# better one than a bound in the convex order: both are tried.
BOTH_ORDERS_FROM = 2.0


@dataclass(frozen=True)
class EpsilonReport:
    """An epsilon of ``event`` with the reason if it is infinite, and the discretisation that it was
    computed with.
    """

    epsilon: float
    delta: float
    event: PrivacyEvent
    discretisation: Discretisation
    reason: str | None = None


def epsilon(event: PrivacyEvent, delta: float) -> float:
    """Smallest epsilon found such that the event is (epsilon, delta)-differentially private.

    Args:
        event: what was released.
        delta: in (0, 1).

    Returns:
        An upper bound >= 0; infinity where no finite one can be shown (``epsilon_report`` says
        why).

    Raises:
        ValueError: for delta outside (0, 1).
    """
    return epsilon_report(event, delta).epsilon


def epsilon_report(event: PrivacyEvent, delta: float) -> EpsilonReport:
    """As ``epsilon``, with the discretisation used and the reason of an infinite value."""
    require_delta("delta", delta)
    return _epsilon_report(event, as_plain(delta))


@lru_cache(maxsize=1024)  # calibration and every summary ask for the same events again
def _epsilon_report(event: PrivacyEvent, delta: float) -> EpsilonReport:
    found = _report_in_order(event, delta, in_convex_order=True)
    if found.epsilon > BOTH_ORDERS_FROM and _is_in_convex_order(event):
        other = _report_in_order(event, delta, in_convex_order=False)
        return min(found, other, key=lambda report: report.epsilon)
    return found


def _is_in_convex_order(event: PrivacyEvent) -> bool:
    phases = event.events if isinstance(event, EventSequence) else (event,)
    claims = [phase.clipping for phase in phases]
    return any(isinstance(claim, RandomizedClipping) and claim.in_convex_order for claim in claims)


def _report_in_order(event: PrivacyEvent, delta: float, in_convex_order: bool) -> EpsilonReport:
    best: EpsilonReport | None = None
    for share in TAIL_SHARES:
        tail_mass = power_of_ten(share * delta)
        composed = compose(event, tail_mass=tail_mass, in_convex_order=in_convex_order)
        report = EpsilonReport(composed.epsilon(delta), delta, event, composed.discretisation)
        if best is None or report.epsilon < best.epsilon:
            best = report
        if not composed.discretisation.range_limited and math.isfinite(report.epsilon):
            break
    assert best is not None
    if math.isinf(best.epsilon):
        return EpsilonReport(
            best.epsilon, delta, event, best.discretisation, _why_infinite(event, delta)
        )
    return best


def delta(event: PrivacyEvent, epsilon: float) -> float:
    """Smallest delta found such that the event is (epsilon, delta)-differentially private.

    Args:
        event: what was released.
        epsilon: at least 0.

    Returns:
        An upper bound in [0, 1]; truncation and rounding keep it above about 1e-14 even where the
        true value is smaller.

    Raises:
        ValueError: for a negative or non-finite epsilon.
    """
    _require_epsilon(epsilon)
    epsilon = as_plain(epsilon)
    found = _delta_in_order(event, epsilon, in_convex_order=True)
    if epsilon > BOTH_ORDERS_FROM and _is_in_convex_order(event):
        return min(found, _delta_in_order(event, epsilon, in_convex_order=False))
    return found


def _delta_in_order(event: PrivacyEvent, epsilon: float, in_convex_order: bool) -> float:
    composed = compose(event, tail_mass=SMALLEST_TAIL, in_convex_order=in_convex_order)
    best = composed.delta(epsilon)
    tried = {SMALLEST_TAIL}
    # The truncations that ``epsilon`` would use for a delta of this size, so that the two undo each
    # other.
    for share in TAIL_SHARES:
        for tail_mass in (power_of_ten(share * best), power_of_ten(10 * share * best)):
            if tail_mass not in tried and (
                share == TAIL_SHARES[0] or composed.discretisation.range_limited
            ):
                tried.add(tail_mass)
                composed_again = compose(
                    event, tail_mass=tail_mass, in_convex_order=in_convex_order
                )
                best = min(best, composed_again.delta(epsilon))
    return best


def trade_off(
    event: PrivacyEvent, false_positive_rates: ArrayLike, direction: Direction | None = None
) -> Array:
    """Trade-off function: a lower bound of any attacker's false negative rate at given false
    positive rates.

    Args:
        event: what was released.
        false_positive_rates: [m], in [0, 1].
        direction: "remove" tests presence against absence of a record, "add" the reverse; None
            takes the smaller bound.

    Returns:
        [m], false negative rates in [0, 1], below the true trade-off function (f-DP, Dong et al.
        2022): each is the supremum over epsilon of max(0, 1 - delta(eps) - e^eps alpha, e^-eps (1 -
        delta(eps) - alpha)) with the deltas of that direction.
    """
    alpha = np.atleast_1d(np.asarray(false_positive_rates, dtype=np.float64))
    if np.any(~np.isfinite(alpha)) or np.any(alpha < 0) or np.any(alpha > 1):
        raise ValueError(f"false_positive_rates={false_positive_rates!r} must lie in [0, 1]")
    if direction not in (None, "remove", "add"):
        raise ValueError(
            f"direction={direction!r} is unknown; use 'remove', 'add' or None for the smaller bound"
        )
    result = np.zeros_like(alpha)
    for tail_mass in (SMALLEST_TAIL, 1e-8, 1e-5):  # each gives a bound; the best one counts
        remove, add, range_limited = _profiles(event, tail_mass)
        if direction is None:
            bound = np.minimum(_trade_off_of(remove, add, alpha), _trade_off_of(add, remove, alpha))
        elif direction == "remove":
            bound = _trade_off_of(remove, add, alpha)
        else:
            bound = _trade_off_of(add, remove, alpha)
        result = np.maximum(result, bound)
        if not range_limited:
            break
    return result


def power_of_ten(value: float) -> float:
    """The power of ten at or just below a positive value, within [1e-20, 0.1]."""
    return float(10.0 ** max(-20, min(-1, math.floor(math.log10(max(value, 1e-20)) + 1e-9))))


Profile = tuple[Array, Array]


def _trade_off_of(this: Profile, other: Profile, alpha: Array) -> Array:
    # Test the null "dataset Q" against "dataset P", where P is the upper distribution of the
    # direction's loss log P/Q. A test with false positive rate alpha = Q(S) has power P(S) <= e^eps
    # alpha + delta_direction(eps) for every real eps; negative ones follow from the other
    # direction: Q(S^c) <= e^eps P(S^c) + delta_other(eps).
    e, d = (part[:, None] for part in this)
    result = np.max(1.0 - d - np.exp(np.minimum(e, 700.0)) * alpha, axis=0)
    e, d = (part[:, None] for part in other)
    result = np.maximum(result, np.max(np.exp(-e) * (1.0 - d - alpha), axis=0))
    return np.clip(result, 0.0, 1.0)


@lru_cache(maxsize=128)
def _profiles(event: PrivacyEvent, tail_mass: float) -> tuple[Profile, Profile, bool]:
    """Epsilons and deltas of both directions ("remove", "add"), and whether the range was limited.

    Kept, because bounds at several confidences ask for the same events.
    """
    composed = compose(event, tail_mass=tail_mass)
    limited = composed.discretisation.range_limited
    return _profile(composed.remove), _profile(composed.add), limited


def _profile(loss: ComposedLoss) -> Profile:
    positive = loss.losses[loss.losses > 0]
    if positive.size == 0:
        return np.zeros(1), np.array([loss.delta(0.0)])
    top = loss.epsilon(max(2 * loss.infinity, 1e-12))
    grid = np.concatenate([[0.0], np.linspace(0.0, min(top, float(positive[-1])), 400)[1:]])
    return grid, loss.deltas(grid)


def advantage(event: PrivacyEvent) -> float:
    """Upper bound of a membership attacker's advantage max(true positive rate - false positive
    rate) = delta(0).
    """
    return delta(event, 0.0)


def attack_success(event: PrivacyEvent, false_positive_rate: float) -> float:
    """Upper bound of a membership attacker's true positive rate at a false positive rate."""
    return float(1.0 - trade_off(event, [false_positive_rate])[0])


def _require_epsilon(value: float) -> None:
    require_finite("epsilon", value)
    if value < 0:
        raise ValueError(f"epsilon={value!r} must be at least 0")


def _why_infinite(event: PrivacyEvent, delta: float) -> str:
    phases: tuple[PoissonGaussian, ...] = (
        event.events if isinstance(event, EventSequence) else (event,)
    )
    dims = [p.clipping.sketch_dim for p in phases if isinstance(p.clipping, RandomizedClipping)]
    if dims:
        return (
            "the privacy loss exceeds every value on the grid with probability above "
            f"delta={delta}: with sketch_dim={min(dims)} the "
            "norm estimate can fall near zero; use a larger sketch_dim or a larger noise_multiplier"
        )
    return (
        "the privacy loss exceeds every value on the grid with probability above "
        f"delta={delta}; use a larger noise_multiplier"
    )
