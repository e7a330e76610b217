"""The records that the guard looks at: some of a batch, or made-up ones beside a single one, so
that it can decide before the first release whatever the first batch.

Made-up records are the record's own numbers moved around: values stay in their range, words stay
words, masks and labels stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quietgrad.clipping.capture.views import chosen_rows
from quietgrad.tensors import Batch, map_tensors, tensors_of

# Far enough for a common scale of 16 bits to change by more than the tolerances.
LOUDER = 1024.0

# And so far that what gives up on a batch beyond some size (a loss of a million, say) gives up; a
# square of it is a number in float32 yet.
FARTHEST = 2.0**40


def are_different(records: Batch) -> bool:
    """Whether they are more than copies of one record, which would show nothing."""
    return any(bool((t[1:] != t[:1]).any()) for t in tensors_of(records))


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """The examples at these places, in this order."""
    return chosen_rows(batch, list(rows))


def spread(n: int, at_most: int) -> list[int]:
    """Places spread evenly over n, the first and the last among them."""
    if n <= at_most:
        return list(range(n))
    return sorted({round(i * (n - 1) / (at_most - 1)) for i in range(at_most)})


def with_companions(one: Batch, examples: int) -> Batch | None:
    """The record and ``examples - 1`` made-up ones like it; None where nothing of it can be varied
    (nothing could be decided).
    """
    made = map_tensors(one, lambda t: torch.cat([_varied(t, j, examples) for j in range(examples)]))
    return made if any(bool((t[1:] != t[:1]).any()) for t in tensors_of(made)) else None


def _varied(t: Tensor, j: int, examples: int) -> Tensor:
    """[1, ...] the j-th variation: positions rolled, and floating-point numbers shrunk a little; j
    = 0 is the record itself.
    """
    if j == 0 or t.dtype == torch.bool or is_mask(t):
        return t
    moved = t.roll(j, dims=t.dim() - 1) if t.dim() > 1 else t
    return moved * (1 - j / (2 * examples)) if t.is_floating_point() else moved


def with_first_louder(records: Batch) -> Batch | None:
    """The records, the first of them far outside the others' range; None where it has no numbers
    that could be. Whole numbers stay: they may be words, classes, masks.

    On a GPU it takes the ends of that range: a model that looks its numbers up in a table would end
    the process there.
    """
    return _with_first(_louder, records)


def with_first_farthest(records: Batch, times: float = FARTHEST) -> Batch | None:
    """The same so many times as large, numbers that happen to be whole too; None where it has no
    floating-point numbers, and on a GPU.
    """
    return _with_first(partial(_farthest, times=times), records)


def _with_first(change: Callable[[Tensor], Tensor], records: Batch) -> Batch | None:
    made = map_tensors(records, lambda t: torch.cat([change(t), t[1:]]))
    pairs = zip(tensors_of(made), tensors_of(records), strict=True)
    return made if any(bool((new[0] != old[0]).any()) for new, old in pairs) else None


def _louder(t: Tensor) -> Tensor:
    first = t[:1]
    if not t.is_floating_point() or not first.numel():
        return first
    loud = first * LOUDER
    if t.is_cuda:
        loud = torch.where(first < t.float().mean(), t.amin(), t.amax())
    return torch.where(first == first.round(), first, loud)


def _farthest(t: Tensor, times: float) -> Tensor:
    first = t[:1]
    if t.is_cuda or not t.is_floating_point() or torch.finfo(t.dtype).max < FARTHEST**2:
        return first
    return first * times


def entries_of(records: Batch) -> int:
    """Of one record, padding included."""
    return sum(t[:1].numel() for t in tensors_of(records))


def is_mask(t: Tensor) -> bool:
    return bool(((t == 0) | (t == 1)).all())


def differing_rows(records: Batch) -> tuple[int, int, int] | None:
    """Two places with records that differ, and a third (which is the first again where there are
    only two); None where all are copies of one.
    """
    tensors = list(tensors_of(records))
    count = len(tensors[0])
    for row in range(1, count):
        if any(bool((t[row] != t[0]).any()) for t in tensors):
            return 0, row, next((i for i in range(count) if i not in (0, row)), 0)
    return None


def blank(one: Batch) -> Batch:
    """A record of the same shape that says nothing of anybody: words and labels 0, truth
    everywhere, numbers that count from place to place.
    """
    return map_tensors(one, _blank)


def _blank(t: Tensor) -> Tensor:
    if not t.is_floating_point():
        return torch.ones_like(t) if t.dtype == torch.bool else torch.zeros_like(t)
    numbers = torch.arange(t.numel(), device=t.device) * 7919 % 1009
    return (numbers.to(torch.float32) / 504.0 - 1.0).to(t.dtype).view(t.shape)
