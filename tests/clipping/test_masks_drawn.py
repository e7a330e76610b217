"""Layers that hold parameters of their own and draw which positions these stand at (a mask's vector
in Wav2Vec2, drawn by numpy, and in masked autoencoders, drawn by torch) are taken one example at a
time by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.escapes import NotCaptured

CLIP = 1e-3


class Masked(nn.Module):
    def __init__(self, draw: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.vector = nn.Parameter(torch.ones(5))
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        masked = self.draw(*x.shape[:2]).unsqueeze(2)
        return self.inner(torch.where(masked, self.vector, x)).tanh()


class Encoder(nn.Module):
    def __init__(self, draw: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.body, self.head = Masked(draw), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def by_numpy(records: int, positions: int) -> Tensor:
    return torch.from_numpy(np.random.rand(records, positions) < 0.5)


def by_python(records: int, positions: int) -> Tensor:
    return torch.tensor([[random.random() < 0.5 for _ in range(positions)] for _ in range(records)])


def by_torch(records: int, positions: int) -> Tensor:
    return torch.rand(records, positions) < 0.5


DRAWS = [by_numpy, by_python, by_torch]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(4, 12, 5), "y": torch.tensor([0, 1, 2, 0])}


@pytest.mark.parametrize("draw", DRAWS)
def test_they_are_taken_one_example_at_a_time(draw: Callable[[int, int], Tensor]) -> None:
    records = batch()
    bound = Clipper(CLIP).bind(Encoder(draw), loss)
    found = bound.clip(records, step=0).gradients
    assert bound.execution_choice(records).engine == "one-example"
    assert bool(found["body.vector"].any())
    for i in range(4):
        one = bound.clip({name: value[i : i + 1] for name, value in records.items()}, step=3)
        size = torch.cat([g.flatten() for g in one.gradients.values()]).norm()
        assert 0 < float(size) <= CLIP


@pytest.mark.parametrize("draw", DRAWS)
def test_asked_for_by_name_book_keeping_names_the_layer(
    draw: Callable[[int, int], Tensor],
) -> None:
    bound = Clipper(CLIP, engine="bookkeeping").bind(Encoder(draw), loss)
    with pytest.raises(NotCaptured, match=r"'body' has no rule.*draws random numbers"):
        bound.clip(batch(), step=0)
