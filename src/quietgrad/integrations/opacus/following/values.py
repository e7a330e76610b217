"""What a loop's tensors are of many records, and which functions keep records apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from quietgrad.loading.bags import Bags

Records = dict[str, Tensor]


@dataclass(frozen=True)
class Batched:
    """All records in one tensor, along one dimension."""

    tensor: Tensor
    dim: int


@dataclass(frozen=True)
class Numbers:
    """[records] one number each: of every record a tensor without dimensions."""

    tensor: Tensor


@dataclass(frozen=True)
class Flat:
    """Ids (or weights) of all records, one after the other, as bags that can be taken apart."""

    bags: Bags

    @property
    def tensor(self) -> Tensor:
        """[ids of all records]"""
        return self.bags.flat()[0]

    def cast(self, function: Callable[[Tensor], Tensor]) -> Flat:
        """Of each number on its own."""
        ids = function(self.bags.ids)
        return Flat(Bags(ids, self.bags.lengths.to(ids.device)))

    def again(self, rows: Rows) -> Flat | Rows:
        """What a function made of each record's ids: bags of as many, where they are as many."""
        lengths = self.bags.lengths.tolist()
        if any(r.dim() != 1 or len(r) != n for r, n in zip(rows, lengths, strict=True)):
            return rows
        return Flat(Bags(pad_sequence(rows, batch_first=True), self.bags.lengths))

    def rows(self) -> Rows:
        """[ids] of each record."""
        return list(self.tensor.split(self.bags.lengths.tolist()))


@dataclass(frozen=True)
class Offsets:
    """Where each record's ids begin in ``Flat``.

    Attributes:
        lengths: [records] of the bags, in the offsets' type.
        ends: whether one more is the end.
    """

    lengths: Tensor
    ends: bool

    @property
    def tensor(self) -> Tensor:
        """[records], or one more."""
        return Bags(self.lengths.new_zeros(len(self.lengths), 0), self.lengths).flat(self.ends)[1]

    def cast(self, function: Callable[[Tensor], Tensor]) -> Offsets:
        """Of each number on its own."""
        return Offsets(function(self.lengths), self.ends)

    def rows(self) -> Rows:
        """Of each record, as if of a batch of one."""
        return [Offsets(one, self.ends).tensor for one in self.lengths.split(1)]


Rows = list[Any]  # one tensor a record, each as if of a batch of one
Value = Batched | Numbers | Flat | Offsets | Rows

# Losses that are one number an element, averaged at the end: with default arguments the mean over
# a record's elements is what they are of that record alone.
AVERAGED = {
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}
_SIGNS = (
    "add sub mul div neg __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__"
)
ARITHMETIC = {
    getattr(kind, name)
    for kind in (Tensor, torch)
    for name in _SIGNS.split()
    if hasattr(kind, name)
}
SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand}
SQUEEZES = {Tensor.squeeze, torch.squeeze}
# Of each number on its own, whatever stands beside it.
CASTS = {
    Tensor.to,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.long,
    Tensor.int,
    Tensor.type,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.detach,
}
WHOLE = {"weight", "pos_weight"}  # of losses: one number a class, however many records there are


class NotAlone(ValueError):
    """What the loop does before it calls the model makes records depend on each other."""


def rows_of(value: Value) -> Rows:
    """One tensor a record."""
    if isinstance(value, Batched):
        return list(value.tensor.split(1, value.dim))
    if isinstance(value, Flat | Offsets):
        return value.rows()
    return list(value.tensor.unbind(0)) if isinstance(value, Numbers) else value
