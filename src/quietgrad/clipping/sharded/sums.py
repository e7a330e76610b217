"""Sums over all ranks, each rank its shard: parameters are added one after the other, and sent off
in buckets, so that no process holds a whole model's gradient.

A parameter is sharded as ``fully_shard`` does it: rank r has rows r c to (r + 1) c - 1 of its first
dimension, c = ceil(rows / ranks); the last ranks may have fewer, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quietgrad.clipping.engines.accumulator import Sums
from quietgrad.clipping.engines.summing import settled
from quietgrad.clipping.sharded.company import Company
from quietgrad.tensors import accumulation_dtype, local_of

BUCKET_BYTES = 16 * 2**20


def rows_of_each(rows: int, ranks: int) -> int:
    """c, the rows of the first ranks."""
    return -(-rows // ranks)


@dataclass
class ScatteredSums:
    """This rank's shards of the sums of a batch. Private.

    Attributes:
        company: the ranks.
        parameters: name -> sharded parameter, in an order that is the same on all ranks.
        unit: what sums of micro-batches are brought to multiples of; 0 leaves them as they are.
        shards: name -> this rank's shard of the sum so far.
    """

    company: Company
    parameters: dict[str, Tensor]
    unit: float = 0.0
    shards: Sums = field(default_factory=dict)
    _waiting: list[tuple[str, Tensor | None]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, name: str, whole: Tensor | None) -> None:
        """What this rank's micro-batch adds to a parameter's sum; None adds nothing. All ranks add
        something to the same parameters in the same order.
        """
        p = self.parameters[name]
        dtype = accumulation_dtype(p.dtype)
        size = p.numel() * dtype.itemsize
        if self._waiting and (
            self._bytes + size > BUCKET_BYTES or self._dtype_of(self._waiting[0][0]) != dtype
        ):
            self.send()
        self._waiting.append((name, None if whole is None else settled(whole, self.unit)))
        self._bytes += size

    def send(self) -> None:
        """Adds what is waiting."""
        if not self._waiting:
            return
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        ranks = self.company.size
        widths = [self._width(name) for name, _ in waiting]
        first = self.parameters[waiting[0][0]]
        sent = torch.zeros(
            ranks, sum(widths), dtype=accumulation_dtype(first.dtype), device=first.device
        )
        offset = 0
        for (_, whole), width in zip(waiting, widths, strict=True):
            if whole is not None and width:
                flat = whole.reshape(-1)
                full, rest = divmod(flat.numel(), width)
                sent[:full, offset : offset + width] = flat[: full * width].view(full, width)
                if rest:
                    sent[full, offset : offset + rest] = flat[full * width :]
            offset += width
        names = [name for name, _ in waiting]
        del waiting  # the whole sums, before there is another copy
        received = self.company.scattered(sent)
        for name, part in zip(names, received.split(widths), strict=True):
            local = local_of(self.parameters[name])
            shard = part[: local.numel()].view(local.shape)
            if name in self.shards:
                self.shards[name].add_(shard)
            else:
                self.shards[name] = shard.clone()

    def all_shards(self) -> Sums:
        """Of all parameters: zeros where no rank had a record."""
        return {
            name: self.shards[name]
            if name in self.shards
            else torch.zeros_like(local_of(p), dtype=accumulation_dtype(p.dtype))
            for name, p in self.parameters.items()
        }

    def _width(self, name: str) -> int:
        shape = self.parameters[name].shape
        return rows_of_each(shape[0], self.company.size) * shape[1:].numel()

    def _dtype_of(self, name: str) -> torch.dtype:
        return accumulation_dtype(self.parameters[name].dtype)
