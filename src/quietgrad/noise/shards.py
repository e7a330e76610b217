"""Sums that are spread over ranks: each rank draws the noise of its shard, and no other's.

A shard is a stretch of rows, so it is a stretch of the parameter's memory, or some columns of every
row. Its noise is what the whole parameter's noise has there (``quietgrad.noise.sources``): the same
on any number of ranks, and no number of it on two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.tensors import is_spread, local_of, spread_like


def places_of(tensors: Mapping[str, Tensor]) -> dict[str, Stretch | Columns]:
    """Name -> where this rank's shard lies, of the tensors that are spread by rows or columns."""
    return {name: _place(t) for name, t in tensors.items() if is_spread(t)}


def _place(tensor: Any) -> Stretch | Columns:
    mesh, placements = tensor.device_mesh, tensor.placements
    plain = len(placements) == 1 and type(placements[0]).__name__ == "Shard"
    dim = placements[0].dim if plain else 0
    cut = tensor.shape[dim]
    each = -(-cut // mesh.size())  # as torch.chunk cuts
    start = min(mesh.get_local_rank() * each, cut)
    held = min(each, cut - start)
    expected = (*tensor.shape[:dim], held, *tensor.shape[dim + 1 :])
    by_columns = dim == 1 and tensor.dim() == 2
    if not plain or (dim and not by_columns) or tuple(tensor.to_local().shape) != expected:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is spread as {placements}, and its noise is "
            "drawn by rows or by columns of a matrix: shard it by fully_shard, on its first "
            "dimension, or cut it by ColwiseParallel and RowwiseParallel"
        )
    if by_columns:
        return Columns(start, start + held, cut, tensor.numel())
    return Stretch(start * tensor.shape[1:].numel(), tensor.numel())


def locals_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of them."""
    return {name: local_of(t) for name, t in tensors.items()}


def spread_again(made: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was made of ``locals_of``, spread as the tensors were."""
    return {
        name: spread_like(t, like[name]) if is_spread(like[name]) else t for name, t in made.items()
    }
