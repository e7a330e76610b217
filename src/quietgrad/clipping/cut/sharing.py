"""What ranks do together that run the same records, each with a part of every layer: whether the
model is whole beside that, or its rows are sharded over other ranks too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.cut import Cut, piece_of, shape_here
from quietgrad.clipping.cut.company import CutCompany
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.soundness.company.differences import are_same_gradients
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch, is_spread, trainable_parameters


def cut_of(model: nn.Module, company: CutCompany) -> Cut:
    """How the model is cut over these ranks."""
    parameters = trainable_parameters(model)
    pieces = {name: piece_of(p, name, company.ranks) for name, p in parameters.items()}
    whole = {name: p.numel() for name, p in parameters.items() if pieces[name] is None}
    shapes = {name: shape_here(p, pieces[name]) for name, p in parameters.items()}
    return Cut(company.ranks, company.rank, company.owners(whole), shapes)


def how_cut(model: nn.Module) -> str:
    """Which parameters are trained, and which dimension of each is cut."""
    trained: dict[str, Any] = dict(trainable_parameters(model))
    return repr([(n, p.placements if is_spread(p) else None) for n, p in trained.items()])


def added(values_n: Tensor, company: CutCompany) -> Tensor:
    """The sum over ranks, added up in their order: the same to the bit on all."""
    return reduce(torch.add, company.of_each(values_n))


def over_ranks(work: Work, company: CutCompany) -> Work:
    """The same, with norms over all parts of a record's gradient."""
    return replace(
        work, over_ranks=lambda sums: sums.of_all(lambda values_n: added(values_n, company))
    )


def require_whole_gradients(subject: Subject, one: Batch, company: CutCompany) -> None:
    """That what every rank holds whole has its whole gradient on every rank, and not the part that
    comes from some heads or some positions.

    Raises:
        ValueError: on all ranks, naming the parameter.
    """
    assert subject.layout.cut is not None
    names = list(subject.layout.parameters)
    prints = subject.plain_prints(one)
    each = company.of_each(prints.flatten()).cpu().unflatten(1, prints.shape)
    tolerance = subject.tolerance(subject.losses(one)).factor
    for name in subject.layout.cut.owner:
        row = names.index(name)
        of_first = each[0][row : row + 1]
        if not all(
            are_same_gradients(of_first, other[row : row + 1], tolerance) for other in each[1:]
        ):
            raise ValueError(
                f"parameter {name!r} is whole on every rank, and its gradient differs between "
                "ranks: it acts on a part of the features or of the positions (a norm of "
                "single heads, sequence parallel, context parallel); keep what it acts on "
                "whole, cut it by ColwiseParallel or RowwiseParallel, or freeze it "
                "(requires_grad_(False)); docs/tensor_parallel.md"
            )
