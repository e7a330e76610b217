"""Events to epsilon, delta and trade-off curves, and back to a noise multiplier. Never imports
torch.

Every epsilon is an upper bound for the add-or-remove-one-record relation; see docs/privacy.md for
the argument.
"""

from quietgrad.accounting.calibrate import noise_multiplier
from quietgrad.accounting.envelope import envelope_cdf
from quietgrad.accounting.renyi.epsilon import renyi_epsilon
from quietgrad.accounting.selection.counts import RunCount
from quietgrad.accounting.selection.epsilon import selected_epsilon, selected_noise_multiplier
from quietgrad.accounting.spending import (
    EpsilonReport,
    advantage,
    attack_success,
    delta,
    epsilon,
    epsilon_report,
    trade_off,
)

__all__ = [
    "EpsilonReport",
    "RunCount",
    "advantage",
    "attack_success",
    "delta",
    "envelope_cdf",
    "epsilon",
    "epsilon_report",
    "noise_multiplier",
    "renyi_epsilon",
    "selected_epsilon",
    "selected_noise_multiplier",
    "trade_off",
]
