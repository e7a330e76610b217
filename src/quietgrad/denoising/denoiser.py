"""Spectral denoising of a released noisy gradient: what stands out of the noise is told apart from what does not.

A function of released values and public facts (the noise level, shapes), so the privacy guarantee is the same with and without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_finite, require_int, require_word
from quietgrad.denoising.formulas import bulk_edge, shrink
from quietgrad.denoising.matrices import matrix_shapes, stacks
from quietgrad.denoising.spikes import Spikes, detect
from quietgrad.noise.noisy_sum import NoisySum

Target = Literal["gradient", "momentum"]
AMPLIFICATION = 8.0  # of what persists (docs/denoising.md has the study of gains)
ALL_AMPLIFICATION = 2.0  # of all that stands out,
ALL_DELAY = 8  # after so many steps: Adam's moment then holds 0.36 of a release's noise, and its steps are short
KEEP_BULK = 0.5
TARGETS: tuple[Target, ...] = ("gradient", "momentum")


@dataclass(frozen=True)
class SpectralDenoiser:
    """Singular value shrinkage of every matrix-shaped gradient in which something stands out of the noise.

    On the gradient: what stands out is shrunk as eq. 8 of Gradient Matrix Denoising says and, with norm correction, scaled to the norm of the noisy matrix. That alone is the
    published rule (``keep_bulk=0``). With ``keep_bulk`` = a the result is the noisy matrix times a plus that one times 1 - a, scaled to the noisy norm again: what lies
    below the threshold of detection, which later steps live on, is never thrown away. Both raise the cosine with the clean gradient whenever the published
    rule does (Theorem 1: a sum of two vectors of one norm is no worse aligned than the worse of them).

    On the momentum nothing is taken away, so there is no norm to correct: the result is the momentum plus g - 1 times what stood out of it before the last release, shrunk, as far as that
    release shows it again (``amplify`` = g, ``persistence``; ``persistent_part``). At rates that are small for the task what stands out stays, and the step along it is g times as
    long; at large ones it swings from step to step, and nothing is amplified. With ``persistence=False`` the shrunk spikes of the momentum itself are amplified, whether they
    stay or swing: that begins after ``delay`` steps, since Adam's first ones are as long as the learning rate allows whatever the signal.

    Attributes:
        kappa: a layer is touched if its largest singular value is at least so many edges of the bulk.
        norm_correction: whether the result has the noisy matrix's Frobenius norm; without amplification.
        target: "gradient" (a release; ``denoise``) or "momentum" (the optimiser's first moment; ``SpectralAdamW``, ``SpectralSGD``).
        keep_bulk: share a of the noisy matrix in the result, in [0, 1); without amplification.
        amplify: g, by how much a step along the spikes is longer than along the rest (at most, where persistence is asked for); 1 for the rules that take away. None: on the momentum 8, without persistence 2; on the gradient 1.
        delay: how many steps of an optimiser go along the moment as it is before the rule begins; on the gradient 0, since a release does not know its step. None: 8 where the
            momentum is amplified without persistence, 0 elsewhere.
        persistence: whether only what the next release shows again is amplified; only on the momentum, with ``amplify`` > 1. None: yes there, and no elsewhere.
        embeddings: whether embedding tables are treated as matrices too.

    Raises:
        TypeError: for a ``persistence`` that is no truth value.
        ValueError: for settings out of range.
    """

    kappa: float = 1.02
    norm_correction: bool = True
    target: Target = "gradient"
    keep_bulk: float = KEEP_BULK
    embeddings: bool = False
    amplify: float | None = None
    delay: int | None = None
    persistence: bool | None = None

    def __post_init__(self) -> None:
        require_finite("kappa", self.kappa)
        require_at_least("kappa", self.kappa, 1.0, "a threshold below the bulk's edge takes noise for signal")
        require_word("target", self.target, TARGETS)
        if self.amplify is not None:
            require_finite("amplify", self.amplify)
            require_at_least("amplify", self.amplify, 1.0, "1 amplifies nothing; what stands out is never made smaller")
        if self.amplification > 1 and not (self.norm_correction and self.keep_bulk == KEEP_BULK):
            raise ValueError(
                f"keep_bulk={self.keep_bulk!r} and norm_correction={self.norm_correction!r} are for the rule that takes away, and amplification by {self.amplification:g} takes nothing "
                "away; set amplify=1"
            )
        if self.delay is not None:
            require_int("delay", self.delay)
            require_at_least("delay", self.delay, 0, "pass a number of steps")
        if self.delay and self.target == "gradient":
            raise ValueError(
                f"delay={self.delay}: a release does not know its step; use target='momentum', or release the first {self.delay} steps without denoising them"
            )
        if self.persistence is not None and not isinstance(self.persistence, bool):
            raise TypeError(f"persistence={self.persistence!r} must be True, False or None")
        if self.persistence and not (self.target == "momentum" and self.amplification > 1):
            raise ValueError(
                f"persistence=True is for what amplifies on the momentum, not target={self.target!r} with amplification by {self.amplification:g}; leave it out"
            )
        if not 0 <= self.keep_bulk < 1:
            raise ValueError(
                f"keep_bulk={self.keep_bulk!r} must be in [0, 1): 0 drops the bulk, 1 would change nothing"
            )

    @property
    def amplification(self) -> float:
        """g; 1 where the rule takes away instead."""
        if self.amplify is not None:
            return self.amplify
        if self.target == "gradient":
            return 1.0
        return ALL_AMPLIFICATION if self.persistence is False else AMPLIFICATION

    @property
    def persistent(self) -> bool:
        """Whether only what the next release shows again is amplified."""
        return self.target == "momentum" and self.amplification > 1 and self.persistence is not False

    @property
    def first_steps(self) -> int:
        """How many steps of an optimiser are not denoised."""
        if self.delay is not None:
            return self.delay
        return ALL_DELAY if self.target == "momentum" and self.amplification > 1 and not self.persistent else 0

    @classmethod
    def paper(cls, kappa: float = 1.02, embeddings: bool = False) -> SpectralDenoiser:
        """The published method: the single step's gradient, only spikes kept, rescaled to the noisy norm (eq. 9)."""
        return cls(kappa, norm_correction=True, target="gradient", keep_bulk=0.0, embeddings=embeddings, amplify=1.0)

    def denoise(self, noisy: NoisySum, model: nn.Module | None = None) -> NoisySum:
        """A better-aligned sum; for ``target="gradient"``.

        Args:
            noisy: a released sum.
            model: tells embeddings and experts from other weights; without it embeddings are matrices like others.

        Raises:
            TypeError: for anything that was not released.
            ValueError: if it was denoised before, or for ``target="momentum"``.
        """
        if not isinstance(noisy, NoisySum):
            raise TypeError(
                f"denoise takes a NoisySum, not {type(noisy).__name__}: release the clipped sum first (run.release)"
            )
        if self.target != "gradient":
            raise ValueError(
                "target='momentum' acts inside the optimiser: pass this denoiser to SpectralAdamW or SpectralSGD"
            )
        if noisy.denoised:
            raise ValueError("this sum was denoised before: its noise level is not known any more; denoise once")
        return replace(noisy, gradients=self.denoise_all(noisy.gradients, noisy.noise_std, model), denoised=True)

    def denoise_all(
        self, values: Mapping[str, Tensor], noise_std: float, model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """The rule applied to every matrix of a release, or of anything computed from releases alone whose noise is known.

        Args:
            values: parameter name -> tensor in the parameter's shape.
            noise_std: standard deviation of the noise in every entry of ``values``.
            model: tells embeddings and experts from other weights.

        Returns:
            New tensors where something changed, the given ones elsewhere.

        Raises:
            ValueError: for a rule of what persists, which needs the next release too (``persistent_part``).
        """
        result = dict(values)
        for names, stack in stacks(values, matrix_shapes(values, model, self.embeddings)):
            changed = self.denoise_stack(stack, noise_std)
            if changed is None:
                continue
            for name, value in zip(names, changed.chunk(len(names)), strict=True):
                result[name] = value.reshape(values[name].shape).to(values[name].dtype)
        return result

    def denoise_stack(self, stack_lmn: Tensor, noise_std: float) -> Tensor | None:
        """The denoised stack, or None where nothing in it changes; ``ValueError`` as ``denoise_all``."""
        if self.persistent:
            raise ValueError(
                "what persists is seen in the next release, not in the momentum alone: step with SpectralAdamW or SpectralSGD, call persistent_part, or set persistence=False"
            )
        return _denoised(stack_lmn, noise_std, self)


def _denoised(stack: Tensor, noise_std: float, rule: SpectralDenoiser) -> Tensor | None:
    if noise_std == 0:
        return None
    detected = detect(stack, noise_std, rule.kappa)
    if detected is None:
        return None
    candidates, spikes = detected
    some = stack if len(spikes.values_lp) == len(stack) else stack[candidates]
    decided = spikes.values_lp[:, 0] >= rule.kappa * bulk_edge(stack.shape[1:], noise_std)
    if not bool(decided.any()):
        return None
    new = _combined(some, spikes, noise_std, rule)
    if not bool(decided.all()):
        new = torch.where(decided.view(-1, 1, 1), new, some)
    if some is stack:
        return new
    result = stack.clone()
    result[candidates] = new
    return result


def _combined(stack: Tensor, spikes: Spikes, noise_std: float, rule: SpectralDenoiser) -> Tensor:
    weights = shrink(spikes.values_lp, stack.shape[1:], noise_std)
    right = spikes.right_lnp.transpose(1, 2)
    if rule.amplification > 1:
        return torch.baddbmm(stack, spikes.left_lmp * weights.unsqueeze(1), right, alpha=rule.amplification - 1)
    # Rows first: a sum of millions of squares in single precision is off by 1e-4 of itself.
    norms = torch.linalg.vector_norm(torch.linalg.vector_norm(stack, dim=2), dim=1)
    if rule.norm_correction:
        length = torch.linalg.vector_norm(weights, dim=1).clamp(min=torch.finfo(stack.dtype).tiny)
        weights = weights * (norms / length).unsqueeze(1)
    if not rule.keep_bulk:
        return torch.bmm(spikes.left_lmp * weights.unsqueeze(1), right)
    kept, added = rule.keep_bulk, (1 - rule.keep_bulk) * weights
    if not rule.norm_correction:
        return torch.baddbmm(stack, spikes.left_lmp * added.unsqueeze(1), right, beta=kept)
    # The norm of the sum without another pass over it: the triplets are orthonormal, and u^T G v is the singular value.
    squared = (kept * norms) ** 2 + (2 * kept * added * spikes.values_lp + added**2).sum(dim=1)
    scale = norms / squared.sqrt()
    left = spikes.left_lmp * (scale.unsqueeze(1) * added).unsqueeze(1)
    return torch.baddbmm(stack * (kept * scale).view(-1, 1, 1), left, right)


def denoise_matrix(matrix: Tensor, noise_std: float, kappa: float = 1.02, norm_correction: bool = True) -> Tensor:
    """One matrix through the published rule (``SpectralDenoiser.paper``); returned itself where nothing stands out of the noise.

    Args:
        matrix: [m, n] signal and Gaussian noise.
        noise_std: s, standard deviation of the noise in every entry.
        kappa, norm_correction: see ``SpectralDenoiser``.

    Raises:
        ValueError: if it is no matrix, or a setting is out of range.
    """
    if matrix.dim() != 2:
        raise ValueError(f"matrix has shape {tuple(matrix.shape)}; pass two dimensions, [rows, columns]")
    rule = SpectralDenoiser(kappa, norm_correction, target="gradient", keep_bulk=0.0)
    return rule.denoise_all({"": matrix}, noise_std)[""]
