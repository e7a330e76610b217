"""Numbers that are drawn for records by a seed that the run does not know: the script's, or the
model's own.

What the default generators of torch, numpy and Python draw is keyed by the run, in secret. Seeded
again inside a model or a loss, or in place of a generator that it made, the numbers are known, and
they belong to places in the batch: one record more moves the others to other places. Passes that
hold randomness still see nothing of it.
"""

from __future__ import annotations

from quietgrad.clipping.soundness.company.differences import Mixes
from quietgrad.clipping.soundness.held_still import CommonRandomness, noting_seeds
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

    Args:
        subject: model and loss.
        one: a record.
        still: the mode that is on.
        before: the state of model and loss, which is put back.

    Raises:
        Mixes: where they are.
    """
    still.known = []  # a list for each pass
    with noting_seeds() as noted:
        subject.losses(one)
        alone, still.known = still.known, []
        made_inside = Snapshot(subject.model, subject.per_example_loss)
        subject.losses(one)
    moved = [*before.moved_generators(), *made_inside.moved_generators()]
    before.put_back()
    if moved:
        raise Mixes(_OWN.format(f"{moved[0]}, a generator of its own"))
    if noted - {AFRESH}:
        raise Mixes(_OWN.format("numpy's or Python's generator, which is seeded inside"))
    if not alone:
        return
    still.known = []
    try:
        subject.losses(take(one, [0, 0]))
        together = still.known
    except Exception:  # a model that takes one at a time
        together = None
    before.put_back()
    if together != alone:
        raise Mixes(_OWN.format("torch's generator, seeded inside, or one of its own"))


_OWN = (
    "random numbers are drawn for each record from {}: the run does not know the seed, and whoever "
    "does knows the numbers, so the loss of one example depends on other examples: with one record "
    "more, the others would draw other numbers; draw from torch's default generator, which the run "
    "seeds, and do not seed it (numbers that all records share are drawn once, before the run)"
)
