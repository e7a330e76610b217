"""Constant amplification: all that stands out of the momentum, whether it stays or swings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_bool, require_finite, require_int
from quietgrad.denoising.rules.detection import KAPPA, require_kappa, spiked_changed
from quietgrad.denoising.rules.protocols import Directions, MomentStep
from quietgrad.denoising.spikes import Spikes


@dataclass(frozen=True)
class ConstantAmplification:
    """The momentum plus gain - 1 times its shrunk spikes. Nothing is taken away.

    It begins after a delay: Adam's first steps are as long as the learning rate allows whatever the
    signal, and what is amplified there overshoots (docs/notes/denoising_rules.md).

    Attributes:
        kappa: a layer is touched if its largest singular value is at least so many edges of the
            bulk; at least 1.
        gain: by how much a step along the spikes is longer than along the rest; at least 1, which
            amplifies nothing.
        delay: how many steps go along the moment as it is. After 8 Adam's moment holds 0.36 of a
            release's noise, and its steps are short.
        embeddings: whether embedding tables are treated as matrices too.

    Raises:
        TypeError, ValueError: for settings out of range.
    """

    kappa: float = KAPPA
    gain: float = 2.0
    delay: int = 8
    embeddings: bool = False

    def __post_init__(self) -> None:
        require_kappa(self.kappa)
        require_finite("gain", self.gain)
        require_at_least("gain", self.gain, 1.0, "what stands out is never made smaller")
        require_int("delay", self.delay)
        require_at_least("delay", self.delay, 0, "pass a number of steps")
        require_bool("embeddings", self.embeddings)

    def directions(
        self,
        step: MomentStep,
        model: nn.Module | None = None,
    ) -> Directions:
        """See ``MomentumRule``."""
        if step.noise_after.releases <= self.delay:
            return {}, {}
        return self.amplified(step.after, step.noise_after.std, model), {}

    def amplified(
        self, moments: Mapping[str, Tensor], noise_std: float, model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """The rule without its delay.

        Args:
            moments: parameter name -> running average of releases.
            noise_std: standard deviation of the noise in every entry.
            model: tells embeddings and experts from other weights.

        Returns:
            New tensors where something stands out, the given ones elsewhere.
        """
        return spiked_changed(moments, noise_std, model, self.kappa, self.embeddings, self._added)

    def _added(self, stack_lmn: Tensor, spikes: Spikes, weights_lp: Tensor) -> Tensor:
        left = spikes.left_lmp * weights_lp.unsqueeze(1)
        return torch.baddbmm(stack_lmn, left, spikes.right_lnp.transpose(1, 2), alpha=self.gain - 1)
