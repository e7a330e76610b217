"""The sampler that older scripts give their loader. ``make_private`` draws batches of its own, at
rate 1 / len(data_loader), whatever the loader's sampler is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from quietgrad.checks import require_at_least, require_int
from quietgrad.integrations.opacus.absent import absent


class UniformWithReplacementSampler(Sampler[list[int]]):
    """Batches in which every record has a coin of its own.

    Args:
        num_samples: records.
        sample_rate: of each coin.
        generator: torch's; None: the default one.
        steps: batches of a pass; None: 1 / ``sample_rate``.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: Any = None,
        steps: int | None = None,
    ) -> None:
        require_int("num_samples", num_samples)
        require_at_least("num_samples", num_samples, 1, "of records")
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.generator = generator
        self.steps = int(1 / sample_rate) if steps is None else steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            coins = torch.rand(self.num_samples, generator=self.generator)
            yield (coins < self.sample_rate).nonzero().flatten().tolist()


__getattr__ = absent(
    __name__,
    {
        "DistributedUniformWithReplacementSampler": "an Opacus script runs on one process here "
        "(docs/many_processes.md)",
    },
)
