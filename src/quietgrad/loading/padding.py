"""A few records collated alone and together, to see that no loss follows from how ``collate_fn``
brings records to one size. In a batch that is made, rows have one size already: no look at it tells
what was filled up or cut off.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture.views import chosen_rows
from quietgrad.clipping.soundness.company.padding import require_padding_unread
from quietgrad.clipping.soundness.guard import is_guarded
from quietgrad.clipping.soundness.kept.lazily import as_before
from quietgrad.generators import keyed_generators
from quietgrad.tensors import Batch, batch_size_of, fields_of, tensors_of, to_device

TOGETHER = 8  # records that are looked at

Size = tuple[int, ...]


class Noted(NamedTuple):
    """A micro-batch of which some records could be looked at. Private.

    Attributes:
        release: that it is read for.
        rows: numbers of its records, a small and a large one first.
        sizes: of its rows, where nothing tells which record is small or large; else empty.
    """

    release: int
    rows: list[int]
    sizes: list[Size]


class PaddingLooks:
    """When records are looked at, and what was seen: at the guard's releases, and in between where
    records of differing sizes come and none did before.

    Args:
        dataset, collate_fn: of the loader.
        seed: of what is drawn in reading. Secret.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Batch], seed: Callable[[], int]
    ) -> None:
        self._dataset, self._collate, self._seed = dataset, collate_fn, seed
        self._unseen: Noted | None = None
        self._usual: list[Size] | None = None
        # Pair that was looked at, by its id -> the last release at which sizes differed.
        self._seen: dict[int, tuple[BoundClipper, int]] = {}

    def note(
        self, release: int, rows: list[int], ends: list[int], batch: Batch, first: bool
    ) -> None:
        """Which records could be looked at.

        Args:
            release: that they are read for.
            rows: numbers of a micro-batch's records.
            ends: places of a small and a large one among them; none where they are of one size.
            batch: what ``collate_fn`` made of them. Records of one size may be cut to the longest
                that is not padding: then rows are of another size from one to the next.
            first: whether it is the batch's first micro-batch.
        """
        self._unseen, sizes = None, row_sizes(batch)
        another, self._usual = self._usual not in (None, sizes), sizes
        # Where sizes are not known (objects of the user's own) the first ones may do.
        if len(rows) > 1 and (ends or another or (first and is_guarded(release))):
            chosen = dict.fromkeys([*(rows[place] for place in ends), *rows])
            self._unseen = Noted(release, list(chosen), [] if ends else sizes)

    def look(self, bound: BoundClipper, device: torch.device) -> None:
        """At what was noted last, where it is due, once it was clipped: the guard is the first that
        shows a record to the model.

        Raises:
            Mixes: where a record's loss depends on the sizes of others.
        """
        unseen, self._unseen = self._unseen, None
        # Where ranks run a model together, none makes passes of its own.
        if unseen is None or type(bound) is not BoundClipper:
            return
        _, last = self._seen.get(id(bound), (bound, None))
        if last == unseen.release or not (last is None or is_guarded(unseen.release)):
            return
        made = self._collated(unseen.rows[:TOGETHER])
        if made is not None and unseen.sizes and row_sizes(made[1]) != unseen.sizes:
            made = self._collated(self._ends_alone(unseen.rows))
        if made is None:
            return
        alone = [(place, to_device(one, device)) for place, one in made[0]]
        together = to_device(made[1], device)
        model, loss, first = bound.model, bound.per_example_loss, last is None
        if require_padding_unread(model, loss, together, alone, thorough=first):
            self._seen[id(bound)] = bound, unseen.release

    def _ends_alone(self, rows: list[int]) -> list[int]:
        """``rows``, those first that are smallest and largest where each is collated alone."""
        sizes = []
        for row in rows:
            made = self._collated([row])
            size = [] if made is None else row_sizes(made[1])
            sizes.append((sum(n for some in size for n in some), row))
        return list(dict.fromkeys([min(sizes)[1], max(sizes)[1], *rows]))[:TOGETHER]

    def _collated(self, rows: list[int]) -> tuple[list[tuple[int, Batch]], Batch] | None:
        """Records each in a batch of its own, and in one; None where ``collate_fn`` draws, so that
        they are others each time, or where they are read in workers alone (a file opened there).
        """
        quietly = warnings.catch_warnings()  # once said is enough, and of one record others may be
        with keyed_generators(self._seed()), as_before(nn.Identity(), self._collate), quietly:
            warnings.simplefilter("ignore")
            try:
                records = [self._dataset[row] for row in rows]
            except Exception:
                return None

            def made(some: list[Any]) -> Batch:
                return self._collate(copy.deepcopy(some))

            alone, together, again = _alone(made, records), made(records), made(records)
        pairs = zip(tensors_of(together), tensors_of(again), strict=True)
        same = all(torch.equal(torch.nan_to_num(t), torch.nan_to_num(u)) for t, u in pairs)
        return (alone, together) if same and batch_size_of(together) == len(rows) else None


def _alone(made: Callable[[list[Any]], Batch], records: list[Any]) -> list[tuple[int, Batch]]:
    """Each record's place, and the record in a batch of its own. An empty one is nothing but
    padding beside another, and alone no model may have anything to say of it: one of these comes
    first, filled up to the smallest of the others.
    """
    alone = list(enumerate(made([one]) for one in records))
    sizes = [sum(n for some in row_sizes(one) for n in some) for _, one in alone]
    empty = [any(0 in some for some in row_sizes(one)) for _, one in alone]
    if all(empty) or not any(empty):
        return alone
    least = min((size, place) for place, size in enumerate(sizes) if not empty[place])[1]
    first = empty.index(True)
    filled = chosen_rows(made([records[first], records[least]]), [0])
    return [(first, filled), alone[first], *(one for one in alone if one[0] != first)]


def row_sizes(batch: Batch) -> list[Size]:
    """Of each of a batch's tensors."""
    return [tuple(t.shape[1:]) for t in tensors_of(batch)]


def ends_of(records: list[Any]) -> list[int]:
    """Places of a record of the least size and of one of the greatest; none where all are of one,
    as far as can be told.
    """
    sizes = [(sum(map(abs, size)), size) for size in map(_size, records)]
    least, greatest = min(sizes), max(sizes)
    return [] if least == greatest else [sizes.index(least), sizes.index(greatest)]


def _size(record: Any) -> Size:
    if isinstance(record, Tensor | np.ndarray):
        return tuple(record.shape)
    if isinstance(record, str | bytes):
        return (len(record),)
    if isinstance(record, Mapping):
        return _sizes(record.values())
    if isinstance(record, list | tuple):
        plain = not record or isinstance(record[0], int | float | str)
        return (len(record),) if plain else _sizes(record)
    size = getattr(record, "size", None)  # of an image
    if isinstance(size, tuple) and all(isinstance(n, int) for n in size):
        return size
    return _sizes(fields_of(record).values())


def _sizes(parts: Iterable[Any]) -> Size:
    return tuple(n for part in parts for n in _size(part))
