"""Alone against in company: an example's loss, and what its gradient is made of, must not depend on
which others are in the batch.

Values and captured factors (inputs of trainable layers, gradients at their outputs) of a few
examples are compared between passes over one example and passes over several, in more than one
order and number, with a copy of one of them, and with the micro-batch as it will really run. That
sees what leaves no gradient from one example to another: detached batch statistics, sorting, mining
of hard examples, division by the number of examples, copies that count once, a backward pass of its
own that mixes. What does leave one is seen directly, whatever the randomness: the losses of some
examples must have no gradient at the activations of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from quietgrad.clipping.soundness.company.differences import (
    MIXES,
    Mixes,
    are_same_gradients,
    close,
    require_same,
)
from quietgrad.clipping.soundness.company.experts import require_room_for_all
from quietgrad.clipping.soundness.company.lengths import require_lengths_apart
from quietgrad.clipping.soundness.company.quantized import in_evaluation_mode
from quietgrad.clipping.soundness.company.rows import require_rows_of_records
from quietgrad.clipping.soundness.held_still import (
    EXTREMES,
    CommonRandomness,
    Level,
)
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.clipping.soundness.records import (
    FARTHEST,
    are_different,
    spread,
    take,
    with_first_farthest,
    with_first_louder,
)
from quietgrad.clipping.soundness.subject import Look, Subject, Tolerance
from quietgrad.tensors import Batch, batch_size_of, map_tensors

T = TypeVar("T")

# Examples of the first look and of each later one; of them, so many also by what their gradients
# are made of.
FIRST = 8
LATER = 3
LOOKED_AT = 3
SALTS = (1, 2, 3)  # of seeds that are tried for numbers that are not held still

# Times which a loud example's layers give: enough for a common scale to be seen, and not so much
# that deep models without normalisation overflow.
LOUD = 16.0


_KEEPS = (
    "the loss of one example was another one after other examples had gone through the model, with "
    "the same weights and random numbers: model or loss "
    "keeps something between calls (running statistics, a cache, a generator of its own), so one "
    "record's contribution depends on other "
    "records; keep nothing between calls, and draw from torch's default generator"
)


def require_no_memory(subject: Subject, batch: Batch) -> None:
    """Examples taken one at a time: the first one's loss and gradient are the same again after the
    others.

    Raises:
        Mixes: where they are not.
    """
    first = take(batch, [0])
    with CommonRandomness():
        before, gradient = subject.losses(first), subject.plain_prints(first)
        for row in range(1, batch_size_of(batch)):
            subject.losses(take(batch, [row]))
        after, again = subject.losses(first), subject.plain_prints(first)
    tolerance = subject.tolerance(before)
    _require_same_again(after, before, tolerance)
    if not are_same_gradients(gradient, again, 10 * tolerance.again):
        raise Mixes(_KEEPS)


def require_each_alone(
    subject: Subject, records: Batch, size: int, thorough: bool, crowded: bool = False
) -> bool:
    """Whether it could be decided that records do not mix, by a few of them: two, a few and
    ``size`` together.

    Evaluation mode is looked at where the present mode cannot be compared, and in a ``thorough``
    look also where random numbers are drawn. It can
    refuse and never approve: what mixes in training only is still there. ``crowded``: a look that
    is not thorough holds one record many times, too.

    Raises:
        Mixes: where they do.
    """
    still = CommonRandomness()
    with still:
        places = _finite_places(subject, records, min(FIRST if thorough else LATER, size))
        few = take(records, places)
        if len(places) < 2 or not are_different(few):
            return False
        decided = _compare(subject, records, places, size, thorough)
        if decided:
            require_lengths_apart(subject, few, thorough)
            if thorough:
                require_rows_of_records(subject, few)
            ends = {0, 1, len(places) - 1} if thorough else {0, len(places) - 1}
            _require_deaf(subject, take(few, sorted(ends)))
            company = take(records, [*places, *_others(records, places, size)])
            require_room_for_all(subject, few, company, copies=thorough or crowded)
    for level in EXTREMES if still.used and decided else ():
        decided = _compare_at(level, subject, records, places, size) and decided
    _require_no_gradient_between(subject, few, thorough)
    if not decided or (thorough and still.used):
        with in_evaluation_mode(subject.model), CommonRandomness():
            _compare(subject, records, places, size, thorough, again=True)
    return decided


def _require_deaf(subject: Subject, few: Batch) -> None:
    """The first examples' numbers stay when the last one is loud in every layer, or no number: a
    largest value of the batch, a batch that is skipped where a loss is not finite.

    Shapes are the same, so hardly anything rounds otherwise. No number is tried on a processor
    alone: on a GPU a kernel that checks its input ends the process.
    """
    last = batch_size_of(few) - 1
    quiet = subject.look(few)
    known = subject.tolerance(quiet.losses)
    tolerance = replace(known, factor=10 * known.again)
    ones = torch.ones(last + 1, device=quiet.losses.device)
    tried = [(few, LOUD)]
    if not ones.is_cuda and subject.layout.spread is None and subject.layout.cut is None:
        tried += [(few, math.nan), (map_tensors(few, _without_number), 1.0)]
    for records, loud in tried:
        times = torch.cat([ones[:last], loud * ones[last:]])
        beside = _of_made_up(subject, partial(subject.look, records, times=times))
        if beside is None:
            continue
        one, other = quiet.losses[:last], beside.losses[:last]
        if not close(one, other, 10 * known.again, 10 * known.again):
            raise Mixes(MIXES.format("its value beside one that is loud, or no number"))
        require_same(quiet, beside, 0, tolerance)


def _without_number(t: Tensor) -> Tensor:
    """The last record of no number; whole numbers stay."""
    if not t.is_floating_point():
        return t
    return torch.cat([t[:-1], torch.full_like(t[-1:], math.nan)])


def _compare_at(
    level: Level, subject: Subject, records: Batch, places: list[int], size: int
) -> bool:
    """``_compare`` with all random numbers low or high; False too where the model cannot run with
    these.
    """
    try:
        with CommonRandomness(level):
            return _compare(subject, records, places, size, thorough=False, again=True)
    except Mixes:
        raise
    # numbers that hardly ever come together (every layer left out); one example at a time is exact
    except Exception:
        return False


def _finite_places(subject: Subject, records: Batch, wanted: int) -> list[int]:
    """Places of records with finite losses, spread over the batch; others are tried where some are
    not finite.
    """
    first = spread(batch_size_of(records), wanted)
    losses = subject.losses(take(records, first))
    if bool(losses.isfinite().all()):
        return first
    found: list[int] = []
    for place in [
        *first,
        *(p for p in spread(batch_size_of(records), 4 * wanted) if p not in first),
    ]:
        if bool(subject.losses(take(records, [place])).isfinite().all()):
            found.append(place)
        if len(found) == wanted:
            break
    return found


def _compare(
    subject: Subject,
    records: Batch,
    places: list[int],
    size: int,
    thorough: bool,
    again: bool = False,
) -> bool:
    """Losses and factors alone and in company; False where random numbers cannot be held still.
    ``again``: with other numbers, of the whole micro-batch by losses alone.
    """
    few, n = take(records, places), len(places)
    looks = [subject.look(take(few, [row])) for row in range(min(n, LOOKED_AT if thorough else 2))]
    rest = (subject.losses(take(few, [row])) for row in range(len(looks), n))
    alone = torch.cat([*(look.losses for look in looks), *rest])
    tolerance = subject.tolerance(alone)

    def in_company() -> Iterator[tuple[Tensor, Tensor]]:
        """(losses in company, the same alone)."""
        forward = list(range(n))
        for order in (forward, forward[::-1]):
            seen = subject.look(take(few, order))
            yield seen.losses, alone[order]
            for row, look in enumerate(looks):
                require_same(look, seen, order.index(row), tolerance)
        # Records may be copies of each other: what counts each text once drops one of them.
        twice = [*forward[:-1], 0]
        copies = subject.look(take(few, twice))
        yield copies.losses, alone[twice]
        for row in (0, n - 1):
            require_same(looks[0], copies, row, tolerance)
        for order in (forward[::2], forward[1::2]) if thorough else ():
            yield subject.losses(take(few, order)), alone[order]
        others = _others(records, places, size)
        if others:
            many = take(records, [*places, *others])
            # What counts records may leave their losses as they are.
            whole = None if again else subject.look(many, first=len(looks))
            company = subject.losses(many) if whole is None else whole.losses
            yield company[:n], alone
            for row, look in enumerate(looks):
                if whole is not None:
                    require_same(look, whole, row, tolerance)
            # Mining drops those at the ends, which a few of many may miss.
            for end in {int(company.argmin()), int(company.argmax())} - set(forward):
                one = take(records, [others[end - n]])
                yield company[end : end + 1], subject.losses(one)
        # What follows from the largest number of a batch: a common scale, a bound of the loss; or
        # from a mean that is nothing on one side (the divergence that KTO takes off).
        far = (with_first_farthest(few, times) for times in (FARTHEST, -FARTHEST))
        for loud in (with_first_louder(few), *far):
            losses = None if loud is None else _of_made_up(subject, partial(subject.losses, loud))
            if losses is not None:
                yield losses[1:], alone[1:]

    first = take(few, [0])
    try:
        for together, apart in in_company():
            if close(together, apart, tolerance.loss, tolerance.floor):
                continue
            if not close(
                subject.losses(few), subject.losses(few, salt=1), tolerance.loss, tolerance.floor
            ):
                return False
            _require_same_again(subject.losses(first), alone[:1], tolerance)
            raise Mixes(MIXES.format("its value with and without the others"))
    except Mixes:  # or masks of numpy's (SpecAugment), of which the loss shows little
        if _follow_from_seeds(subject, few, looks, tolerance):
            return False
        raise
    _require_same_again(subject.losses(first), alone[:1], tolerance)
    return True


def _follow_from_seeds(
    subject: Subject, few: Batch, looks: list[Look], tolerance: Tolerance
) -> bool:
    """Whether what an example's gradient is made of, alone, is another with another seed: numbers
    are drawn that are not held still.
    """
    try:
        for row, look in enumerate(looks):
            for salt in SALTS:
                require_same(look, subject.look(take(few, [row]), salt=salt), 0, tolerance)
    except Mixes:
        return True
    return False


def _others(records: Batch, places: list[int], size: int) -> list[int]:
    """Places of records that make up a micro-batch together with these. Where there are not so many
    (a few public ones), they come again: what begins with a number of records is met all the same.
    """
    count, wanted = batch_size_of(records), max(size - len(places), 0)
    rest = [row for row in range(count) if row not in places]
    again = (row % count for row in range(wanted))
    return [*rest, *again][:wanted]


def _of_made_up(subject: Subject, look: Callable[[], T]) -> T | None:
    """What numbers far out give, and nothing of them stays: a mean that is kept would be no number
    from then on. None where the model cannot run with them: it may check or look them up.
    """
    before = Snapshot(subject.model, subject.per_example_loss)
    try:
        return look()
    except Exception:
        return None
    finally:
        before.put_back()


def _require_same_again(again: Tensor, before: Tensor, tolerance: Tolerance) -> None:
    if not close(again, before, tolerance.again, tolerance.again):
        raise Mixes(_KEEPS)


def _require_no_gradient_between(subject: Subject, few: Batch, thorough: bool) -> None:
    """The losses of every other example have no gradient at the activations of those between;
    thorough: and the other way round.
    """
    rows = list(range(batch_size_of(few)))
    for wanted in (rows[::2], rows[1::2]) if thorough else (rows[::2],):
        others = [row for row in rows if row not in wanted]
        for (name, _), factors in subject.look(few, wanted).factors.items():
            own, other = float(factors.reach[wanted].max()), float(factors.reach[others].max())
            if other > 1e-6 * own:
                raise Mixes(MIXES.format(f"its gradient at layer {name!r}"))
