"""Canaries: records made to be found. They are the last m records of the data set; a fair coin, the
audit's own secret, decides of each whether it is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.checks import require_at_least, require_int
from quietgrad.tensors import Batch, batch_size_of

ENTRIES = 64  # of a canary's direction, where there are more canaries than parameters


@dataclass(frozen=True)
class GradientCanaries:
    """Canaries whose gradient is given: a direction of few entries, clipped to C like any record's
    gradient.

    Attributes:
        count: m.
        entries: entries of a direction that are not zero, of equal size and random sign. None: 1
            (Dirac canaries, each with a parameter entry of its own) where there are enough
            parameters, else 64.
    """

    count: int
    entries: int | None = None

    def __post_init__(self) -> None:
        require_int("count", self.count)
        require_at_least("count", self.count, 1, "there is nothing to find without canaries")
        if self.entries is not None:
            require_int("entries", self.entries)
            require_at_least("entries", self.entries, 1, "a direction of zeros has no norm")

    def directions(self, size: int, order: np.random.Generator) -> Directions:
        """Draws them for a gradient of ``size`` entries."""
        entries = self.entries or (1 if self.count <= size else ENTRIES)
        entries = min(entries, size)
        if entries == 1 and self.count <= size:
            positions = order.permutation(size)[: self.count, None]
        else:
            positions = np.stack(
                [order.choice(size, entries, replace=False) for _ in range(self.count)]
            )
        signs = order.choice([-1.0, 1.0], size=positions.shape)
        return Directions(
            size, torch.from_numpy(positions), torch.from_numpy(signs / np.sqrt(entries))
        )


@dataclass(frozen=True)
class Directions:
    """Unit vectors with few entries.

    Attributes:
        size: of the whole gradient.
        positions: [m, entries] int64.
        values: [m, entries] float64; the squares of a row sum to 1.
    """

    size: int
    positions: Tensor
    values: Tensor

    @property
    def disjoint(self) -> bool:
        """Whether no two share an entry, so that one's presence moves no other's score."""
        return len(torch.unique(self.positions)) == self.positions.numel()

    def rows(self, chosen: NDArray[np.int64], length: float, like: Tensor) -> Tensor:
        """[chosen, size] canaries' gradients, of norm ``length``."""
        index = torch.from_numpy(chosen)
        made = like.new_zeros(len(chosen), self.size)
        return made.scatter_(
            1, self.positions[index].to(like.device), (self.values[index] * length).to(made)
        )

    def products(self, vector: Tensor, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """[chosen] inner products of a gradient, [size], with the canaries' directions."""
        index = torch.from_numpy(chosen)
        entries = vector[self.positions[index].to(vector.device)].double().cpu()
        return (entries * self.values[index]).sum(1).numpy()


@dataclass(frozen=True)
class InputCanaries:
    """Canaries that are records like others, made so that their gradients are long and unlike the
    rest: mislabelled, or far from the data. They must be public or made up.

    Attributes:
        batch: m examples as the loss takes them.
    """

    batch: Batch

    def __post_init__(self) -> None:
        require_at_least("count", self.count, 1, "there is nothing to find without canaries")

    @property
    def count(self) -> int:
        return batch_size_of(self.batch)
