"""What the rules share: they change the matrices in which something stands out of the noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_finite
from quietgrad.denoising.formulas import bulk_edge, shrink
from quietgrad.denoising.matrices import changed_matrices
from quietgrad.denoising.spikes import Spikes, detect
from quietgrad.noise.noisy_sum import NoisySum

KAPPA = 1.02
# (stack [l, m, n], its spikes, their shrunk values [l, p]) to a new stack.
Change = Callable[[Tensor, Spikes, Tensor], Tensor]


def require_kappa(kappa: float) -> None:
    """That the threshold is one."""
    require_finite("kappa", kappa)
    require_at_least("kappa", kappa, 1.0, "below the edge of the bulk noise counts as signal")


def require_released(noisy: object) -> None:
    """That a value was released and is as it was then: what is known of its noise is true.

    Raises:
        TypeError: for anything that was not released.
        ValueError: if it was denoised before.
    """
    if not isinstance(noisy, NoisySum):
        kind = type(noisy).__name__
        raise TypeError(f"noisy must be a NoisySum, not {kind}: release the clipped sum first")
    if noisy.denoised:
        raise ValueError(
            "noisy was denoised before, its noise level is unknown: pass what was released"
        )


def denoised(
    noisy: NoisySum,
    model: nn.Module | None,
    kappa: float,
    embeddings: bool,
    change: Change,
) -> NoisySum:
    """``spiked_changed`` of a release, marked as denoised: the body of a rule of the gradient."""
    require_released(noisy)
    gradients = spiked_changed(noisy.gradients, noisy.noise_std, model, kappa, embeddings, change)
    return replace(noisy, gradients=gradients, denoised=True)


def spiked_changed(
    values: Mapping[str, Tensor],
    noise_std: float,
    model: nn.Module | None,
    kappa: float,
    embeddings: bool,
    change: Change,
) -> dict[str, Tensor]:
    """Every matrix in which something stands out, changed; the given tensors elsewhere.

    Args:
        values: parameter name -> tensor in the parameter's shape, computed from releases alone.
        noise_std: standard deviation of the noise in every entry.
        model: tells embeddings and experts from other weights.
        kappa: a matrix is changed if its largest singular value is at least so many edges.
        embeddings: whether embedding tables are matrices too.
        change: what is made of such matrices.
    """

    def of_stack(stack_lmn: Tensor) -> Tensor | None:
        return _changed_stack(stack_lmn, noise_std, kappa, change)

    return changed_matrices(values, model, embeddings, of_stack)


def _changed_stack(
    stack_lmn: Tensor,
    noise_std: float,
    kappa: float,
    change: Change,
) -> Tensor | None:
    """None where nothing changes."""
    if noise_std == 0:
        return None
    detected = detect(stack_lmn, noise_std, kappa)
    if detected is None:
        return None
    candidates, spikes = detected
    shape = stack_lmn.shape[1:]
    some = stack_lmn if len(spikes.values_lp) == len(stack_lmn) else stack_lmn[candidates]
    decided = spikes.values_lp[:, 0] >= kappa * bulk_edge(shape, noise_std)
    if not bool(decided.any()):
        return None
    new = change(some, spikes, shrink(spikes.values_lp, shape, noise_std))
    if not bool(decided.all()):
        new = torch.where(decided.view(-1, 1, 1), new, some)
    if some is stack_lmn:
        return new
    result = stack_lmn.clone()
    result[candidates] = new
    return result
