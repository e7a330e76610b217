"""Poisson sampling: every record enters a batch by a coin of its own, as the accountant assumes.

With more than one part step t draws from part t mod b (cyclic Poisson sampling). Two steps that may
use the same record are then at least b apart, so with b-banded noise the contributions of one
record meet disjoint rows of the mixing matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import require_at_least, require_int, require_rate
from quietgrad.randomness import RandomKey
from quietgrad.sampling.users import UserIndices, UserRecords

# numpy's coins are whole multiples of it below 1: of those up to q - COIN there is a share of at
# most q, of those below q there may be more.
COIN = 2.0**-53


@dataclass(frozen=True, eq=False)
class PoissonSampler:
    """Batches by independent coin flips, among all records or within the part whose turn it is.

    Attributes:
        dataset_size: N, records; with ``users`` N counts users, who are drawn instead.
        sample_rate: q = B / N, with a schedule the highest; within its part a record is drawn at
            rate min(1, b q). A batch may be empty, and its realised size is private.
        bands: b, parts that take turns; 1 is plain Poisson sampling.
        parts: [N] from ``partition``; None for one part. With contents as identities private, and
            so are
            their sizes: they say more of a record than that it is there. Partitioned by index they
            follow from N and b.
        users: whose the records are; None where every record is drawn for itself.

    Raises:
        ValueError, TypeError: naming the setting and the remedy.
    """

    dataset_size: int
    sample_rate: float
    bands: int = 1
    parts: NDArray[np.int64] | None = field(default=None, repr=False)
    users: UserRecords | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_int("dataset_size", self.dataset_size)
        require_at_least("dataset_size", self.dataset_size, 1, "there is nothing to train on")
        require_rate("sample_rate", self.sample_rate)
        require_int("bands", self.bands)
        require_at_least("bands", self.bands, 1, "1 is plain Poisson sampling")
        if self.users is not None and self.users.count != self.dataset_size:
            raise ValueError(
                "users and dataset_size are not of the same data; build plans with "
                "PrivacyConfig.build"
            )
        if self.parts is None:
            if self.bands > 1:
                raise ValueError(
                    f"bands={self.bands} needs parts; use quietgrad.sampling.partition"
                )
            return
        if self.parts.shape != (self.dataset_size,):
            raise ValueError(
                f"parts has the shape {self.parts.shape} for {self.dataset_size} records; give one "
                "part a record"
            )
        if self.parts.min() < 0 or self.parts.max() >= self.bands:
            raise ValueError(
                f"parts must be in 0 .. {self.bands - 1}; use quietgrad.sampling.partition"
            )

    @property
    def participation_rate(self) -> float:
        """min(1, b q)."""
        return min(1.0, self.bands * self.sample_rate)

    @property
    def steps_per_epoch(self) -> int:
        """1 / q, rounded: as many as give every record one turn on average."""
        return max(1, round(1 / self.sample_rate))

    def sizes_of_parts(self, record_identity: str) -> dict[str, list[int]]:
        """[b] ``part_sizes``, where they follow from N and b alone. Partitioned by content they say
        more of a record than that it is there, and are kept nowhere.
        """
        if self.parts is None or record_identity != "index":
            return {}
        return {"part_sizes": np.bincount(self.parts, minlength=self.bands).tolist()}

    def at(self, sample_rate: float) -> PoissonSampler:
        """The same sampler at another rate."""
        if sample_rate == self.sample_rate:
            return self
        return replace(self, sample_rate=sample_rate)

    @property
    def record_count(self) -> int:
        """Of the data set: N, or the records of all users (private)."""
        return self.dataset_size if self.users is None else self.users.records

    def batch(self, key: RandomKey, step: int) -> NDArray[np.int64] | UserIndices:
        """The records of a step's batch, those of a user side by side. Private."""
        drawn = self.indices(key, step)
        return drawn if self.users is None else self.users.drawn(drawn, key, step)

    def indices(self, key: RandomKey, step: int) -> NDArray[np.int64]:
        """Sorted indices of a step's records, or numbers of its users; the same for the same key
        and step. Private. O(N).
        """
        coins = key.generator("sampling", step).random(self.dataset_size)
        drawn = coins <= self.participation_rate - COIN
        if self.parts is not None:
            drawn &= self.parts == step % self.bands
        return np.flatnonzero(drawn)
