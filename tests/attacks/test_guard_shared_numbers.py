"""One random number for all records of a micro-batch: a layer that is left out, a mask of a weight.

With one record more, others are in another micro-batch and meet another number, so such a model is
taken one record at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records, switched_off
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import guard

# Drawn for each record, but met by others.
MET_BY_OTHERS = ["first", "mean", "last mask", "one of many"]
# Drawn in the backward pass; the last one is each record's own.
BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "layer backward": lambda g: g * (torch.rand([]) < 0.5),
    "first backward": lambda g: g * (torch.rand(len(g))[0] < 0.5),
    "pythons backward": lambda g: g * (random.random() < 0.5),
    "own backward": lambda g: g * (torch.rand_like(g) < 0.5),
}


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
        if self.training and self.kind == "first":
            h = h + self.inner(h) * (torch.rand(len(h))[0] < 0.5)
        if self.training and self.kind == "mean":
            h = h + self.inner(h) * torch.rand(len(h)).mean()
        if self.training and self.kind == "last mask":
            h = h * F.dropout(torch.ones_like(h), 0.5)[-1]
        if self.training and self.kind == "one of many":
            h = h * next(iter([torch.rand(8) < 0.5 for _ in h]))
        if h.requires_grad and self.kind in BACKWARD:
            h.register_hook(BACKWARD[self.kind])
        if self.training and self.kind == "heads":
            h = F.dropout(h.view(-1, 4), 0.5).view(len(h), 8)
        if self.training and self.kind == "heads by turns":
            h = torch.cat(F.dropout(torch.cat(h.chunk(2, 1)), 0.5).chunk(2), 1)
        if self.training and self.kind == "positions first":
            h = F.dropout(h.view(-1, 2, 4).movedim(0, 1), 0.5).movedim(1, 0).flatten(1)
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
    "kind",
    [
        *["layer", "features", "pythons", "numpys", "beside others", "beside noise"],
        *MET_BY_OTHERS,
        *list(BACKWARD)[:3],
    ],
)
def test_records_that_would_share_a_number_are_taken_one_at_a_time(kind: str) -> None:
    assert shares_of(kind, [0, 2, 4, 7, 8]) == [1] * 5


def test_a_rate_that_grows_from_zero_is_seen_at_the_next_look() -> None:
    assert shares_of("layer", [0, 1, 2, 4], from_step=1) == [RECORDS, 1, 1, 1]


def crowd(first: int, kind: str = "features") -> Tensor:
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
    made = bound.bind(Leaves(kind).train(), loss).clip(batch).gradients
    return torch.cat([g.flatten() for g in made.values()])


def test_without_the_look_one_record_reveals_a_crowd_that_cancels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched_off(monkeypatch)
    assert max(float(crowd(0).norm()) for _ in range(5)) < 1e-5
    assert max(float(crowd(1).norm()) for _ in range(5)) > 1.5  # C is all that it may add


@pytest.mark.parametrize("kind", [*MET_BY_OTHERS, *list(BACKWARD)[:3]])
def test_without_the_look_at_what_others_meet_it_is_revealed_too(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    switched_off(monkeypatch)
    assert max(float(crowd(0, kind).norm()) for _ in range(5)) < 1e-5
    least = 0.3 if kind == "mean" else 1.5  # of a mean of two that differ little
    assert max(float(crowd(1, kind).norm()) for _ in range(12)) > least


@pytest.mark.parametrize(
    "kind",
    ["each", "none", "row by row", "heads", "heads by turns", "positions first", "own backward"],
)
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
