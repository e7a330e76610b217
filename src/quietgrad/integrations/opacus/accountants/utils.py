"""The noise for a budget."""

from __future__ import annotations

import math
from typing import Any

from quietgrad.integrations.opacus.accountants.accountant import create_accountant


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
    **_: Any,
) -> float:
    """The smallest noise multiplier with which so many steps stay within the budget.

    Args:
        target_epsilon, target_delta: the budget.
        sample_rate: q.
        epochs, steps: one of them; an epoch is 1 / q steps.
        accountant: whose epsilon is meant; Opacus' default is "rdp", which asks for more noise.
        epsilon_tolerance: accepted for the script's sake.

    Raises:
        ValueError: for both or none of epochs and steps, and for a budget that no noise meets.
    """
    if (epochs is None) == (steps is None):
        raise ValueError("give either epochs or steps to get_noise_multiplier, not both or none")
    if steps is None:
        assert epochs is not None
        steps = math.ceil(epochs / sample_rate - 1e-6)
    counted = create_accountant(accountant)
    return counted.noise_for(target_epsilon, target_delta, sample_rate, max(1, steps))
