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

from attacks.guarded import RECORDS, good, records, switched_off
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import guard


class Leaves(nn.Module):
    """A layer out, half of the time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.kind = kind
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training and self.kind == "layer" and self.rate:
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
        if self.training and self.kind == "beside noise":
            h = h + self.inner(h) * (random.random() < 0.5)
            h = h + 1e-4 * torch.from_numpy(np.random.randn(*h.shape)).to(h)
        if self.kind == "row by row":
            h = torch.stack([row * (torch.rand(8) < 0.5) for row in h])
        if self.kind == "each":
            h = h + self.inner(h) * (torch.rand(len(h), 1) < 0.5)
        if self.kind == "none":
            h = F.dropout(h + self.inner(h), 0.5, self.training)
        found: Tensor = self.head(h)
        return found


def shares_of(kind: str, steps: list[int], from_step: int = 0) -> list[int]:
    """How many records share one number, at each step; before ``from_step`` none is drawn."""
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
        model.rate = 0.5 * (step >= from_step)
        bound.clip(records(), step=step)
        found.append(max(seen[-2:]))
    return found


@pytest.mark.parametrize(
    "kind", ["layer", "features", "pythons", "numpys", "beside others", "beside noise"]
)
def test_records_that_would_share_a_number_are_taken_one_at_a_time(kind: str) -> None:
    assert shares_of(kind, [0, 2, 4, 7, 8]) == [1] * 5


def test_a_rate_that_grows_from_zero_is_seen_at_the_next_look() -> None:
    assert shares_of("layer", [0, 1, 2, 4], from_step=1) == [RECORDS, 1, 1, 1]


def crowd(first: int) -> Tensor:
    """The sum of a crowd that cancels, and of ``first`` records more in front that add nothing, in
    micro-batches of two of a model that is taken as it comes.
    """
    batch = records(64)
    batch["x"][:] = batch["x"][0]
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0] * 16)
    if first:
        batch = {name: torch.cat([t[:first], t]) for name, t in batch.items()}
        sign = torch.cat([torch.zeros(first), sign])
    batch["sign"] = sign

    def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return model(part["x"])[:, 0] * part["sign"]

    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=2)
    made = bound.bind(Leaves("features").train(), loss).clip(batch).gradients
    return torch.cat([g.flatten() for g in made.values()])


def test_without_the_look_one_record_reveals_a_crowd_that_cancels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched_off(monkeypatch)
    assert max(float(crowd(0).norm()) for _ in range(5)) < 1e-5
    assert max(float(crowd(1).norm()) for _ in range(5)) > 1.5  # C is all that it may add


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
