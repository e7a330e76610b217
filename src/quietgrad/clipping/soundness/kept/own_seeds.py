"""Numbers that are drawn for records by a seed that the run does not know: the script's, or the
model's own.

What the default generators of torch, numpy and Python draw is keyed by the run, in secret. Seeded
again inside a model or a loss, or in place of a generator that it made, the numbers are known, and
they belong to places in the batch: one record more moves the others to other places. Passes that
hold randomness still see nothing of it.
"""

from __future__ import annotations

from quietgrad.clipping.soundness.company.differences import Mixes
from quietgrad.clipping.soundness.held_still import OURS, CommonRandomness, noting_seeds
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.clipping.soundness.records import take
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch

AFRESH = repr(((), {}))  # random.seed() asks the operating system


def require_draws_of_the_run(
    subject: Subject, one: Batch, still: CommonRandomness, before: Snapshot
) -> None:
    """No numbers are drawn for each record from a generator with a seed of its own. Numbers that
    all records share, whose shapes do not follow from how many there are, may be.

    Nor is the default generator seeded after it was drawn from: the next micro-batch would begin
    there, with numbers that are known.

    Args:
        subject: model and loss.
        one: a record.
        still: the mode that is on.
        before: the state of model and loss, which is put back.

    Raises:
        Mixes: where they are.
    """
    still.moves = True  # one that goes on from call to call gives each record another number
    try:
        with noting_seeds() as noted:
            alone = _known(subject, one, still)
            made_inside = Snapshot(subject.model, subject.per_example_loss)
            _forth_and_back(subject, one)
    finally:
        still.moves = False
    moved = [*before.moved_generators(), *made_inside.moved_generators()]
    before.put_back()
    if moved:
        raise Mixes(_OWN.format(f"{moved[0]}, a generator of its own"))
    if noted - {AFRESH}:
        raise Mixes(_OWN.format("numpy's or Python's generator, which is seeded inside"))
    if not alone:
        return
    try:
        together = _known(subject, take(one, [0, 0]), still)
    except Exception:  # a model that takes one at a time
        together = None
    before.put_back()
    if together != alone:
        raise Mixes(_OWN.format("torch's generator, seeded inside, or one of its own"))


def require_draws_still_of_the_run(subject: Subject, one: Batch) -> None:
    """The same at a later look: a rate that grows from zero draws nothing at the first one.

    Raises:
        Mixes: where they are not.
    """
    with CommonRandomness() as still:
        before = Snapshot(subject.model, subject.per_example_loss)
        try:
            require_draws_of_the_run(subject, one, still, before)
        finally:
            before.put_back()


def _forth_and_back(subject: Subject, records: Batch) -> None:
    if subject.layout.cut is not None:
        # Forward alone: whether its layers can be cut is looked at later, and said by name.
        subject.losses(records)
    else:
        subject.plain_prints(records)


def _known(subject: Subject, records: Batch, still: CommonRandomness) -> list[tuple[int, ...]]:
    """Shapes of what one pass, forward and backward, drew from seeds that are known."""
    still.known, still.shapes, subject.seeds = [], [], set()  # of each pass
    _forth_and_back(subject, records)
    if len(still.shapes) > len(still.known) and not subject.seeds <= OURS:
        raise Mixes(_OWN.format("torch's generator, which is seeded after it was drawn from"))
    return list(still.known)  # which grows with every pass


_OWN = (
    "random numbers are drawn for each record from {}: the run does not know the seed, and whoever "
    "does knows the numbers, so the loss of one example depends on other examples: with one record "
    "more, the others would draw other numbers; draw from torch's default generator, which the run "
    "seeds, and do not seed it (numbers that all records share are drawn once, before the run)"
)
