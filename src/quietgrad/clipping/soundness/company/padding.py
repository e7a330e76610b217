"""Whether a record's loss follows from how long the records beside it are, through what is filled
up, or cut off, to make rows of one size: in a batch that is made already nobody can tell. So a few
records are made into a batch each alone and all together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.backward import (
    Checkpointing,
    PerExampleLoss,
    gradients_of_batch,
    uncompiled,
    with_any_checkpointing,
)
from quietgrad.clipping.capture.layout import layout_of
from quietgrad.clipping.soundness.company.differences import Mixes, close
from quietgrad.clipping.soundness.company.quantized import in_evaluation_mode
from quietgrad.clipping.soundness.held_still import CommonRandomness, seeded
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.tensors import Batch, tensors_of

PADDED = (
    "a record's loss depends on how long the records beside it are: collate_fn fills records up, "
    "or cuts them, to a size that follows from the batch, and the model does not mask what is "
    "filled; let collate_fn fill up to the longest and return a mask or lengths that model and "
    "loss heed, or bring all records to one size in the data set (one that is empty is nothing but "
    "padding, which some masks do not hide: leave such out)"
)
LOOKED_AT = 6  # of those whose size is another one alone
SMALL = 1e-3  # beside the longest gradient: what is shorter may be rounding


def require_padding_unread(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    together: Batch,
    alone: Sequence[tuple[int, Batch]],
    thorough: bool,
) -> bool:
    """Compares losses of records in one batch with those of the same records alone, in evaluation
    mode where they have losses there. Nothing of it stays.

    Args:
        model, per_example_loss: whole, and in no other process.
        together: the records.
        alone: the place of each, and the record in a batch of its own.
        thorough: gradients are compared, too: before training many losses are about the same. Later
            records may be learnt so well that their gradients are rounding.

    Returns:
        Whether there was anything to compare: a record whose row is of another size alone.

    Raises:
        Mixes: where they differ. Names no record and no size.
    """
    sizes = _sizes(together)
    others = [one for one in alone if _sizes(one[1]) != sizes]
    if not others:
        return False
    subject = Subject(model, layout_of(model), per_example_loss, Checkpointing())
    before = Snapshot(model, per_example_loss)
    for evaluation in (True, False):  # some models have no loss in evaluation mode
        mode = in_evaluation_mode(model) if evaluation else contextlib.nullcontext()
        try:
            with mode, unchanged(model), CommonRandomness():
                _require_same(subject, together, others, thorough)
            return True
        except Mixes:
            raise
        except Exception:
            continue
        finally:
            before.put_back()
    return False


def _require_same(
    subject: Subject, together: Batch, alone: Sequence[tuple[int, Batch]], thorough: bool
) -> None:
    """Of those that the model can take alone, which an empty one may be none of: it must not hide
    the others.
    """
    company = subject.losses(together)
    taken: list[tuple[int, Batch]] = []
    found: list[Tensor] = []
    error: Exception | None = None
    for one in alone:
        try:
            found.append(subject.losses(one[1]))
        except Exception as another:
            error = another
            continue
        taken.append(one)
        if len(taken) == LOOKED_AT:
            break
    if error is not None and not taken:
        raise error
    own, rows = torch.cat(found), [row for row, _ in taken]
    limits = subject.tolerance(own)
    same = close(company[rows], own, limits.loss, limits.floor)
    if same and thorough:
        same = _have_same_gradients(subject, together, taken, limits.factor)
    # What draws by other means cannot be compared.
    if not same and close(company, subject.losses(together, 1), limits.loss, limits.floor):
        raise Mixes(PADDED)


def _sizes(batch: Batch) -> list[torch.Size]:
    return [t.shape[1:] for t in tensors_of(batch)]


def _have_same_gradients(
    subject: Subject, together: Batch, alone: Sequence[tuple[int, Batch]], share: float
) -> bool:
    own = [_gradient(subject, one, 0) for _, one in alone]
    least = SMALL * max(float(g.norm()) for g in own)
    company = (_gradient(subject, together, row) for row, _ in alone)
    # Where one is no number nothing is known.
    return not any(
        float((one - other).norm()) > share * max(float(one.norm()), least)
        for one, other in zip(own, company, strict=True)
    )


def _gradient(subject: Subject, batch: Batch, row: int) -> Tensor:
    """Of one record's loss, all parameters behind each other."""

    def of_one(model: nn.Module, records: Batch) -> Tensor:
        losses = subject.trained_loss(model, records)
        return torch.where(torch.arange(len(losses), device=losses.device) == row, losses, 0.0)

    def run(reentrant: bool) -> Tensor:
        with seeded(subject.devices), uncompiled(subject.model):
            found = gradients_of_batch(subject.model, subject.layout, of_one, batch, reentrant)
        given = (g for g in found.values() if g is not None)
        return torch.cat([g.detach().double().flatten() for g in given])

    return with_any_checkpointing(subject.checkpointing, run)
