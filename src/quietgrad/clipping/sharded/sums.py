"""Sums over all ranks, each rank its shard: parameters are added one after the other, written into
the bucket that will be sent, and dropped, so that no process holds a whole model's gradient. While
a full bucket is on its way the next one is filled.

A parameter, or this rank's part of it, is sharded as ``fully_shard`` does it: rank r has rows r c
to (r + 1) c - 1 of its first dimension, c = ceil(rows / ranks); the last ranks may have fewer, or
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.engines.accumulator import Sums
from quietgrad.clipping.engines.summing import settled
from quietgrad.clipping.sharded.company import Arriving, Company
from quietgrad.tensors import accumulation_dtype, local_of

# Two buckets are there at a time, each with its sums; a backend may hold a copy of one.
BUCKET_BYTES = 4 * 2**20


def rows_of_each(rows: int, ranks: int) -> int:
    """c, the rows of the first ranks."""
    return -(-rows // ranks)


class Bucket(NamedTuple):
    """Parameters that are sent together.

    Attributes:
        widths: name -> entries of a rank's rows, in the order in which they come.
        dtype: of their sums.
    """

    widths: dict[str, int]
    dtype: torch.dtype

    @property
    def last(self) -> str:
        return next(reversed(self.widths))


def buckets_of(
    parameters: dict[str, Tensor], ranks: int, shapes: Mapping[str, torch.Size] | None = None
) -> list[Bucket]:
    """Cut where the dtype changes, or a bucket is full; a larger parameter has one of its own."""
    found: list[Bucket] = []
    held = 0
    for name, p in parameters.items():
        dtype = accumulation_dtype(p.dtype)
        shape = p.shape if shapes is None else shapes[name]
        width = rows_of_each(shape[0], ranks) * shape[1:].numel()
        size = ranks * width * dtype.itemsize
        if not found or held + size > BUCKET_BYTES or found[-1].dtype != dtype:
            found.append(Bucket({}, dtype))
            held = 0
        found[-1].widths[name] = width
        held += size
    return found


@dataclass
class ScatteredSums:
    """This rank's shards of the sums of a batch. Private.

    Attributes:
        company: the ranks.
        parameters: name -> sharded parameter, in an order that is the same on all ranks.
        unit: what sums of micro-batches are brought to multiples of; 0 leaves them as they are.
        shapes: name -> shape of the sums that are scattered; None: of the parameters.
        shards: name -> this rank's shard of the sum so far.
    """

    company: Company
    parameters: dict[str, Tensor]
    unit: float = 0.0
    shapes: Mapping[str, torch.Size] | None = None
    shards: Sums = field(default_factory=dict)
    _place: dict[str, tuple[Bucket, int]] = field(default_factory=dict)
    _filling: Tensor | None = None
    _away: tuple[Bucket, Arriving] | None = None

    def __post_init__(self) -> None:
        for bucket in buckets_of(self.parameters, self.company.size, self.shapes):
            offset = 0
            for name, width in bucket.widths.items():
                self._place[name] = bucket, offset
                offset += width

    def add(self, name: str, whole: Tensor | None) -> None:
        """What this rank's micro-batch adds to a parameter's sum; None adds nothing. All ranks add
        something to every parameter, in their order.
        """
        bucket, offset = self._place[name]
        p = self.parameters[name]
        if self._filling is None:
            assert offset == 0, name
            # Every entry is written below, those of rows that no rank has too.
            self._filling = torch.empty(
                self.company.size, sum(bucket.widths.values()), dtype=bucket.dtype, device=p.device
            )
        place = self._filling[:, offset : offset + bucket.widths[name]]
        _write(place, None if whole is None else settled(whole, self.unit))
        if name == bucket.last:
            filled, self._filling = self._filling, None
            self._take_in()
            self._away = bucket, self.company.scattered(filled)

    def finish(self) -> None:
        """Waits for what is on its way, once all parameters of a micro-batch were added."""
        assert self._filling is None
        self._take_in()

    def all_shards(self) -> Sums:
        """Of all parameters: zeros where no rank had a record."""
        return {
            name: self.shards[name]
            if name in self.shards
            else torch.zeros_like(local_of(p), dtype=accumulation_dtype(p.dtype))
            for name, p in self.parameters.items()
        }

    def _take_in(self) -> None:
        if self._away is None:
            return
        (bucket, arriving), self._away = self._away, None
        received = arriving().split(list(bucket.widths.values()))
        for name, part in zip(bucket.widths, received, strict=True):
            local = local_of(self.parameters[name])
            shard = part[: local.numel()].view(local.shape)
            if name in self.shards:
                self.shards[name].add_(shard)
            else:
                self.shards[name] = shard.clone()


def _write(place_wn: Tensor, whole: Tensor | None) -> None:
    """A parameter's rows into the places of the ranks that hold them; zeros elsewhere."""
    width = place_wn.shape[1]
    if whole is None or width == 0:
        place_wn.zero_()
        return
    flat = whole.reshape(-1)
    full, rest = divmod(flat.numel(), width)
    place_wn[:full] = flat[: full * width].view(full, width)
    if full < len(place_wn):
        place_wn[full:].zero_()
        place_wn[full, :rest] = flat[full * width :]
