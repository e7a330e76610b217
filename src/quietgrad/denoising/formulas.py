"""What noise does to singular values, and what undoes it best: the formulas of random matrix theory
for a low-rank matrix in Gaussian noise.

Symbols: m, n rows and columns; s standard deviation of the noise in every entry; lam a singular
value of the signal, y the one observed in its place; e = s (sqrt m + sqrt n) the bulk's upper edge.
Sources: Shabalin and Nobel 2013; Gavish and Donoho 2014; "Sample-Efficient Differentially Private
Fine-Tuning via Gradient Matrix Denoising", eqs. 3-8 (docs/denoising.md). All functions act
elementwise, in the dtype of their tensor, and cost a few operations an entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quietgrad.checks import require_at_least


def bulk_edge(shape: Sequence[int], noise_std: float) -> float:
    """s (sqrt m + sqrt n): the largest singular value of pure noise, up to a fluctuation of
    relative size min(m, n)^(-2/3).
    """
    m, n = _sides(shape)
    return _std(noise_std) * (math.sqrt(m) + math.sqrt(n))


def detection_threshold(shape: Sequence[int], noise_std: float) -> float:
    """s (m n)^(1/4): a weaker signal leaves no trace in the singular values (eq. 3)."""
    m, n = _sides(shape)
    return _std(noise_std) * (m * n) ** 0.25


def observed_singular_values(signal: Tensor, shape: Sequence[int], noise_std: float) -> Tensor:
    """F: where a signal's singular values are found after the noise; those below the threshold at
    the bulk's edge (eq. 3).

    Args:
        signal: any shape, non-negative.
        shape: (m, n) of the matrix.
        noise_std: s.
    """
    m, n = _sides(shape)
    s = _std(noise_std)
    lam = signal.clamp(min=max(detection_threshold(shape, s), torch.finfo(signal.dtype).tiny))
    # At the threshold itself F is the edge, so the clamp is the second case of eq. 3.
    return torch.where(
        signal > 0, ((lam + s * s * n / lam) * (lam + s * s * m / lam)).sqrt(), bulk_edge(shape, s)
    )


def signal_singular_values(observed: Tensor, shape: Sequence[int], noise_std: float) -> Tensor:
    """The inverse of F above the bulk's edge; 0 below it, where nothing can be said."""
    m, n = _sides(shape)
    s = _std(noise_std)
    root = _root(observed, shape, s)
    middle = observed.square() - s * s * (m + n)
    return torch.where(
        observed > bulk_edge(shape, s), ((middle + root) / 2).clamp(min=0).sqrt(), 0.0
    )


def shrink(singular_values: Tensor, shape: Sequence[int], noise_std: float) -> Tensor:
    """The coefficients that make the mean squared error smallest: sqrt((y^2 - s^2 (m+n))^2 - 4 m n
    s^4) / y above the edge, else 0.

    Equal to eq. 8, lam times both cosines, without its divisions by small differences.

    Args:
        singular_values: y, any shape, non-negative, of the noisy matrix.
        shape: (m, n) of the matrix.
        noise_std: s; 0 returns the values unchanged.

    Raises:
        ValueError: for a shape that is no matrix, or a negative standard deviation.
    """
    root = _root(singular_values, shape, _std(noise_std))
    tiny = torch.finfo(singular_values.dtype).tiny
    return root / singular_values.clamp(min=tiny)


def squared_overlaps(
    signal: Tensor, shape: Sequence[int], noise_std: float
) -> tuple[Tensor, Tensor]:
    """Squared cosines between the signal's left and right singular vectors and the observed ones
    (eqs. 4-6); 0 below the threshold.
    """
    m, n = _sides(shape)
    s2 = _std(noise_std) ** 2
    lam2 = signal.square()
    above = signal > detection_threshold(shape, noise_std)
    safe = torch.where(above, lam2, 1.0)
    excess = safe.square() - m * n * s2 * s2
    left = excess / (safe.square() + m * safe * s2)
    right = excess / (safe.square() + n * safe * s2)
    return torch.where(above, left, 0.0), torch.where(above, right, 0.0)


def _root(y: Tensor, shape: Sequence[int], s: float) -> Tensor:
    # (y^2 - s^2 (m+n))^2 - 4 m n s^4 = (y^2 - upper^2) (y^2 - lower^2), each a product of a sum and
    # a difference: no cancellation.
    m, n = _sides(shape)
    upper, lower = s * (math.sqrt(m) + math.sqrt(n)), s * abs(math.sqrt(m) - math.sqrt(n))
    first = ((y - upper).clamp(min=0) * (y + upper)).sqrt()
    second = ((y - lower).clamp(min=0) * (y + lower)).sqrt()
    return first * second


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"shape={tuple(shape)} must be two positive sides (m, n) of a matrix")
    return int(shape[0]), int(shape[1])


def _std(noise_std: float) -> float:
    require_at_least(
        "noise_std", noise_std, 0, "pass the standard deviation of the noise in one entry"
    )
    return float(noise_std)
