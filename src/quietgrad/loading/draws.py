"""Which records a run's batches hold, drawn ahead where workers read ahead.

A batch is a function of the session's secret root and the step's number, and of nothing that was
released before it. So it does not matter when its coins are thrown: drawn ahead, twice, or thrown
away with a run that was stopped, the batch of a release is the same, and no release depends on
coins of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

Indices = NDArray[np.int64]


class Draws:
    """Indices by step; those that were asked for ahead are kept until they are taken.

    Args:
        draw: step to its indices; the same for the same step.
    """

    def __init__(self, draw: Callable[[int], Indices]) -> None:
        self._draw = draw
        self._ahead: dict[int, Indices] = {}

    def ahead(self, step: int) -> Indices:
        """Of a step that comes later. Private."""
        if step not in self._ahead:
            self._ahead[step] = self._draw(step)
        return self._ahead[step]

    def take(self, step: int) -> Indices:
        """Of the step that comes now; earlier ones are let go. Private."""
        found = self.ahead(step)
        self._ahead = {later: kept for later, kept in self._ahead.items() if later > step}
        return found


class PhysicalBatches(Sampler[list[int]]):
    """The micro-batches of a stretch of steps, for a DataLoader: lists of indices, in order. An
    empty batch has none.

    Args:
        draws: by step.
        size: most records of a micro-batch.
        views: how often each record is asked for, one after the other.
    """

    def __init__(self, draws: Draws, size: int, views: int) -> None:
        self._draws = draws
        self._size = size
        self._views = views
        self.steps = range(0)

    def cut(self, indices: Indices) -> list[Indices]:
        """A batch in micro-batches."""
        return [indices[i : i + self._size] for i in range(0, len(indices), self._size)]

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for part in self.cut(self._draws.ahead(step)):
                yield np.repeat(part, self._views).tolist()
