"""Spikes above the optimal hard threshold, at the size they were observed; the rest is dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quietgrad.checks import require_bool
from quietgrad.denoising.formulas import bulk_edge
from quietgrad.denoising.rules.detection import denoised
from quietgrad.denoising.spikes import Spikes
from quietgrad.noise.noisy_sum import NoisySum


@dataclass(frozen=True)
class HardThreshold:
    """Of every matrix with a singular value above the threshold, the truncated decomposition.

    The best cut for those who would not change what they keep: shrinkage has the smaller error, so
    this is the rule to compare with. A function of released values, so it costs no privacy.

    Attributes:
        embeddings: whether embedding tables are treated as matrices too.

    Raises:
        TypeError: for a setting of another type.

    Source: Gavish and Donoho 2014, "The optimal hard threshold for singular values is 4/sqrt(3)",
    eq. 11 (noise of known size).
    """

    embeddings: bool = False

    def __post_init__(self) -> None:
        require_bool("embeddings", self.embeddings)

    def denoise(self, noisy: NoisySum, model: nn.Module | None = None) -> NoisySum:
        """See ``GradientRule``."""

        def truncated(stack_lmn: Tensor, spikes: Spikes, weights_lp: Tensor) -> Tensor:
            threshold = hard_threshold(stack_lmn.shape[1:], noisy.noise_std)
            kept = torch.where(spikes.values_lp >= threshold, spikes.values_lp, 0.0)
            left = spikes.left_lmp * kept.unsqueeze(1)
            new = torch.bmm(left, spikes.right_lnp.transpose(1, 2))
            return torch.where((kept[:, :1] > 0).unsqueeze(1), new, stack_lmn)

        # The search begins where the smallest threshold of all shapes is, in edges of the bulk.
        return denoised(noisy, model, SMALLEST_IN_EDGES, self.embeddings, truncated)


def hard_threshold(shape: Sequence[int], noise_std: float) -> float:
    """Singular values below it add more noise than signal: the optimal cut for noise of standard
    deviation ``noise_std`` in every entry of an (m, n) matrix. 4/sqrt(3) sqrt(n) s for a square.
    """
    m, n = sorted(shape)
    return _in_units(m / n) * math.sqrt(n) * noise_std


def _in_units(beta: float) -> float:
    """Of sqrt(n) s, for m / n = beta at most 1."""
    root = math.sqrt(beta * beta + 14.0 * beta + 1.0)
    return math.sqrt(2.0 * (beta + 1.0) + 8.0 * beta / (beta + 1.0 + root))


# Of the threshold: 1.155 edges for a square matrix, the least of all shapes, and sqrt(2) for a thin
# one. The search begins there.
SMALLEST_IN_EDGES = 0.999 * _in_units(1.0) / bulk_edge((1, 1), 1.0)
