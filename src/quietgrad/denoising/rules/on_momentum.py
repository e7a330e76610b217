"""A rule of the gradient, applied to the optimiser's first moment instead."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quietgrad.checks import require_at_least, require_int
from quietgrad.denoising.rules.protocols import (
    Directions,
    GradientRule,
    MomentStep,
    require_gradient_rule,
)
from quietgrad.noise.noisy_sum import NoisySum


@dataclass(frozen=True)
class OnMomentum:
    """What ``rule`` makes of the first moment, at the moment's own noise level.

    A running average of releases is a released value whose noise is known, so any rule of the
    gradient applies. More stands out of it than of one release, and what the rule takes away is
    taken from one step only: the moment itself goes on undenoised.

    Attributes:
        rule: such as ``SpikesWithBulk()``.
        delay: how many steps go along the moment as it is.

    Raises:
        TypeError, ValueError: for a rule of the momentum, or a delay that is no number of steps.
    """

    rule: GradientRule
    delay: int = 0

    def __post_init__(self) -> None:
        require_gradient_rule("rule", self.rule)
        require_int("delay", self.delay)
        require_at_least("delay", self.delay, 0, "pass a number of steps")

    def directions(
        self,
        step: MomentStep,
        model: nn.Module | None = None,
    ) -> Directions:
        """See ``MomentumRule``."""
        if step.noise_after.releases <= self.delay:
            return {}, {}
        released = NoisySum(step.after, step.noise_after.std)
        return self.rule.denoise(released, model).gradients, {}
