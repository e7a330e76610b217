"""The rule that keeps a share of the bulk: later steps live on what is too weak to be seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quietgrad.checks import require_bool, require_finite
from quietgrad.denoising.rules.detection import KAPPA, denoised, require_kappa
from quietgrad.denoising.rules.published import at_norm, norms_of
from quietgrad.denoising.spikes import Spikes
from quietgrad.noise.noisy_sum import NoisySum


@dataclass(frozen=True)
class SpikesWithBulk:
    """A share of the noisy matrix and the rest of the published result, at the noisy matrix's norm.

    What lies below the threshold of detection is never thrown away. The cosine with the clean
    gradient goes up whenever the published rule's does (Theorem 1: a sum of two vectors of one norm
    is no worse aligned than the worse of them).

    Attributes:
        kappa: a layer is touched if its largest singular value is at least so many edges of the
            bulk; at least 1.
        keep_bulk: share of the noisy matrix, in (0, 1).
        embeddings: whether embedding tables are treated as matrices too.

    Raises:
        TypeError, ValueError: for settings out of range.
    """

    kappa: float = KAPPA
    keep_bulk: float = 0.5
    embeddings: bool = False

    def __post_init__(self) -> None:
        require_kappa(self.kappa)
        require_finite("keep_bulk", self.keep_bulk)
        if not 0 < self.keep_bulk < 1:
            raise ValueError(
                f"keep_bulk={self.keep_bulk!r} must be in (0, 1): 1 would change nothing, and to "
                "drop the bulk use the published rule"
            )
        require_bool("embeddings", self.embeddings)

    def denoise(self, noisy: NoisySum, model: nn.Module | None = None) -> NoisySum:
        """See ``GradientRule``."""
        return denoised(noisy, model, self.kappa, self.embeddings, self._mixed)

    def _mixed(self, stack_lmn: Tensor, spikes: Spikes, weights_lp: Tensor) -> Tensor:
        norms, kept = norms_of(stack_lmn), self.keep_bulk
        added = (1 - kept) * at_norm(weights_lp, norms)
        # The norm of the sum without another pass over it: the triplets are orthonormal, and
        # u^T G v is the singular value.
        crossed = (2 * kept * added * spikes.values_lp + added**2).sum(dim=1)
        scale = norms / ((kept * norms) ** 2 + crossed).sqrt()
        left = spikes.left_lmp * (scale.unsqueeze(1) * added).unsqueeze(1)
        right = spikes.right_lnp.transpose(1, 2)
        return torch.baddbmm(stack_lmn * (kept * scale).view(-1, 1, 1), left, right)
