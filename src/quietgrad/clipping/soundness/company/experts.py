"""Many records sent to one expert: a mixture of experts that has room for so many tokens of a batch
drops those that come later, and ordinary records may never fill it.

Two looks. One record many times, all of its positions alike: whatever routes by what it is given
sends them to one place. And every choice of the largest made to choose the first: all of a batch go
to the first experts, where a layer chooses by ``topk`` or ``argmax``. A loss that counts a class,
and weighs it by thresholds, is seen by the first. Where no room is limited a
record gets the same in any company, in this world too.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.clipping.soundness.company.alike import Company
from quietgrad.clipping.soundness.company.lengths import positions_of
from quietgrad.clipping.soundness.records import is_mask, take
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch, batch_size_of, map_tensors


class FirstOnes(TorchDispatchMode):
    """Inside, the largest along a dimension are the first ones.

    Attributes:
        used: whether anything was chosen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func._overloadname == "out" or name not in ("topk", "argmax", "max"):
            return func(*args, **kwargs)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        x, axis = given["self"], given.get("dim", -1 if name == "topk" else None)
        if axis is None or "other" in given or not x.dim():
            return func(*args, **kwargs)
        self.used = True
        if name == "topk":
            index = torch.arange(given["k"], device=x.device)
            shape = [1] * x.dim()
            shape[axis] = len(index)
            values = x.narrow(axis, 0, len(index)).clone()
            return values, index.view(shape).expand(values.shape).clone()
        values = x.narrow(axis, 0, 1).clone()
        values = values if given.get("keepdim") else values.squeeze(axis)
        first = torch.zeros_like(values, dtype=torch.long)
        return first if name == "argmax" else (values, first)


def require_room_for_all(subject: Subject, few: Batch, company: Batch, copies: bool = True) -> None:
    """A record's loss does not follow from how many others go the same way inside the model.

    Args:
        subject: model and loss; random numbers are held still.
        few: some records.
        company: a micro-batch as it will run, these first.
        copies: whether one record as many times as there are in ``company`` is looked at, whatever
            the model: a limit is met below that number, or by no micro-batch of this size.

    Raises:
        Mixes: where it does.
    """
    seen = "its value where many records go the same way, as to one expert of limited capacity"
    alike = Company(subject, seen, factors=False)
    one = take(few, [0])
    n = batch_size_of(company)
    if copies:
        alike.compare(map_tensors(one, _uniform), [[0] * max(n, 2)])
    if subject.layout.cut is not None:
        return  # what a choice is made from may be cut over ranks itself
    with FirstOnes() as first, contextlib.suppress(Exception):  # no room for such a choice
        subject.losses(one)
    if first.used:
        with FirstOnes():
            alike.compare(company, [list(range(n))], {0, 1, n // 2, n - 2, n - 1})


def _uniform(t: Tensor) -> Tensor:
    """All positions as the one in the middle; masks stay."""
    axis = positions_of(t)
    if not axis or is_mask(t):
        return t
    return t.narrow(axis, t.shape[axis] // 2, 1).expand(t.shape).contiguous()
