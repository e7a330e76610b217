"""Renyi divergences of many steps, and the epsilon of the best order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

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
    found = steps * np.array([renyi_divergence(noise_multiplier, q, float(a)) for a in several])
    return float(found[0]) if np.ndim(orders) == 0 else found


def get_privacy_spent(
    *, orders: Sequence[float] | float, rdp: Any, delta: float
) -> tuple[float, float]:
    """The smallest epsilon that the divergences give (Canonne, Kamath and Steinke 2020, proposition
    12).

    Args:
        orders: above 1; one or several.
        rdp: their divergences, summed over what was released.
        delta: in (0, 1).

    Returns:
        (epsilon, the order that gave it).

    Raises:
        ValueError: for orders and divergences of different numbers.
    """
    require_delta("delta", delta)
    several, spent = np.atleast_1d(orders).astype(float), np.atleast_1d(rdp).astype(float)
    if len(several) != len(spent):
        raise ValueError(
            f"orders has {len(several)} numbers and rdp {len(spent)}; give a divergence an order"
        )
    pairs = zip(several.tolist(), spent.tolist(), strict=True)
    return min((d + math.log1p(-1 / a) - math.log(a * delta) / (a - 1), a) for a, d in pairs)
