"""Calls of a layer that are made by how many records there are, and leave every loss as it was to
the bit: gradients alone show them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, moved, records, small, switched_off
from quietgrad.clipping import Clipper

When = Callable[[int], bool]
WHEN: dict[str, When] = {
    "in company": lambda n: n > 1,
    "beside three": lambda n: n > 3,
    "beside sixteen": lambda n: n > 16,
    "alone": lambda n: n == 1,
}
ENGINES: dict[str, dict[str, Any]] = {"auto": {}, "bookkeeping": {"physical_batch_size": RECORDS}}


class Twice(nn.Module):
    """Beside some numbers of records a layer counts a second time, in the backward pass."""

    def __init__(self, when: When, another: bool) -> None:
        super().__init__()
        self.body, self.extra, self.when = small(), nn.Linear(6, 3), when
        self.another = another

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        if self.when(len(x)):
            more = self.extra(x) if self.another else self.body(x)
            out = out + 100.0 * (more - more.detach())
        return out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("another", [True, False], ids=["another layer", "the same again"])
@pytest.mark.parametrize("when", WHEN)
def test_calls_that_follow_from_how_many_there_are_are_refused(
    when: str, another: bool, engine: str
) -> None:
    """Before: accepted. Factors of calls that one of two passes did not make were not looked at,
    nor any of a whole micro-batch.
    """
    settings = ENGINES[engine]
    bound = Clipper(1.0, engine=engine, **settings).bind(Twice(WHEN[when], another), good)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=0)


@pytest.mark.parametrize("another", [True, False], ids=["another layer", "the same again"])
def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    assert moved(Twice(lambda n: n == RECORDS, another), good, records()) > 2
