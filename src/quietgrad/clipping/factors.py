"""Per-example gradients in factored form: what a layer's rule hands to the norm estimators and to the weighted sum.

Every matrix-shaped parameter of every layer has per-example gradients M_i = left_i^T right_i, summed over the uses of the parameter.
Shape legend: b examples, g diagonal blocks (groups of a convolution; 1 elsewhere), t positions, p rows, d columns, n entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseFactors:
    """One use of a matrix parameter: M_i = left_i^T right_i per block.

    Attributes:
        left_bgtp: rows factor (for a Linear layer the output gradient).
        right_bgtd: columns factor (for a Linear layer the input).
    """

    left_bgtp: Tensor
    right_bgtd: Tensor


@dataclass(frozen=True)
class OneHotFactors:
    """One use of an embedding table: left is the one-hot matrix of ``ids``, never formed.

    Attributes:
        ids_bt: row of the table that each position reads.
        right_bgtd: gradient at each position, zero at positions that read the padding row; g = 1.
        rows: number of rows of the table.
    """

    ids_bt: Tensor
    right_bgtd: Tensor
    rows: int


@dataclass(frozen=True)
class DirectGradients:
    """Per-example gradients themselves, for parameters that are small per example (biases, normalisation weights, fallback)."""

    values_bn: Tensor


MatrixFactors = DenseFactors | OneHotFactors
Contribution = MatrixFactors | DirectGradients


def keep_examples(contribution: Contribution, keep_b: Tensor) -> Contribution:
    """Sets the gradients of dropped examples to exactly zero, also where they are infinite or not a number."""

    def zero(x: Tensor) -> Tensor:
        mask = keep_b.view(-1, *([1] * (x.dim() - 1)))
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    if isinstance(contribution, DenseFactors):
        return DenseFactors(zero(contribution.left_bgtp), zero(contribution.right_bgtd))
    if isinstance(contribution, OneHotFactors):
        return OneHotFactors(contribution.ids_bt, zero(contribution.right_bgtd), contribution.rows)
    return DirectGradients(zero(contribution.values_bn))


def positions(use: MatrixFactors) -> int:
    return int(use.right_bgtd.shape[2])


def rows_and_columns(use: MatrixFactors) -> tuple[int, int]:
    rows = use.rows if isinstance(use, OneHotFactors) else int(use.left_bgtp.shape[3])
    return rows, int(use.right_bgtd.shape[3])


def weighted_sum(contribution: Contribution, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """sum_i weights_i M_i in the parameter's shape: one product of the size of an ordinary weight gradient."""
    if isinstance(contribution, DirectGradients):
        return torch.einsum("b,bn->n", weights_b.to(dtype), contribution.values_bn.to(dtype)).reshape(shape)
    right = contribution.right_bgtd.to(dtype)
    weights_b111 = weights_b.to(dtype).view(-1, 1, 1, 1)
    b, g, t, d = right.shape
    if isinstance(contribution, OneHotFactors):
        result = torch.zeros(contribution.rows, d, dtype=dtype, device=right.device)
        result.index_add_(0, contribution.ids_bt.reshape(-1), (right * weights_b111).reshape(b * t, d))
        return result.reshape(shape)
    left = contribution.left_bgtp.to(dtype)
    p = left.shape[3]
    # The weights go to the smaller factor.
    if p <= d:
        left = left * weights_b111
    else:
        right = right * weights_b111
    if g == 1:
        return (left.reshape(b * t, p).T @ right.reshape(b * t, d)).reshape(shape)
    return torch.einsum("bgtp,bgtd->gpd", left, right).reshape(shape)
