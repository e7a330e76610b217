"""Bags of words as one row a record: ``torch.nn.EmbeddingBag`` takes the ids of
a batch in one flat tensor with the offset of each bag, and that has no row of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Bags(NamedTuple):
    """Ids (or their weights) of several records. ``collate_fn`` returns it, in place of flat ids
    and offsets, and the loss calls the model on ``flat()``.

    Attributes:
        ids: [examples, longest], zeros behind each record's own.
        lengths: [examples] how many are its own.
    """

    ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> Bags:
        """Of the ids of each record, at least one record.

        Args:
            rows: tensors [length of the record].
        """
        return cls(pad_sequence(list(rows), batch_first=True), torch.tensor([len(r) for r in rows]))

    @classmethod
    def from_offsets(cls, flat: Tensor, offsets: Tensor, include_last_offset: bool = False) -> Bags:
        """Of what ``EmbeddingBag`` takes.

        Args:
            flat: [ids of all records].
            offsets: [examples] where each record's ids begin.
            include_last_offset: whether one more offset says where the last record's end.

        Raises:
            ValueError: for offsets that do not begin at 0, fall, or go beyond the end.
        """
        ends = offsets[1:]
        if not include_last_offset and len(offsets):
            ends = torch.cat([ends, offsets.new_tensor([len(flat)])])
        begins = offsets[: len(ends)]
        lengths = ends - begins
        if len(begins) and (
            bool((lengths < 0).any()) or int(begins[0]) != 0 or int(ends[-1]) != len(flat)
        ):
            raise ValueError(
                "offsets do not cut the flat ids into one bag a record: they have to begin at 0, "
                "not fall, and end with the ids (include_last_offset=True, if the last is the end)"
            )
        longest = int(lengths.max()) if len(lengths) else 0
        own = _own(lengths, longest)
        ids = flat.new_zeros(own.shape)
        ids[own] = flat
        return cls(ids, lengths)

    def flat(self, include_last_offset: bool = False) -> tuple[Tensor, Tensor]:
        """Ids one after the other, and the offsets of records, as ``EmbeddingBag`` takes them."""
        flat = self.ids[_own(self.lengths, self.ids.shape[1])]
        ends = self.lengths.cumsum(0)
        if include_last_offset:
            return flat, torch.cat([ends.new_zeros(1), ends])
        return flat, ends - self.lengths


def _own(lengths: Tensor, longest: int) -> Tensor:
    """[examples, longest] whether a place holds a record's own id."""
    return torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
