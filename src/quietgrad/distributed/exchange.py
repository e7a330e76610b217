"""Sums of all ranks to the rank that owns a parameter, and back what it made of them.

Every parameter has one owner, who adds up the ranks' sums, draws the noise and keeps the noise's
earlier rows. Two exchanges of all to all move as many bytes as one all-reduce (2 (W-1)/W of the
parameters, for each rank), and noise is drawn once, W-th part by W-th part. The owner adds in the
order of the ranks, so that no timing and no algorithm of a library decides how sums are rounded.

Tensors travel in buckets of a bounded size, parameters of one dtype and device together. They
arrive in zeros: where a backend breaks off and says so later (NCCL on a stream), what did not
arrive is then no other tensor's memory, and a sum that lacks a rank's part is bounded like a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
Group = dist.ProcessGroup


def owners_of(entries: Mapping[str, int], size: int) -> dict[str, int]:
    """Name -> owner: the largest first, each to the rank that has least so far. A function of names
    and sizes alone.
    """
    loads = [0] * size
    owner: dict[str, int] = {}
    for name in sorted(entries, key=lambda name: (-entries[name], name)):
        rank = min(range(size), key=lambda r: (loads[r], r))
        owner[name] = rank
        loads[rank] += entries[name]
    return owner


def buckets(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, cut where dtype or device changes, or a bucket is full."""
    found: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    held: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, t in tensors.items():
        kind = (t.dtype, t.device)
        found.setdefault(kind, []).append(name)
        held[kind] = held.get(kind, 0) + t.numel() * t.element_size()
        if held[kind] >= BUCKET_BYTES:
            yield found.pop(kind)
            held[kind] = 0
    yield from found.values()


def sums_of_owner(
    sums: Mapping[str, Tensor], owner: Mapping[str, int], rank: int, size: int, group: Group
) -> dict[str, Tensor]:
    """The sums over all ranks of the parameters that ``rank`` owns. Private.

    Args:
        sums: this rank's, in the same order on all ranks.
        owner: name -> rank.
        rank, size: of this process.
        group: that can move tensors of this device.
    """
    whole: dict[str, Tensor] = {}
    for names in buckets(sums):
        by_owner = [[name for name in names if owner[name] == r] for r in range(size)]
        splits = [sum(sums[name].numel() for name in own) for own in by_owner]
        like = sums[names[0]]
        sent = torch.cat([sums[name].detach().reshape(-1) for own in by_owner for name in own])
        mine = splits[rank]
        received = like.new_zeros(mine * size)
        dist.all_to_all_single(received, sent, [mine] * size, splits, group=group)
        total = received[:mine]
        for r in range(1, size):
            total += received[r * mine : (r + 1) * mine]
        whole |= _cut(total.clone() if size > 1 else total, by_owner[rank], sums)
    return whole


def gathered(
    made: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    owner: Mapping[str, int],
    rank: int,
    size: int,
    group: Group,
) -> dict[str, Tensor]:
    """What all owners made of their parameters, on every rank, in the order of ``like``.

    Args:
        made: of the parameters that this rank owns, in their dtypes and shapes.
        like: all parameters.
        owner, rank, size, group: as above.
    """
    found: dict[str, Tensor] = {}
    for names in buckets(like):
        by_owner = [[name for name in names if owner[name] == r] for r in range(size)]
        splits = [sum(like[name].numel() for name in own) for own in by_owner]
        some = like[names[0]]
        own = [made[name].detach().reshape(-1) for name in by_owner[rank]]
        mine = torch.cat(own) if own else some.new_empty(0)
        received = some.new_zeros(sum(splits))
        sent = mine.repeat(size)
        dist.all_to_all_single(received, sent, splits, [len(mine)] * size, group=group)
        found |= _cut(received, [name for part in by_owner for name in part], like)
    return {name: found[name] for name in like}


def _cut(flat: Tensor, names: list[str], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    cut = torch.split(flat, [like[name].numel() for name in names]) if names else ()
    return {name: part.view(like[name].shape) for name, part in zip(names, cut, strict=True)}
