"""The published rule (Gradient Matrix Denoising, eqs. 8 and 9): spikes shrunk, the rest dropped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quietgrad.checks import require_bool
from quietgrad.denoising.rules.detection import KAPPA, denoised, require_kappa, spiked_changed
from quietgrad.denoising.spikes import Spikes
from quietgrad.noise.noisy_sum import NoisySum


@dataclass(frozen=True)
class PublishedShrinkage:
    """Of every matrix in which something stands out of the noise, the shrunk spikes alone.

    With norm correction the cosine with the clean gradient goes up, layer by layer and as a whole
    (Theorem 1). A function of released values and public facts, so it costs no privacy.

    Attributes:
        kappa: a layer is touched if its largest singular value is at least so many edges of the
            bulk; at least 1.
        norm_correction: whether the result has the noisy matrix's Frobenius norm (eq. 9).
        embeddings: whether embedding tables are treated as matrices too.

    Raises:
        TypeError, ValueError: for settings out of range.
    """

    kappa: float = KAPPA
    norm_correction: bool = True
    embeddings: bool = False

    def __post_init__(self) -> None:
        require_kappa(self.kappa)
        require_bool("norm_correction", self.norm_correction)
        require_bool("embeddings", self.embeddings)

    def denoise(self, noisy: NoisySum, model: nn.Module | None = None) -> NoisySum:
        """See ``GradientRule``."""
        return denoised(noisy, model, self.kappa, self.embeddings, self._shrunk)

    def _shrunk(self, stack_lmn: Tensor, spikes: Spikes, weights_lp: Tensor) -> Tensor:
        if self.norm_correction:
            weights_lp = at_norm(weights_lp, norms_of(stack_lmn))
        left = spikes.left_lmp * weights_lp.unsqueeze(1)
        return torch.bmm(left, spikes.right_lnp.transpose(1, 2))


def denoise_matrix(
    matrix: Tensor,
    noise_std: float,
    kappa: float = KAPPA,
    norm_correction: bool = True,
) -> Tensor:
    """One matrix through the published rule; returned itself where nothing stands out of the noise.

    Args:
        matrix: [m, n] signal and Gaussian noise.
        noise_std: s, standard deviation of the noise in every entry.
        kappa, norm_correction: see ``PublishedShrinkage``.

    Raises:
        ValueError: if it is no matrix, or a setting is out of range.
    """
    if matrix.dim() != 2:
        shape = tuple(matrix.shape)
        raise ValueError(f"matrix has shape {shape}; pass two dimensions, [rows, columns]")
    rule = PublishedShrinkage(kappa, norm_correction)
    return spiked_changed({"": matrix}, noise_std, None, kappa, False, rule._shrunk)[""]


def norms_of(stack_lmn: Tensor) -> Tensor:
    """[l] Frobenius norms."""
    # Rows first: a sum of millions of squares in single precision is off by 1e-4 of itself.
    return torch.linalg.vector_norm(torch.linalg.vector_norm(stack_lmn, dim=2), dim=1)


def at_norm(weights_lp: Tensor, norms_l: Tensor) -> Tensor:
    """Weights of orthonormal triplets, scaled so that their sum has this norm."""
    tiny = torch.finfo(weights_lp.dtype).tiny
    length = torch.linalg.vector_norm(weights_lp, dim=1).clamp(min=tiny)
    return weights_lp * (norms_l / length).unsqueeze(1)
