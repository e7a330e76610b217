"""What a loop's tensors are of many records, and which functions keep records apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


Rows = list[Any]  # one tensor a record, each as if of a batch of one
Value = Batched | Numbers | Rows

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
    return list(value.tensor.unbind(0)) if isinstance(value, Numbers) else value
