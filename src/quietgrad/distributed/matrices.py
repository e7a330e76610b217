"""Whole matrices of sharded parameters, as a denoiser needs them: as many at a time as there are
ranks, one on each, which gives back every rank's part of what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quietgrad.tensors import local_of, spread_like

Change = Callable[[str, Tensor], Tensor]


def changed_whole(
    spread: Mapping[str, Tensor], change: Change, rank: int, size: int, group: Any
) -> dict[str, Tensor]:
    """What ``change`` makes of every one, spread again as it was. Memory: one whole parameter on
    each rank, twice. Bytes: each rank's shards out and back.

    Args:
        spread: name -> tensor that is sharded by rows or by columns over all ranks.
        change: name and whole tensor to a tensor of the same shape and dtype.
        rank, size: of this process.
        group: of all ranks, that can move tensors of this device.
    """
    # Of one size, as far as they go: then no rank waits for another's larger one.
    names = sorted(spread, key=lambda name: (str(spread[name].dtype), -spread[name].numel(), name))
    found: dict[str, Tensor] = {}
    while names:
        dtype = spread[names[0]].dtype
        some = [name for name in names[:size] if spread[name].dtype == dtype]
        names = names[len(some) :]
        found |= _changed({name: spread[name] for name in some}, change, rank, size, group)
    return {name: found[name] for name in spread}


def _changed(
    some: dict[str, Tensor], change: Change, rank: int, size: int, group: Any
) -> dict[str, Tensor]:
    """At most one for each rank: the r-th goes to rank r."""
    names = list(some)
    shards = [local_of(t).reshape(-1) for t in some.values()]
    mine = some[names[rank]] if rank < len(names) else None
    # What each rank holds of mine, and entries that this rank holds of each.
    shapes = [] if mine is None else [_held(mine, r, size) for r in range(size)]
    of_mine = [shape.numel() for shape in shapes] or [0] * size
    of_each = [len(shard) for shard in shards] + [0] * (size - len(shards))
    like = shards[0]
    received = like.new_zeros(sum(of_mine))
    dist.all_to_all_single(received, torch.cat(shards), of_mine, of_each, group=group)
    made = received
    if mine is not None:
        dim = _dim_of(mine)
        parts = [
            part.view(shape)
            for part, shape in zip(torch.split(received, of_mine), shapes, strict=True)
        ]
        found = change(names[rank], torch.cat(parts, dim=dim))
        assert found.shape == mine.shape and found.dtype == received.dtype
        back_to = found.split([shape[dim] for shape in shapes], dim=dim)
        made = torch.cat([part.reshape(-1) for part in back_to])
    back = like.new_zeros(sum(of_each))
    dist.all_to_all_single(back, made, of_each, of_mine, group=group)
    own = torch.split(back, of_each[: len(names)])
    return {
        name: spread_like(part.clone().view(local_of(t).shape), t)
        for (name, t), part in zip(some.items(), own, strict=True)
    }


def _dim_of(tensor: Any) -> int:
    """Which dimension is cut: rows, or columns."""
    return int(tensor.placements[0].dim)


def _held(tensor: Tensor, rank: int, size: int) -> torch.Size:
    """Shape of what a rank holds, as torch.chunk cuts."""
    dim = _dim_of(tensor)
    cut = tensor.shape[dim]
    each = -(-cut // size)
    here = max(0, min(each, cut - rank * each))
    return torch.Size([*tensor.shape[:dim], here, *tensor.shape[dim + 1 :]])
