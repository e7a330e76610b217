"""Sums that are spread over ranks: each rank draws the noise of its shard, and no other's.

A shard is a stretch of rows, so it is a stretch of the parameter's memory, or some columns of every
row of one. Its noise is what the whole parameter's noise has there (``quietgrad.noise.sources``):
the same on any number of ranks, and no number of it on two of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.tensors import block_of, is_spread, local_of, spread_like


def places_of(tensors: Mapping[str, Tensor]) -> dict[str, Stretch | Columns]:
    """Name -> where this rank's shard lies, of the tensors that are spread by rows or columns."""
    return {name: _place(t) for name, t in tensors.items() if is_spread(t)}


def _place(tensor: Tensor) -> Stretch | Columns:
    block = block_of(tensor)
    if block.shape[1:] == tuple(tensor.shape[1:]):
        return Stretch(block.start[0] * tensor.shape[1:].numel(), tensor.numel())
    if tensor.dim() == 2:
        first, start = block.start
        return Columns(start, start + block.shape[1], tensor.shape[1], tensor.numel(), first)
    raise ValueError(
        f"a tensor of shape {tuple(tensor.shape)} is spread over ranks in its other dimensions, "
        "and its noise is drawn by rows, or by columns of a matrix: shard it by fully_shard, on "
        "its first dimension, or cut it by ColwiseParallel and RowwiseParallel"
    )


def locals_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of them."""
    return {name: local_of(t) for name, t in tensors.items()}


def spread_again(made: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was made of ``locals_of``, spread as the tensors were."""
    return {
        name: spread_like(t, like[name]) if is_spread(like[name]) else t for name, t in made.items()
    }
