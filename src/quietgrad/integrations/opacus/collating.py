"""Records are collated as the script says, and examined (``quietgrad.loading.collating``); for none
of them there is what a batch looks like, without rows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from quietgrad.clipping.soundness.kept.lazily import as_before
from quietgrad.integrations.opacus.following.nodes import leaves
from quietgrad.loading.bags import Bags
from quietgrad.loading.collating import Collating, same_numbers

LOOKED_AT = 8  # records that may tell whether there are bags: those of one word do not
TIMES = 3  # that each is collated beside itself


@dataclass(frozen=True)
class BagPlaces:
    """Which tensors of a batch are flat ids (or weights) of all records, and which says where each
    record's begin, as ``EmbeddingBag`` takes them.

    Attributes:
        flat: places among the tensors of a batch.
        offsets: place of the offsets.
        last: whether one more offset is the end.
    """

    flat: tuple[int, ...]
    offsets: int
    last: bool

    def bags(self, made: Any) -> list[Bags | None]:
        """One entry a tensor: the bags where it is flat ids, else None.

        Raises:
            ValueError: where the offsets do not cut them.
        """
        tensors = leaves(made, Tensor)
        offsets = tensors[self.offsets]
        return [
            Bags.from_offsets(t, offsets, self.last) if place in self.flat else None
            for place, t in enumerate(tensors)
        ]

    def kinds(self, made: Any) -> list[str]:
        """As ``Node.bags`` has them, one entry a tensor."""
        found = ["flat" if i in self.flat else "" for i in range(len(leaves(made, Tensor)))]
        found[self.offsets] = "ends" if self.last else "offsets"
        return found

    def as_rows(self, made: Any) -> list[Any]:
        """Every tensor with one row a record."""
        bags = self.bags(made)
        lengths = next(b.lengths for b in bags if b is not None)
        rows = [b if b is not None else t for b, t in zip(bags, leaves(made, Tensor), strict=True)]
        rows[self.offsets] = lengths
        return rows


class CollateRows:
    """Collates records, and for none of them gives what a batch looks like, without rows.

    Args:
        collate_fn: of the script.
        dataset: whose first records show what a batch looks like.
        batch_dim: the records' dimension.

    Attributes:
        bags: where a batch has flat ids and offsets; None where it has none.
    """

    def __init__(self, collate_fn: Any, dataset: Any, batch_dim: int) -> None:
        self.collate_fn = collate_fn
        self._dataset = dataset
        self.bags = None if batch_dim else find_bags(collate_fn, dataset)
        as_rows = None if self.bags is None else self.bags.as_rows
        self._collating = Collating(collate_fn, batch_dim, as_rows, counted=True)

    def __call__(self, records: list[Any]) -> Any:
        if not len(records):
            return self._collating.without_records(self._dataset[0])
        return self._collating(records)


def find_bags(collate_fn: Any, dataset: Any) -> BagPlaces | None:
    """Where ``collate_fn`` makes flat ids and offsets, by what it makes of one record three times:
    offsets 0, L, 2 L and 3 L ids.
    """
    if collate_fn is default_collate:
        return None
    for i in range(min(LOOKED_AT, len(dataset))):
        try:
            with same_numbers(), as_before(nn.Identity(), collate_fn):
                made = collate_fn([copy.deepcopy(dataset[i]) for _ in range(TIMES)])
        except Exception:  # whatever it cannot do with it, it says where it matters
            return None
        tensors = leaves(made, Tensor)
        offsets = {place: n for place, t in enumerate(tensors) if (n := _step(t)) is not None}
        for place, length in offsets.items():
            found = _bags_by(place, length, tensors)
            if found is not None:
                return found
        if not any(length < 2 for length in offsets.values()):  # no record of one word, or of none
            return None
    return None


def _step(t: Tensor) -> int | None:
    """L, where a tensor is 0, L, 2 L, ..."""
    if t.dim() != 1 or t.is_floating_point() or not TIMES <= len(t) <= TIMES + 1:
        return None
    step = int(t[1])
    equal = torch.equal(t.cpu().long(), step * torch.arange(len(t)))
    return step if equal and step >= 0 else None


def _bags_by(place: int, length: int, tensors: list[Tensor]) -> BagPlaces | None:
    last = len(tensors[place]) > TIMES
    others = [i for i, t in enumerate(tensors) if i != place and (not t.dim() or len(t) != TIMES)]
    flat = others and all(tensors[i].shape == (TIMES * length,) for i in others)
    return BagPlaces(tuple(others), place, last) if flat and length >= 2 else None
