"""One random number for all records of a micro-batch: a layer that is left out, a mask of a weight.

With one record more, others are in another micro-batch and meet another number, so such a model is
taken one record at a time.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import guard


class Leaves(nn.Module):
    """A layer out, half of the time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training and self.kind == "layer":
            h = h + self.inner(h) * (torch.rand([]) < 0.5)
        if self.training and self.kind == "features":
            h = h * (torch.rand(8) < 0.5)
        if self.training and self.kind == "pythons":
            h = h + self.inner(h) * (random.random() < 0.5)
        if self.training and self.kind == "numpys":
            h = h + self.inner(h) * (np.random.rand() < 0.5)
        if self.training and self.kind == "beside others":
            h = h + self.inner(h) * (torch.rand([]) < 0.5)
            h = torch.stack([row * (torch.rand(8) < 0.5) for row in h])
        if self.kind == "row by row":
            h = torch.stack([row * (torch.rand(8) < 0.5) for row in h])
        if self.kind == "each":
            h = h + self.inner(h) * (torch.rand(len(h), 1) < 0.5)
        if self.kind == "none":
            h = F.dropout(h + self.inner(h), 0.5, self.training)
        found: Tensor = self.head(h)
        return found


def shares_of(kind: str, steps: list[int]) -> list[int]:
    """How many different shares the records get of one number, at each step."""
    model, found = Leaves(kind).train(), []
    seen: list[int] = []
    right = model.forward

    def forward(x: Tensor) -> Tensor:
        seen.append(len(x))
        return right(x)

    model.forward = forward  # type: ignore[method-assign]
    bound = Clipper(1.0, engine="bookkeeping").bind(model, good)
    for step in steps:
        seen.clear()
        bound.clip(records(), step=step)
        found.append(max(seen[-2:]))
    return found


@pytest.mark.parametrize("kind", ["layer", "features", "pythons", "numpys", "beside others"])
def test_records_that_would_share_a_number_are_taken_one_at_a_time(kind: str) -> None:
    assert shares_of(kind, [0, 2, 4, 7, 8]) == [1] * 5


@pytest.mark.parametrize("kind", ["each", "none", "row by row"])
def test_numbers_of_each_record_are_no_matter(kind: str) -> None:
    assert shares_of(kind, [0, 2, 4]) == [RECORDS] * 3


def test_a_decided_model_is_not_looked_at_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Clipper(1.0).bind(Leaves("layer").train(), good)
    bound.clip(records(), step=0)
    monkeypatch.setattr(guard.Guard, "examine", None)
    bound.clip(records(), step=2)
    with bound._prepared(bound.examples_of(records()), 4) as (_, how):
        assert how.physical_batch_size == 1 and "share random numbers" in how.why


def test_without_the_look_they_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "share_numbers", lambda *_: False)
    assert shares_of("layer", [0, 2]) == [RECORDS] * 2
