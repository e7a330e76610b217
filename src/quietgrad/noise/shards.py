"""Sums that are spread over ranks: each rank draws the noise of its shard, and no other's.

A shard is a stretch of rows, so it is a stretch of the parameter's memory, and its noise is what
the whole parameter's noise has there (``quietgrad.noise.sources``): the same on any number of
ranks, and no number of it on two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quietgrad.noise.sources.stretch import Stretch
from quietgrad.tensors import is_spread, local_of, spread_like


def places_of(tensors: Mapping[str, Tensor]) -> dict[str, Stretch]:
    """Name -> where this rank's shard lies, of the tensors that are spread by rows."""
    return {name: _place(t) for name, t in tensors.items() if is_spread(t)}


def _place(tensor: Any) -> Stretch:
    rows, entries = tensor.shape[0], tensor.shape[1:].numel()
    mesh = tensor.device_mesh
    each = -(-rows // mesh.size())  # as torch.chunk cuts
    start = min(mesh.get_local_rank() * each, rows)
    held = min(each, rows - start)
    if tensor.to_local().numel() != held * entries:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is spread as {tensor.placements}, and its "
            "noise is drawn by rows: shard it by fully_shard, on its first dimension"
        )
    return Stretch(start * entries, tensor.numel())


def locals_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of them."""
    return {name: local_of(t) for name, t in tensors.items()}


def spread_again(made: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was made of ``locals_of``, spread as the tensors were."""
    return {
        name: spread_like(t, like[name]) if is_spread(like[name]) else t for name, t in made.items()
    }
