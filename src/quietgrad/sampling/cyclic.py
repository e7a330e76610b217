"""Cyclic Poisson sampling: records are dealt to b parts once and for all, and step t draws from part t mod b.

Two steps that may use the same record are at least b apart, so with b-banded noise the contributions of one record meet disjoint rows of the mixing matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import require_at_least, require_int, require_rate
from quietgrad.randomness import RandomKey

PARTS_KEY = b"quietgrad parts of a data set"  # public: parts need to be fixed, not secret


def deal(record_ids: Sequence[bytes], bands: int) -> NDArray[np.int64]:
    """[N] the part of every record: a keyed hash of its identity modulo ``bands``, so that no record's coming or going moves another.

    Args:
        record_ids: what identifies each record, such as its content; equal ones fall into the same part.
        bands: b.
    """
    other = next((type(record) for record in record_ids if not isinstance(record, bytes)), None)
    if other is not None:  # never the record itself: it is private
        raise TypeError(f"record_ids holds a record of type {other.__name__}; give bytes, such as text.encode()")
    hashes = (hashlib.blake2b(record, digest_size=8, key=PARTS_KEY).digest() for record in record_ids)
    return np.array([int.from_bytes(h, "little") % bands for h in hashes], dtype=np.int64)


def index_ids(dataset_size: int) -> list[bytes]:
    """Identities of records that are known by their position alone: removing one then means leaving its place empty."""
    return [i.to_bytes(8, "little") for i in range(dataset_size)]


@dataclass(frozen=True, eq=False)
class CyclicPoissonSampler:
    """Batches by independent coin flips within the part whose turn it is.

    Attributes:
        dataset_size: N, records.
        sample_rate: q = B / N; within its part a record is drawn at rate min(1, b q).
        bands: b.
        parts: [N] from ``deal``. With contents as identities private, and so are their sizes: they say more of a record than that it is there. Dealt by index they follow from N and b.
    """

    dataset_size: int
    sample_rate: float
    bands: int
    parts: NDArray[np.int64]

    def __post_init__(self) -> None:
        require_int("dataset_size", self.dataset_size)
        require_at_least("dataset_size", self.dataset_size, 1, "there is nothing to train on")
        require_rate("sample_rate", self.sample_rate)
        require_int("bands", self.bands)
        require_at_least("bands", self.bands, 1, "1 is plain Poisson sampling")
        if self.parts.shape != (self.dataset_size,):
            raise ValueError(
                f"parts has the shape {self.parts.shape} for {self.dataset_size} records; give one part a record"
            )
        if self.parts.min() < 0 or self.parts.max() >= self.bands:
            raise ValueError(f"parts must be in 0 .. {self.bands - 1}; use quietgrad.sampling.deal")

    @property
    def participation_rate(self) -> float:
        """min(1, b q)."""
        return min(1.0, self.bands * self.sample_rate)

    def indices(self, key: RandomKey, step: int) -> NDArray[np.int64]:
        """Sorted indices of step ``step``'s batch; the same for the same key and step. Private. Cost: O(N)."""
        members = np.flatnonzero(self.parts == step % self.bands)
        coins = key.generator("sampling", step).random(self.dataset_size)
        return members[coins[members] < self.participation_rate]
