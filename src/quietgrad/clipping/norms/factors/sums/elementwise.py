"""Sums over positions whose bits do not follow from how far a record is padded.

A library's own sum takes another order at another length: where a record's positions cancel until
rounding alone is left, that rounding is its gradient, and a longer record beside it would change
all of it. Here every addition is an elementwise one, each entry's in the order of the positions:
zeros among them change nothing, whatever the library, its threads or the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.sums.pairs import add_in_pairs
from quietgrad.tensors import accumulation_dtype

SIDE_BY_SIDE = 8  # neighbouring positions of a text


def sum_of_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, ..., n] -> [b, n] in ``dtype``, over all dimensions between: positions of texts, or the
    lines of maps, which padding may make longer at their ends.

    A few neighbours, or a map's whole line, are added side by side, and then each other in pairs.
    """
    b, (length, n) = x.shape[0], x.shape[-2:]
    if not x.shape[1:-1].numel():
        return x.new_zeros(b, n, dtype=dtype)
    lines = x.reshape(b, -1, length, n)
    count = lines.shape[1]
    side = min(length, SIDE_BY_SIDE) if count == 1 else length
    first, *others = [part for line in lines.unbind(1) for part in line.split(side, dim=1)]
    if others and first.dtype == others[0].dtype == dtype and first.shape == others[0].shape:
        total = first + others.pop(0)
    else:
        total = first.to(dtype, copy=True)
    for part in others:
        total[:, : part.shape[1]].add_(part)
    return add_in_pairs(total)


def spread_of_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, ..., n] -> [b] float64 sums of the norms of what ``sum_of_rows`` adds up."""
    norms = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
    return norms.flatten(1).sum(1, dtype=torch.float64)


def spread_of_channels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, channels, *positions] -> [b] float64 norm of the channels' sums of absolute values."""
    sums = torch.linalg.vector_norm(x.flatten(2), ord=1, dim=2, dtype=dtype)
    return torch.linalg.vector_norm(sums, dim=1, dtype=torch.float64)


def sum_over_positions(x: Tensor) -> Tensor:
    """The sum over positions for a layer rule: the same bits for an example however many zeros
    stand behind its positions, and whatever stands beside it. ``x.sum(1)`` is not.

    Args:
        x: [examples, ..., n], positions between; a map's lines are those of the last but one
            dimension. Two dimensions have no positions. Private where the gradient is.

    Returns:
        [examples, n], in float32 (float64 of float64).

    Raises:
        ValueError: for fewer than two dimensions.
    """
    if x.dim() < 2:
        raise ValueError(
            f"x has {x.dim()} dimensions where [examples, positions, n] is summed over positions; "
            "give one number an example as [examples, positions, 1]"
        )
    dtype = accumulation_dtype(x.dtype)
    return x.to(dtype) if x.dim() == 2 else sum_of_rows(x, dtype)


def sum_of_few(x_bkn: Tensor) -> Tensor:
    """[b, k, n] -> [b, n]: one after the other, so that zeros at the end change nothing."""
    total = x_bkn[:, 0].clone()
    for part in x_bkn.unbind(1)[1:]:
        total.add_(part)
    return total
