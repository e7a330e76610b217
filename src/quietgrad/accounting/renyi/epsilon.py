"""Epsilon by Renyi divergences, as Opacus' "rdp" computes it: for scripts that are compared with
Opacus' own.

A step's pair of distributions dominates whatever the step releases, for every hockey-stick
divergence and so for every Renyi divergence. Divergences add up over adaptive steps (Mironov, Renyi
Differential Privacy, 2017, proposition 1), and for every order a

    epsilon = sum of D_a + log(1 - 1/a) - log(a delta) / (a - 1)

(Canonne, Kamath and Steinke 2020, proposition 12; Balle et al. 2020, theorem 21).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quietgrad.accounting.phases import grouped
from quietgrad.accounting.renyi.moments import renyi_divergence
from quietgrad.accounting.spending import epsilon
from quietgrad.checks import as_plain, require_delta, require_finite
from quietgrad.events import EventSequence, PrivacyEvent, RandomizedClipping

RENYI_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))  # those of Opacus
LARGEST_ORDER = 10_000.0


def renyi_epsilon(
    event: PrivacyEvent, delta: float, orders: Sequence[float] = RENYI_ORDERS
) -> tuple[float, float]:
    """Epsilon by the Renyi divergence of the best order; looser than ``epsilon``.

    Args:
        event: what was released: exact clipping, independent noise, nothing beside.
        delta: in (0, 1).
        orders: above 1; the best of them counts.

    Returns:
        (an upper bound of epsilon, the order that gave it). The bound is never below ``epsilon``'s.

    Raises:
        ValueError: for another event, delta or order.
    """
    require_delta("delta", delta)
    delta = as_plain(delta)
    require_orders(orders)
    phases = event.events if isinstance(event, EventSequence) else (event,)
    for phase in phases:
        if isinstance(phase.clipping, RandomizedClipping):
            raise ValueError(
                "Renyi accounting of randomized clipping does not exist: the scale Z = R^(-1/2) is "
                "unbounded, so every Renyi moment of order above 1 is infinite; use "
                "quietgrad.accounting.epsilon, which composes privacy-loss distributions"
            )
        if phase.bands > 1 or phase.beside:
            raise ValueError(
                "Renyi accounting is for independent noise with nothing released beside the "
                "gradients; use quietgrad.accounting.epsilon"
            )
    best, best_order = math.inf, float(orders[0])
    merged = grouped(phases)
    for order in map(float, orders):
        spent = sum(
            phase.steps * renyi_divergence(phase.noise_multiplier, phase.sample_rate, order)
            for phase in merged
        )
        found = epsilon_at_order(spent, order, delta)
        if found < best:
            best, best_order = found, order
    return max(best, epsilon(event, delta)), best_order


def epsilon_at_order(divergence: float, order: float, delta: float) -> float:
    """Epsilon from one divergence (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def require_orders(orders: Sequence[float]) -> None:
    """Raises:
    ValueError: for none, or for orders that divergences are not computed at.
    """
    if not len(orders):
        raise ValueError("orders is empty; give Renyi orders above 1, or leave it out")
    for order in orders:
        require_finite("orders", order)
        if not 1 < order <= LARGEST_ORDER:
            raise ValueError(
                f"orders: {order!r} must be above 1, and at most {LARGEST_ORDER:g}; usual orders "
                "are 1.1 to 63"
            )
