"""Norms of biases and scales, which are many and small: they wait for each other, and are measured
together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quietgrad.clipping.norms.rounding import NormSums, direct, least_of

# Entries of all that wait for each other. Of one example: how they are added up must not depend on
# how many examples there are.
TOGETHER = 2**14


@dataclass
class Waiting:
    """Gradients of one group, and how many entries they have of one example."""

    values: list[Tensor] = field(default_factory=list)
    entries: int = 0


@dataclass
class Small:
    """Per-example gradients of one micro-batch that wait. Private.

    Attributes:
        sums: what norms are added to.
    """

    sums: NormSums
    _waiting: dict[tuple[int, torch.dtype], Waiting] = field(default_factory=dict, repr=False)

    def add(self, group: int, values_bn: Tensor, spread_b: Tensor | None) -> None:
        """One parameter's gradients, and what they are sums of, where that is known."""
        if spread_b is not None:
            self.sums.add_least(group, least_of(spread_b))
        waiting = self._waiting.setdefault((group, values_bn.dtype), Waiting())
        waiting.values.append(values_bn)
        waiting.entries += values_bn.shape[1]
        if waiting.entries > TOGETHER:
            self._measure(group, values_bn.dtype)

    def measure(self) -> None:
        """Adds the norms of all that wait, which then wait no more."""
        for group, dtype in list(self._waiting):
            self._measure(group, dtype)

    def _measure(self, group: int, dtype: torch.dtype) -> None:
        joined = torch.cat(self._waiting.pop((group, dtype)).values, dim=1)
        self.sums.add(group, direct(joined), joined.shape[1])
