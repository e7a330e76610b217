"""What a model or a loss makes of the first records that it meets and keeps for ever: seen before
the first private record is clipped, and put back.

A normalisation that is measured once is there before any two passes can be compared, and does not
change after. So passes are compared that begin at the same state and differ in which record came
first: where the loss of a third record, or its gradient, is another one then, the first records
reach into everybody's contribution. What depends on shapes alone (a rotary table, a causal mask, a
count of calls) is the same whoever came first.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from quietgrad.clipping.soundness.held_still import CommonRandomness
from quietgrad.clipping.soundness.kept.snapshot import Contents, Snapshot, contents, differing
from quietgrad.clipping.soundness.mixing import Mixes, are_same_gradients, close
from quietgrad.clipping.soundness.records import (
    blank,
    differing_rows,
    take,
    with_companions,
)
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.tensors import Batch


class KeepsFirst(Mixes):
    """What was made of the first records is used for all others."""


def require_nothing_kept_of_the_first(subject: Subject, records: Batch) -> bool:
    """Whether it could be seen that no record's loss or gradient depends on which record came
    first. The state of model and loss is the same afterwards as before.

    Before that, one made-up record goes through: where something is kept out of reach (by code that
    is not Python, in a file), it is that record's and nobody's.

    Args:
        subject: model and loss, which have met no private record.
        records: at least one.

    Raises:
        KeepsFirst: naming the place.
    """
    model, loss = subject.model, subject.per_example_loss
    before = Snapshot(model, loss)
    try:
        with CommonRandomness():
            made_up = blank(take(records, [0]))
            with contextlib.suppress(Exception):  # the model may refuse it: zeros everywhere
                subject.losses(made_up)
            before.put_back()
            rows = differing_rows(records)
            if rows is not None:
                return _compare(subject, [take(records, [row]) for row in rows], before)
            made = with_companions(take(records, [0]), 3)
            if made is None:
                return False
            few = [take(made, [row]) for row in (0, 1, 2)]
            try:
                return _compare(subject, few, before)
            except Mixes:
                raise
            except Exception:  # a made-up record may be impossible for the model
                return False
    finally:
        before.put_back()


def _compare(subject: Subject, few: list[Batch], before: Snapshot) -> bool:
    one, other, third = few
    with unchanged(subject.model, thorough=True):  # first, so that what changes is named
        subject.losses(one)
    fixed = before.put_back()
    if fixed:
        raise KeepsFirst(_LARGE.format(fixed[0]))
    losses, gradient, left = _after(one, third, subject, before)
    others, another, left_by_other = _after(other, third, subject, before)
    tolerance = subject.tolerance(losses)
    if close(others, losses, tolerance.again, tolerance.again) and are_same_gradients(
        gradient, another, 10 * tolerance.again
    ):
        return True
    raise KeepsFirst(_FIRST.format(_named(differing(left, left_by_other))))


def _after(
    first: Batch, then: Batch, subject: Subject, before: Snapshot
) -> tuple[Tensor, Tensor, Contents]:
    """Loss and gradient of a record where another one came first, and what that one left."""
    subject.losses(first)
    left = contents(subject.model, subject.per_example_loss)
    losses, gradient = subject.losses(then), subject.plain_prints(then)
    before.put_back()
    return losses, gradient, left


def _named(places: list[str]) -> str:
    if not places:
        return "something that it keeps (a functools cache, a file, an object of another language)"
    return " or ".join(places[:3])


_FIRST = (
    "the loss of one example depends on which example the model and the loss met first: {} is made "
    "of the first records and kept, so every record's contribution depends on theirs, at this "
    "release and at all later ones; compute it from public records before the run and keep it "
    "fixed (run.check(model, loss, public_records) before the first batch fills it from those), or "
    "make it of each record alone. It was put back as it was"
)
_LARGE = (
    "{} changes while the loss is computed, and is too large to be looked at and put back: what it "
    "keeps of one record may reach the loss of another; compute it from public records before the "
    "run, and let the loss read it only"
)
