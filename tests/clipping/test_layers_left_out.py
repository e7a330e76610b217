"""LayerDrop over adapters: a pass may leave out all that is trained, and its record then adds zero.
Before: the run ended with "losses without a gradient".
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

RATE, RELEASES = 0.4, 12
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand([])),
    "numpy": lambda: float(np.random.uniform()),
    "python": random.random,
}


class Adapted(nn.Module):
    """Two frozen layers, each with a trained one beside it, that are left out together."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.head = draw, nn.Linear(5, 3).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(5, 5).requires_grad_(False) for _ in range(2))
        self.adapters = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            if not (self.training and self.draw() < RATE):
                x = x + torch.tanh(layer(x) + adapter(x))
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def batch(records: int = 4) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(records, 5, generator=source),
        "y": torch.randint(0, 3, (records,), generator=source),
    }


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradients.values()]).norm())


@pytest.mark.parametrize("engine", ["auto", "one-example", "bookkeeping"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_record_that_meets_no_adapter_adds_zero(draw: str, engine: str) -> None:
    bound = Clipper(1e-3, engine=engine).bind(Adapted(DRAWS[draw]), loss)
    bound.clip(batch(), step=0)
    parts = [norm(bound.clip(batch(1), step=4).gradients) for _ in range(8 * RELEASES)]
    assert all(part == 0.0 or 0.99e-3 < part <= 1e-3 for part in parts)
    assert {part == 0.0 for part in parts} == {True, False}  # 0.84^96: once in ten million times
    for step in range(RELEASES):
        assert norm(bound.clip(batch(), step=step).gradients) <= 4e-3


@pytest.mark.parametrize("engine", ["auto", "one-example"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_loss_that_never_has_a_gradient_is_refused(draw: str, engine: str) -> None:
    bound = Clipper(1e-3, engine=engine).bind(
        Adapted(DRAWS[draw]), lambda model, batch: loss(model, batch).detach()
    )
    with pytest.raises(ValueError, match=r"without a gradient.*detach"):
        bound.clip(batch(), step=0)


def test_one_record_first_is_looked_at_too() -> None:
    bound = Clipper(1e-3).bind(
        Adapted(DRAWS["torch"]), lambda model, batch: loss(model, batch).detach()
    )
    with pytest.raises(ValueError, match=r"without a gradient.*detach"):
        bound.clip(batch(1), step=0)


def test_records_that_leave_each_other_without_a_gradient_end_the_run() -> None:
    """Several together add zero for no reason of their own: with one record more they might not."""

    def unless_all_are_above(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = loss(model, batch)
        return losses.detach() if bool((batch["x"][:, 0] > 0).all()) else losses

    records = batch()
    records["x"][:, 0] = -records["x"][:, 0].abs()
    bound = Clipper(1e-3).bind(nn.Sequential(nn.Linear(5, 3)), unless_all_are_above)
    bound.clip(records, step=0)
    records["x"][:, 0] *= -1
    with pytest.raises(ValueError, match="without a gradient"):
        bound.clip(records, step=4)
