"""What a denoising rule is: one method on released values, for a gradient or for a first moment.

The two differ in what they are told. A rule of the gradient sees one release and gives another; who
steps on it does not matter. A rule of the momentum sees what the optimiser has averaged before a
release and after it, and may remember a number a matrix (its gain), so it lives inside the
optimiser. ``OnMomentum`` makes the second kind of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from quietgrad.denoising.moment import MomentNoise
from quietgrad.noise.noisy_sum import NoisySum

# Parameter name -> what a rule of the momentum remembers, one number a matrix.
Gains = Mapping[str, Sequence[float]]
Directions = tuple[dict[str, Tensor], Gains]


@runtime_checkable
class GradientRule(Protocol):
    """What is made of a released gradient."""

    def denoise(self, noisy: NoisySum, model: nn.Module | None = None) -> NoisySum:
        """A better-aligned sum, marked as denoised.

        Args:
            noisy: a released sum.
            model: tells embeddings and experts from other weights; without it embeddings are
                matrices like others.

        Raises:
            TypeError: for anything that was not released.
            ValueError: if it was denoised before, or the model lacks one of its parameters.
        """
        ...


@dataclass(frozen=True)
class MomentStep:
    """A release on its way into an optimiser's first moments: all that a rule may look at.

    Attributes:
        before: parameter name -> running average of releases, each divided by B; empty before the
            first. Gone once ``after`` was read: the averages are changed in place.
        noise_before, noise_after: what is known of the averages' noise.
        incoming: gives what goes in, times B: the release, and what is known without it (the weight
            decay of SGD).
        receive: puts it in and gives the averages; read ``after`` instead.
        expected_batch_size: B.
        gains: parameter name -> what the rule returned for it last, one number a matrix.
    """

    before: Mapping[str, Tensor]
    noise_before: MomentNoise
    noise_after: MomentNoise
    incoming: Callable[[], NoisySum]
    receive: Callable[[], dict[str, Tensor]]
    expected_batch_size: float
    gains: Gains

    @cached_property
    def after(self) -> dict[str, Tensor]:
        """The averages with the release in them; the first reading puts it in."""
        return self.receive()


@runtime_checkable
class MomentumRule(Protocol):
    """What an optimiser steps along instead of its first moment; the moment goes on as it is."""

    def directions(
        self,
        step: MomentStep,
        model: nn.Module | None = None,
    ) -> Directions:
        """The directions of one step.

        Args:
            step: the moments before and after a release.
            model: as for ``GradientRule.denoise``.

        Returns:
            Parameter name -> direction, for all parameters or for those that do not go along their
            moment; name -> what to be told at the next step, for those that changed.
        """
        ...


def require_gradient_rule(name: str, rule: object) -> None:
    """That ``rule`` acts on releases; TypeError naming argument and remedy otherwise."""
    if isinstance(rule, type) or not isinstance(rule, GradientRule | MomentumRule):
        raise TypeError(f"{name}={rule!r} is no rule; pass one, such as SpikesWithBulk()")
    if not isinstance(rule, GradientRule):
        raise TypeError(
            f"{name}={rule!r} acts inside the optimiser: pass it to SpectralAdamW or SpectralSGD, "
            f"and leave {name} unset"
        )


def require_momentum_rule(name: str, rule: object) -> None:
    """That ``rule`` acts on first moments; TypeError naming argument and remedy otherwise."""
    if isinstance(rule, type) or not isinstance(rule, GradientRule | MomentumRule):
        raise TypeError(f"{name}={rule!r} is no rule; pass one, such as PersistentAmplification()")
    if not isinstance(rule, MomentumRule):
        raise TypeError(
            f"{name}={rule!r} acts on a release: denoise the gradient and step with torch.optim, "
            f"or pass OnMomentum({rule!r})"
        )
