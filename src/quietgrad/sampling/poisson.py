"""Poisson sampling: every record enters a batch independently with the same probability, as the accountant assumes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import require_at_least, require_int, require_rate
from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class PoissonSampler:
    """Batches by independent coin flips.

    Attributes:
        dataset_size: N, records.
        sample_rate: q; a batch has q N records on average, and may be empty. Its realised size is private.
    """

    dataset_size: int
    sample_rate: float

    def __post_init__(self) -> None:
        require_int("dataset_size", self.dataset_size)
        require_at_least("dataset_size", self.dataset_size, 1, "there is nothing to train on")
        require_rate("sample_rate", self.sample_rate)

    def indices(self, key: RandomKey, step: int) -> NDArray[np.int64]:
        """Sorted indices of step ``step``'s batch; the same for the same key and step. Private. Cost: O(N)."""
        coins = key.generator("sampling", step).random(self.dataset_size)
        return np.flatnonzero(coins < self.sample_rate)
