"""Whether the rows that a layer is given are records, or positions that were picked from records,
of which ordinary ones happen to have one each: a marked word, a mask to be filled. A record of two
and one of none are as many rows as two records, and every row between them is another's.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.soundness.company.lengths import longest, positions_of
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.clipping.soundness.records import take
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch, map_tensors


def require_rows_of_records(subject: Subject, records: Batch) -> None:
    """Takes the first record alone with its first half twice, then with its second half twice:
    what is picked from it comes twice in one of them, and is missing in the other.

    Args:
        subject: model and loss; random numbers are held still.
        records: the first of them is looked at.

    Raises:
        NotCaptured: where a layer then has another number of rows than one: such a model is taken
            one example at a time.
    """
    # Of a model that is spread over ranks, no pass is begun that may well fail half-way.
    if longest(records) < 2 or subject.layout.spread is not None or subject.layout.cut is not None:
        return
    one = take(records, [0])
    before = Snapshot(subject.model, subject.per_example_loss)
    try:
        for second in (False, True):
            try:
                subject.look(map_tensors(one, partial(_half_twice, second=second)))
            except NotCaptured:
                raise
            except Exception:  # it may have nothing to say of what lacks a mark
                continue
    finally:
        before.put_back()


def _half_twice(t: Tensor, second: bool) -> Tensor:
    """Of an odd number of positions the middle one stays."""
    axis = positions_of(t)
    half = t.shape[axis] // 2 if axis else 0
    if not half:
        return t
    first, middle, last = t.split([half, t.shape[axis] - 2 * half, half], axis)
    each = last if second else first
    return torch.cat([each, middle, each], axis)
