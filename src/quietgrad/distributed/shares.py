"""Which rank clips which records of a batch: a public rule on top of the one draw that all make.

Every rank draws the whole batch from the run's keyed stream, so no rank has coins of its own, and
the sampling rate that is accounted for is that of the batch. The batch is cut into blocks in its
order, and block i is rank i mod W's. A block is a single record (or user), which shares out evenly;
or, where the size of micro-batches was given, a micro-batch: then micro-batches are the same on any
number of ranks, and so are the sums that float64 makes of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quietgrad.loading.draws import users_in_parts
from quietgrad.sampling.users import UserIndices

Indices = NDArray[np.int64] | UserIndices
KEPT = 1024  # steps that may be drawn ahead


def share_of(whole: Indices, rank: int, size: int, block: int) -> Indices:
    """The records of one rank, in the order of the batch. Private. The shares of all ranks hold
    every record once.

    Args:
        whole: the batch.
        rank, size: whose share, of how many ranks.
        block: records that stay together; no user is ever cut.
    """
    if size == 1:
        return whole
    if not isinstance(whole, UserIndices):
        return whole[(np.arange(len(whole)) // block) % size == rank]
    if block == 1:
        own = list(range(rank, len(whole), size))
        parts = [whole.span(slice(i, i + 1)) for i in own]
    else:
        parts = list(users_in_parts(whole, block))[rank::size]
    none = np.zeros(0, dtype=np.int64)
    return UserIndices(
        np.concatenate([none, *(part.users for part in parts)]),
        np.concatenate([none, *(part.records for part in parts)]),
        tuple(size for part in parts for size in part.sizes),
    )


class Shares:
    """Step to this rank's share of its batch; remembers how many records the batch has.

    Args:
        draw: step to the whole batch, the same on every rank.
        rank, size: of this process.
        block: see ``share_of``.

    Attributes:
        records: digest of some records as they lie for this rank, which all ranks compare.
    """

    def __init__(
        self, draw: Callable[[int], Indices], rank: int = 0, size: int = 1, block: int = 1
    ) -> None:
        self._draw = draw
        self._rank = rank
        self._size = size
        self.block = block
        self.records = ""
        self._counts: dict[int, int] = {}

    def __call__(self, step: int) -> Indices:
        whole = self._draw(step)
        self._counts[step] = len(whole)
        if len(self._counts) > KEPT:
            del self._counts[min(self._counts)]
        return share_of(whole, self._rank, self._size, self.block)

    def whole(self, step: int) -> int:
        """Records (or users) of the whole batch. Private."""
        if step not in self._counts:
            self(step)
        return self._counts[step]
