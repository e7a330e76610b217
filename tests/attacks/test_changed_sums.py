"""A clipped sum that a script changed: in either part of an addition, in an entry that a stamp does
not keep, or by a gradient more. Nothing of it is released.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attacks.contract import opened
from quietgrad.clipping import ClippedSum
from quietgrad.clipping.clipped_sum import ENTRIES
from quietgrad.plan import PrivateRun

CHANGED = "was changed after it was clipped"
Change = Callable[[dict[str, Tensor]], object]
CHANGES: dict[str, Change] = {
    "an entry that is not kept": lambda sums: sums["w"][1].fill_(100.0),
    "a kept entry, behind autograd": lambda sums: sums["w"].data[-4].fill_(100.0),
    "another tensor": lambda sums: sums.update(w=torch.full_like(sums["w"], 100.0)),
    "the same numbers elsewhere": lambda sums: sums.update(w=sums["w"].clone()),
    "a gradient more": lambda sums: sums.update(more=torch.full((3,), 100.0)),
    "a gradient less": lambda sums: sums.pop("b"),
}


def zeros(private: PrivateRun, examples: int) -> ClippedSum:
    """So long that a stamp keeps every fourth entry."""
    sums = {"w": torch.zeros(examples, 4 * ENTRIES), "b": torch.zeros(examples, 3)}
    return private.contribution(sums, examples)


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_changed_sum_is_not_released(change: Change) -> None:
    private, indices = opened()
    clipped = zeros(private, len(indices))
    change(clipped.gradients)
    with pytest.raises(RuntimeError, match=CHANGED):
        private.release(clipped)
    assert private.released == 0
    private.release(zeros(private, len(indices)))


@pytest.mark.parametrize("place", [0, 1], ids=["the first part", "the second part"])
def test_a_changed_part_is_not_added(place: int) -> None:
    """A mutant looked at the first part alone: the second one went out at any length."""
    private, indices = opened()
    parts = [zeros(private, 1), zeros(private, len(indices) - 1)]
    parts[place].gradients["w"][1] = 100.0
    with pytest.raises(ValueError, match=CHANGED):
        _ = parts[0] + parts[1]
    assert private.released == 0
