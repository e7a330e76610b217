"""Renyi divergences of many steps, and the epsilon of the best order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quietgrad.accounting.renyi.epsilon import epsilon_at_order, require_orders
from quietgrad.accounting.renyi.moments import renyi_divergence
from quietgrad.checks import require_delta
from quietgrad.events import PoissonGaussian


def compute_rdp(
    *, q: float, noise_multiplier: float, steps: int, orders: Sequence[float] | float
) -> Any:
    """The divergence of every order, of ``steps`` releases on Poisson samples.

    Args:
        q: sampling rate.
        noise_multiplier: sigma.
        steps: releases.
        orders: above 1; one or several.

    Returns:
        A number for one order, an array for several.
    """
    PoissonGaussian(noise_multiplier, q, steps)  # judges them
    several = np.atleast_1d(np.asarray(orders, dtype=float))
    require_orders(several.tolist())
    found = steps * np.array([renyi_divergence(noise_multiplier, q, float(a)) for a in several])
    return float(found[0]) if np.ndim(orders) == 0 else found


def get_privacy_spent(
    *, orders: Sequence[float] | float, rdp: Any, delta: float
) -> tuple[float, float]:
    """The smallest epsilon that the divergences give.

    Args:
        orders: above 1; one or several.
        rdp: their divergences, summed over what was released.
        delta: in (0, 1).

    Returns:
        (epsilon, the order that gave it).

    Raises:
        ValueError: for orders and divergences of different numbers, divergences below 0, orders or
            a delta out of their range.
    """
    require_delta("delta", delta)
    several, spent = np.atleast_1d(orders).astype(float), np.atleast_1d(rdp).astype(float)
    if len(several) != len(spent):
        raise ValueError(
            f"orders has {len(several)} numbers and rdp {len(spent)}; give a divergence an order"
        )
    require_orders(several.tolist())
    if not bool((spent >= 0).all()):
        raise ValueError(f"rdp={rdp!r} must be divergences of 0 or more; take compute_rdp's")
    pairs = zip(several.tolist(), spent.tolist(), strict=True)
    found, order = min((epsilon_at_order(d, a, delta), a) for a, d in pairs)
    return max(found, 0.0), order
