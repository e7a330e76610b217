"""Whether every record meets random numbers of its own.

Records that share a number share it with those of their micro-batch, and one record more brings
others into another micro-batch, and to another number. Taken one at a time, each has its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.soundness.company.differences import Mixes, close, require_same
from quietgrad.clipping.soundness.fingerprints import Factors
from quietgrad.clipping.soundness.held_still import (
    EXTREMES,
    CommonRandomness,
    Level,
    others_stand,
    seeded,
)
from quietgrad.clipping.soundness.records import spread, take
from quietgrad.clipping.soundness.subject import Look, Subject
from quietgrad.tensors import Batch, batch_size_of

Shapes = list[tuple[int, ...]]

TRIED = 2  # records, for one's loss may be zero whatever it meets


def share_numbers(subject: Subject, records: Batch) -> bool:
    """Whether all records of a micro-batch meet one random number: one that is drawn once (a layer
    that is left out, a mask of a weight), or one that is drawn for each record and met by others
    too (the first of them, their mean). Of Python's and numpy's numbers nobody tells whose they
    are: a layer is left out by one of them beside noise of each record's own.

    True also where it cannot be told whose a number of torch's is.
    """
    one = _drawn(subject, take(records, [0]))
    with seeded(subject.devices):
        if subject.others_stand != others_stand():
            return True
    if not one:
        return False
    two = _drawn(subject, take(records, [0, 0]))
    # Of a record's own there are twice as many, or they have another shape.
    counts = Counter(two)
    if any(0 < counts[shape] < 2 * count for shape, count in Counter(one).items()):
        return True
    # How the two records' numbers lie: either may be a model's way.
    return not any(_are_apart(subject, records, one, two, by_turns) for by_turns in (False, True))


def _drawn(subject: Subject, records: Batch) -> Shapes:
    """What torch drew, forward and backward (of a model that is cut, forward), in order."""
    with CommonRandomness() as still:
        if subject.layout.cut is not None:  # whether layers can be cut is not known yet
            subject.losses(records)
        else:
            subject.look(records)
    return still.shapes


def _are_apart(subject: Subject, records: Batch, one: Shapes, two: Shapes, by_turns: bool) -> bool:
    """Whether a record beside a copy of it has the same loss, and a gradient made of the same, when
    the copy's numbers are low and when they are high.
    """
    whose = _whose(one, two, by_turns)
    if whose is None:
        return False
    for place in spread(batch_size_of(records), TRIED):
        copies = take(records, [place, place])
        for record in (0, 1):
            low, high = (_beside(subject, copies, record, whose, by_turns, x) for x in EXTREMES)
            if low is None or high is None or not _are_alike(subject, low, high):
                return False
    return True


def _beside(
    subject: Subject,
    copies: Batch,
    record: int,
    whose: list[tuple[int, int]],
    by_turns: bool,
    level: Level,
) -> Look | None:
    """What one of two copies shows, with the other's numbers low or high; None where the model
    cannot run with these, or then draws otherwise.
    """
    still = _OthersOtherwise(whose, record, by_turns, level)
    try:
        with still:
            seen = subject.look(copies)
    except Exception:  # numbers that hardly ever come together
        return None
    return _of_one(seen, record) if still.drawn == len(whose) else None


def _of_one(look: Look, record: int) -> Look:
    def part(factors: Factors) -> Factors:
        held = {name: t for name, t in vars(factors).items() if isinstance(t, Tensor)}
        of_one: dict[str, Any] = {name: t[record : record + 1] for name, t in held.items()}
        return replace(factors, **of_one)

    factors = {key: part(factors) for key, factors in look.factors.items()}
    # Of a module with several outputs there are no factors.
    own = {key: given.of_example(record) for key, given in look.own.items()}
    return Look(look.losses[record : record + 1], factors, own, look.reached)


def _are_alike(subject: Subject, low: Look, high: Look) -> bool:
    known = subject.tolerance(low.losses)
    room = 10 * known.again
    try:
        require_same(low, high, 0, replace(known, factor=room))
    except (Mixes, NotCaptured):
        return False
    return close(low.losses, high.losses, room, room)


def _whose(one: Shapes, two: Shapes, by_turns: bool) -> list[tuple[int, int]] | None:
    """Of each draw for two records, which dimension is the records' (and -1), or that the whole is
    one record's (-1, and which); None where that cannot be told.
    """
    if len(two) == 2 * len(one):
        return [(-1, k % 2 if by_turns else k // len(one)) for k in range(len(two))]
    if len(two) != len(one):
        return None
    found = []
    for shape, doubled in zip(one, two, strict=True):
        dims = [d for d, (a, b) in enumerate(zip(shape, doubled, strict=False)) if a != b]
        if len(shape) != len(doubled) or len(dims) != 1 or doubled[dims[0]] != 2 * shape[dims[0]]:
            return None
        found.append((dims[0], -1))
    return found


class _OthersOtherwise(TorchDispatchMode):
    """Of two records one gets the numbers that ``CommonRandomness`` gives, and the other one the
    least or the greatest of many.

    Args:
        whose: of ``_whose``.
        record: which of the two gets its numbers as they come.
        by_turns: whether the records' numbers take turns in their dimension.
        level: of the other's numbers.
    """

    def __init__(
        self, whose: list[tuple[int, int]], record: int, by_turns: bool, level: Level
    ) -> None:
        super().__init__()
        self._whose, self._record, self._by_turns = list(whose), record, by_turns
        self._own, self._other = CommonRandomness(), CommonRandomness(level)

    @property
    def drawn(self) -> int:
        """How many random operations there were."""
        return len(self._own.shapes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self.drawn
        if not self._own.draws(func):  # attention's dropout is left out
            return self._own.__torch_dispatch__(func, types, args, kwargs)
        written = func._schema.name.endswith("_") and isinstance(args[0], Tensor)
        own, other = (
            one.__torch_dispatch__(
                func, types, (args[0].clone(), *args[1:]) if written else args, kwargs
            )
            for one in (self._own, self._other)
        )
        dim, owner = self._whose[before]
        if isinstance(own, tuple):
            made: Any = tuple(map(lambda a, b: self._put(a, b, dim, owner), own, other))
        else:
            made = self._put(own, other, dim, owner)
        return args[0].copy_(made) if written else made

    def _put(self, own: Any, other: Any, dim: int, owner: int) -> Any:
        """``own`` at this record's places, ``other`` at the other one's."""
        if dim < 0:
            return own if owner == self._record else other
        if not isinstance(own, Tensor) or own.dim() <= dim or own.shape[dim] < 2:
            return own
        per = own.shape[dim] // 2
        places = torch.arange(own.shape[dim], device=own.device)
        mine = (places % 2 if self._by_turns else places // per) == self._record
        return torch.where(mine.view(-1, *[1] * (own.dim() - 1 - dim)), own, other)
