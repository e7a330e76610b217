"""Whole matrices of sharded parameters, as a denoiser needs them: as many at a time as there are
ranks, one on each, which gives back every rank's part of what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quietgrad.tensors import Block, local_of, spread_like

Change = Callable[[str, Tensor], Tensor]
BlockOn = Callable[[Tensor, int], Block]


def changed_whole(
    spread: Mapping[str, Tensor],
    change: Change,
    rank: int,
    size: int,
    group: Any,
    block_on: BlockOn,
) -> dict[str, Tensor]:
    """What ``change`` makes of every one, spread again as it was. Memory: one whole parameter on
    each rank, twice. Bytes: each rank's shards out and back.

    Args:
        spread: name -> tensor that is spread over ranks; copies of a block are alike.
        change: name and whole tensor to a tensor of the same shape and dtype.
        rank, size: of this process.
        group: of all ranks, that can move tensors of this device.
        block_on: tensor and rank to the block that the rank holds.
    """
    # Of one size, as far as they go: then no rank waits for another's larger one.
    names = sorted(spread, key=lambda name: (str(spread[name].dtype), -spread[name].numel(), name))
    found: dict[str, Tensor] = {}
    while names:
        dtype = spread[names[0]].dtype
        some = [name for name in names[:size] if spread[name].dtype == dtype]
        names = names[len(some) :]
        given = {name: spread[name] for name in some}
        found |= _changed(given, change, rank, size, group, block_on)
    return {name: found[name] for name in spread}


def _changed(
    some: dict[str, Tensor], change: Change, rank: int, size: int, group: Any, block_on: BlockOn
) -> dict[str, Tensor]:
    """At most one for each rank: the r-th goes to rank r."""
    names = list(some)
    shards = [local_of(t).reshape(-1) for t in some.values()]
    # Of copies the first is sent; what is made of the whole goes to all.
    sent = [s if _is_first(block_on, t, rank) else s[:0] for s, t in zip(shards, some.values())]
    mine = some[names[rank]] if rank < len(names) else None
    # What each rank holds of mine, and entries that this rank holds of each.
    blocks = [] if mine is None else [block_on(mine, r) for r in range(size)]
    of_mine = [torch.Size(block.shape).numel() for block in blocks] or [0] * size
    of_each = [len(shard) for shard in shards] + [0] * (size - len(shards))
    to_me = [
        count if mine is not None and _is_first(block_on, mine, r) else 0
        for r, count in enumerate(of_mine)
    ]
    from_me = [len(part) for part in sent] + [0] * (size - len(sent))
    like = shards[0]
    received = like.new_zeros(sum(to_me))
    dist.all_to_all_single(received, torch.cat(sent), to_me, from_me, group=group)
    made = like.new_zeros(0)
    if mine is not None:
        whole = like.new_zeros(mine.shape)
        for block, part in zip(blocks, torch.split(received, to_me), strict=True):
            if len(part):
                whole[_place(block)] = part.view(block.shape)
        found = change(names[rank], whole)
        assert found.shape == mine.shape and found.dtype == received.dtype
        made = torch.cat([found[_place(block)].reshape(-1) for block in blocks])
    back = like.new_zeros(sum(of_each))
    dist.all_to_all_single(back, made, of_each, of_mine, group=group)
    own = torch.split(back, of_each[: len(names)])
    return {
        name: spread_like(part.clone().view(local_of(t).shape), t)
        for (name, t), part in zip(some.items(), own, strict=True)
    }


def _is_first(block_on: BlockOn, tensor: Tensor, rank: int) -> bool:
    """Whether no rank before holds the same block."""
    own = block_on(tensor, rank)
    return all(block_on(tensor, r) != own for r in range(rank))


def _place(block: Block) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + held) for start, held in zip(block.start, block.shape, strict=True)
    )
