"""What a model or a loss makes of the first records that it meets and keeps for ever: seen before
the first private record is clipped, and put back.

A normalisation that is measured once is there before any two passes can be compared, and does not
change after. So passes are compared that begin at the same state and differ in which record came
first: where the loss of a third record, or its gradient, is another one then, the first records
reach into everybody's contribution. What depends on shapes alone (a rotary table, a causal mask, a
count of calls) is the same whoever came first.

What is kept of records and not read (a list of losses, the last input) is remembered by its name
and disturbed at later looks: a statistic that is gathered for a while and used from then on is
found out so.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quietgrad.clipping.soundness.company.differences import Mixes, are_same_gradients, close
from quietgrad.clipping.soundness.held_still import CommonRandomness, noting_seeds
from quietgrad.clipping.soundness.kept.own_seeds import require_draws_of_the_run
from quietgrad.clipping.soundness.kept.snapshot import Contents, Snapshot, contents, differing
from quietgrad.clipping.soundness.records import blank, differing_rows, take, with_companions
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.tensors import Batch, tensors_of

Places = tuple[str, ...]
Seeds = tuple[frozenset[int], frozenset[str]]
# Whether any process says so, of those that make every pass together; one process: what it says.
AnyOf = Callable[[bool], bool]


class KeepsFirst(Mixes):
    """What was made of earlier records, and kept, is used for others."""


@contextlib.contextmanager
def as_before(model: nn.Module, loss: Any = None) -> Iterator[Snapshot]:
    """What the block leaves in plain attributes, closures and the like is put back at its end."""
    before = Snapshot(model, loss)
    try:
        yield before
    finally:
        before.put_back()


def look_at_the_first(subject: Subject, records: Batch, public: bool) -> Places | None:
    """Sees that no record's loss or gradient depends on which record came first. The state of model
    and loss is the same afterwards as before.

    Before that, where records are private, one made-up record goes through: where something is
    kept out of reach (in a generator, a file, a foreign library), it is that record's and nobody's.

    Args:
        subject: model and loss, which have met no private record.
        records: at least one.
        public: whether they need no protection, and may fill what is made lazily.

    Returns:
        Names of places that keep something of records, which nothing reads now; None where nothing
        could be seen.

    Raises:
        KeepsFirst: naming the place.
    """
    before = Snapshot(subject.model, subject.per_example_loss)
    try:
        with CommonRandomness() as still:
            if not public:
                # The model may refuse such a record, or warn of it.
                with contextlib.suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    subject.plain_prints(blank(take(records, [0])))
                before.put_back()
            rows = differing_rows(records)
            if rows is not None:
                return _compare(
                    subject, still, [take(records, [row]) for row in rows], before, public
                )
            one = take(records, [0])
            made = with_companions(one, 3)
            if made is not None:
                few = [take(made, [row]) for row in range(3)]
                try:
                    return _compare(subject, still, few, before, public)
                except Mixes:
                    raise
                except Exception:  # a made-up record may be impossible for the model
                    before.put_back()
            require_draws_of_the_run(subject, one, still, before)  # which one record shows
            return None
    finally:
        before.put_back()


def _compare(
    subject: Subject, still: CommonRandomness, few: list[Batch], before: Snapshot, public: bool
) -> Places:
    one, other, third = few
    passes, left, seeds = _after(one, third, subject, still, before)
    others, left_by_other, other_seeds = _after(other, third, subject, still, before)
    if seeds != other_seeds:
        raise Mixes(_SEEDED)
    require_draws_of_the_run(subject, one, still, before)
    places = tuple(differing(left, left_by_other))
    if passes.agree(others, subject):
        return places
    if public:
        return ()  # it is filled by these, and stays
    raise KeepsFirst(_FIRST.format(named(places)))


class Passes(NamedTuple):
    """Loss and gradient of one record, twice: after what came before, and after itself."""

    losses: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, one: Batch, subject: Subject) -> Passes:
        found = [subject.loss_and_prints(one) for _ in range(2)]
        return cls(*map(torch.cat, zip(*found, strict=True)))

    def agree(self, other: Passes, subject: Subject) -> bool:
        again = subject.tolerance(self.losses).again
        return close(other.losses, self.losses, again, again) and are_same_gradients(
            self.gradient, other.gradient, 10 * again
        )


def _after(
    first: Batch, then: Batch, subject: Subject, still: CommonRandomness, before: Snapshot
) -> tuple[Passes, Contents, Seeds]:
    """A record's loss and gradient where another one came first; what that one left, and what
    random numbers were seeded with while it went through.
    """
    subject.seeds, still.seeds = set(), set()
    # What changes in the model itself is named by that. Hooks of the backward pass may keep
    # something too.
    with unchanged(subject.model, thorough=True), noting_seeds() as noted:
        subject.plain_prints(first)
    seeds = frozenset(subject.seeds | still.seeds), frozenset(noted)
    left = contents(subject.model, subject.per_example_loss)
    passes = Passes.of(then, subject)
    fixed = before.put_back()
    if fixed:
        raise KeepsFirst(TOO_LARGE.format(fixed[0]))
    return passes, left, seeds


def require_unread(subject: Subject, one: Batch, places: Places, any_of: AnyOf = bool) -> None:
    """What is kept of records in these places does not matter to a record's loss or gradient.

    Processes that make every pass together may keep something in different places (a log of the
    first rank's): they look where any of them keeps something, and find the same.

    Raises:
        KeepsFirst: where it does.
    """
    if not any_of(bool(places)):
        return
    before = Snapshot(subject.model, subject.per_example_loss)
    if not _is_unread(subject, one, before, lambda: before.disturb(places), any_of):
        raise KeepsFirst(_LATER.format(named(places)))


def require_no_other_records(
    subject: Subject, one: Batch, batch: Batch, any_of: AnyOf = bool
) -> None:
    """A record's loss or gradient does not read the batch that it is in, which the loss may reach
    by itself: through a variable of the loop that it closes over, say.

    Args:
        subject: model and loss.
        one: the record, the same for all processes.
        batch: of this process, as it was handed over: copies would be found nowhere.
        any_of: asks those that make every pass together.

    Raises:
        Mixes: naming the place.
    """
    before = Snapshot(subject.model, subject.per_example_loss)
    shared = before.sharing(tensors_of(batch))
    if not any_of(bool(shared)):
        return

    def disturb() -> bool:
        return any([before.disturb_one(found.thing) for found in shared])

    if not _is_unread(subject, one, before, disturb, any_of):
        raise Mixes(_CLOSED.format(named(tuple(found.place for found in shared))))


def _is_unread(
    subject: Subject, one: Batch, before: Snapshot, disturb: Callable[[], bool], any_of: AnyOf
) -> bool:
    try:
        with CommonRandomness():
            passes = Passes.of(one, subject)
            before.put_back()
            if not any_of(disturb()):
                return True
            try:
                same = passes.agree(Passes.of(one, subject), subject)
            except Exception:  # it runs on what is there, and not on anything else
                return False
            return not any_of(not same)
    finally:
        before.put_back()


def named(places: Places) -> str:
    if not places:
        return "something that they keep (a functools cache, a file, a foreign library's object)"
    return " or ".join(places[:3])


REMEDY = (
    "compute it from public records before the run and keep it fixed, or make it of each record "
    "alone"
)
_FIRST = (
    "the loss of one example depends on which example the model and the loss met first: {} keeps "
    "something between calls that was made of the first records, so every record's contribution "
    f"depends on theirs, at this release and at all later ones; {REMEDY} "
    "(run.check(model, loss, public_records) before the first batch fills it from public ones). It "
    "was put back as it was"
)
_LATER = (
    "the loss of one example depends on earlier ones: {} keeps something between calls that was "
    f"gathered from records, and is read now; {REMEDY}"
)
_SEEDED = (
    "random numbers are seeded from the records (torch.manual_seed, a generator of its own, "
    "numpy's or Python's), so the loss of one example depends on other examples: with one record "
    "more, the others would draw other numbers; draw from torch's default generator, which the run "
    "seeds, and do not seed it"
)
_CLOSED = (
    "the loss of one example depends on other examples: it reads the batch itself, through {}; "
    "let it read the records that it is given, per_example_loss(model, records), and no others"
)
TOO_LARGE = (
    "{} changes while the loss is computed, and is too large to be put back, or another model's "
    f"parameter: what it keeps of one record may reach the loss of another; {REMEDY}"
)
