"""Whether the losses that are clipped are the loop's: their mean (or sum) over the records has to
be what ``backward`` was called on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.integrations.opacus.following.nodes import CALL, LOOK, Const, Ref, leaves
from quietgrad.integrations.opacus.following.replay import Program
from quietgrad.integrations.opacus.following.tracing import Tape

_NO_MODEL = nn.Module()
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF = 2e-2


def faithful_program(
    tape: Tape, pending: list[tuple[Tape, Ref, Tensor]], loss_reduction: str, module: Any
) -> Program:
    """The losses of each record on its own.

    Args:
        tape: of the open micro-batch.
        pending: what ``backward`` was called on.
        loss_reduction: "mean" or "sum", over records.
        module: the wrapped model that is trained.

    Raises:
        ValueError: where they do not make up what the loop computed: its loss mixes records.
    """
    refs = tuple(ref for _, ref, _ in pending)
    total = torch.stack([loss.reshape(()) for _, _, loss in pending]).sum()
    _require_this_batch(Program(tape, refs), module)
    why: Exception | None = None
    placed = False
    for constant in (False, True):
        program = Program(tape, refs, constant)
        if not program.records():
            continue
        try:
            with torch.no_grad():
                losses = program.losses_of(_NO_MODEL, program.records(), seen=True)
        except Exception as error:  # the loop's own functions, on one record
            why = why or error
            continue
        # A loss of the model's own: what it is of one record, the model says.
        if program.alone or _agree(losses, total, loss_reduction):
            placed = program.by_place()
            if not placed:
                return program
    if placed:
        raise ValueError(
            "the loss is made of rows that differ by the records' places in the batch (arange, "
            "linspace, weights written by hand, what came from outside of torch), so with "
            "one record more the others would get other rows; make them of the records (a column "
            "of the data set), the same for all, or draw them within the batch by torch's "
            "functions and default generators"
        )
    raise _mixes(loss_reduction, why)


def _require_this_batch(program: Program, module: Any) -> None:
    nodes = [program.tape.nodes[place] for place in program.nodes]
    if any(n.what == CALL and n.module is not module for n in nodes):
        raise ValueError(
            "the loss is made of outputs of several private models, and each is clipped for "
            "itself; put them into one nn.Module, or call those that do not learn from this loss "
            "under torch.no_grad()"
        )
    if program.alone and any(n.what == LOOK for n in nodes):
        raise ValueError(
            "the model gives one loss of all records, and its outputs without gradients take part "
            "in it; compute the loss from outputs of one row a record"
        )
    if any(const.is_of_before for n in nodes for const in leaves((n.args, n.kwargs), Const)):
        raise ValueError(
            "the loss is made of tensors of an earlier batch too (a memory of outputs or records, "
            "a state that is carried on, a tensor that records were written into), or of "
            "gradients by records (a gradient penalty, adversarial examples made in the loop), so "
            "a record would act in what is clipped for another; make the loss of the open batch "
            "alone, with new tensors, or compute such things inside the model"
        )


def _agree(losses: Tensor, total: Tensor, loss_reduction: str) -> bool:
    found = losses.double().mean() if loss_reduction == "mean" else losses.double().sum()
    if bool(total.isfinite()) and len(losses) and bool(losses.isnan().all()):
        return False  # no record has a loss alone: a spread of the batch, a trimmed mean
    if not (bool(found.isfinite()) and bool(total.isfinite())):
        return True  # such records add zero, whatever they are
    relative = max(TOLERANCE.get(kind, HALF) for kind in (total.dtype, losses.dtype))
    size = float(losses.double().abs().mean()) * (
        1 if loss_reduction == "mean" else max(len(losses), 1)
    )
    return abs(float(found) - float(total)) <= relative * size + relative * 1e-3


def _mixes(loss_reduction: str, why: Exception | None) -> ValueError:
    # An error of torch's own may quote the batch's size: its kind alone is said.
    kind = "" if why is None else f" (on a single record it raised {type(why).__name__})"
    remedy = (
        "average the losses of the records (reduction='none', each record's own average, then "
        ".mean()), or pass loss_reduction='sum' for a sum of them"
        if loss_reduction == "mean"
        else "add up the losses of the records (reduction='none', each record's own average, then "
        ".sum()), or leave loss_reduction='sum' out for a mean of them"
    )
    return ValueError(
        f"the loss is not the {loss_reduction} over records of a loss of each record alone{kind}: "
        "class weights or ignored targets in a mean, batch statistics, a division by the number of "
        "records, or random functions of the loop's own (F.dropout) make one record's gradient "
        f"depend on the others; {remedy}; drop out inside the model"
    )
