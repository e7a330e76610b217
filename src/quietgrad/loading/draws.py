"""Which records a run's batches hold, drawn ahead where workers read ahead.

A batch is a function of the session's secret root and the step's number, and of nothing that was
released before it. So it does not matter when its coins are thrown: drawn ahead, twice, or thrown
away with a run that was stopped, the batch of a release is the same, and no release depends on
coins of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from quietgrad.clipping.capture.examples import whole_users
from quietgrad.loading.collating import Collating
from quietgrad.loading.padding import ends_of
from quietgrad.loading.unsaid import collated
from quietgrad.sampling.users import UserIndices
from quietgrad.tensors import Batch

Indices = NDArray[np.int64] | UserIndices


def records_in(part: Indices) -> NDArray[np.int64]:
    """What is read of a micro-batch, in order."""
    return part.records if isinstance(part, UserIndices) else part


def users_in_parts(indices: UserIndices, size: int) -> Iterator[UserIndices]:
    """Micro-batches of whole users: as ``clipping`` would cut them, so that it cuts no further."""
    for span in whole_users(indices.sizes, size):
        yield indices.span(span)


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
        """A batch in micro-batches; no user is cut."""
        if isinstance(indices, UserIndices):
            return list(users_in_parts(indices, self._size))
        return [indices[i : i + self._size] for i in range(0, len(indices), self._size)]

    def rows_of(self, part: Indices) -> list[int]:
        """What is asked for of a micro-batch's records: every view."""
        return [int(i) for i in np.repeat(records_in(part), self._views)]

    def __iter__(self) -> Iterator[list[int]]:
        steps = self.steps  # of this pass, whatever the next one sets
        return (self.rows_of(part) for step in steps for part in self.cut(self._draws.ahead(step)))


class Numbered(Dataset[tuple[int, Any]]):
    """A data set whose records say which they are, so that what was read can be told from what was
    to be read.

    Attributes:
        dataset: the one that was given.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Any]]:
        at_once = getattr(self.dataset, "__getitems__", None)
        records = [self.dataset[i] for i in indices] if at_once is None else at_once(indices)
        return list(zip(indices, records, strict=True))


class CollateNumbered:
    """A micro-batch's numbers, what ``collate_fn`` makes of its records, and places of a small and
    a large one of them (``ends_of``). In workers.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Batch]) -> None:
        self._collate_fn = Collating(collate_fn)

    def __call__(self, numbered: list[tuple[int, Any]]) -> tuple[list[int], Batch, list[int]]:
        records = [record for _, record in numbered]
        ends = ends_of(records)  # before the script's code may change them
        return [i for i, _ in numbered], collated(self._collate_fn, records), ends
