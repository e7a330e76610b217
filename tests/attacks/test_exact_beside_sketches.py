"""Exact parameters beside sketched ones: what a record is divided by may not follow from others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper, layer_overrides
from quietgrad.clipping.norms.choice import Policy
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Batch

POSITIONS, WIDTH, CROWD = 16, 64, 40


class Two(nn.Module):
    """One layer is measured exactly, the other by a sketch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.exact = nn.Linear(WIDTH, 48, bias=False)
        self.sketched = nn.Linear(WIDTH, 40, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        c = batch["c"].unsqueeze(-1)
        exact = (self.exact(batch["x"]) * c).sum((1, 2))
        return exact + 1e-6 * (self.sketched(batch["x"]) * c).sum((1, 2))


def crowd(longer: int) -> Batch:
    """Records whose positions nearly cancel, alone and beside one that is longer and hardly there:
    with it, formed gradients cost less than the factors' products.
    """
    source = torch.Generator().manual_seed(0)
    positions = POSITIONS * (4 if longer else 1)
    x, c = torch.zeros(CROWD + longer, positions, WIDTH), torch.zeros(CROWD + longer, positions)
    offset = 1000 * torch.randn(CROWD, 1, WIDTH, generator=source)
    x[:CROWD, :POSITIONS] = offset + 0.01 * torch.randn(CROWD, POSITIONS, WIDTH, generator=source)
    c[:CROWD, :POSITIONS] = torch.tensor([1.0, -1.0]).repeat(POSITIONS // 2)
    if longer:
        x[CROWD], c[CROWD] = 1e-6 * torch.randn(positions, WIDTH, generator=source), 1e-6
    return {"x": x, "c": c}


def sum_with(longer: int, word: str, estimator: str) -> Tensor:
    clipper = Clipper(
        1.0, estimator, layers={"exact.weight": word}, engine="bookkeeping", physical_batch_size=100
    )
    drawn = Projections(RandomKey.from_seed(3))
    given = clipper.clip(Two(), lambda m, b: m(b), crowd(longer), projections=drawn).gradients
    return torch.cat([value.double().flatten() for value in given.values()])


def moved(word: str, estimator: str) -> float:
    """How far the longer record, itself below 1e-8, moves a sum that is no zero."""
    sums = [sum_with(longer, word, estimator) for longer in (0, 1)]
    assert max(float(one.norm()) for one in sums) > 0.1
    return float((sums[1] - sums[0]).norm())


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
@pytest.mark.parametrize("word", ["exact", "ghost", "auto", "materialized"])
def test_a_longer_record_does_not_move_the_others(word: str, estimator: str) -> None:
    """Before: 7 C, since beside a sketch the bound itself is divided by, and the way it was taken
    followed from the longest record.
    """
    assert moved(word, estimator) < 1e-6


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
def test_whether_gradients_are_kept_decides_nothing(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = sum_with(0, "exact", estimator)

    def formed_twice(*given: Any, **named: Any) -> Policy:
        return Policy(*given, **{**named, "may_keep": False})

    monkeypatch.setattr(layer_overrides, "Policy", formed_twice)
    assert float(kept.norm()) > 0.1
    assert float((sum_with(0, "exact", estimator) - kept).norm()) < 1e-6


def test_a_way_that_follows_from_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsteady(*given: Any, steady: bool, **named: Any) -> Policy:
        return Policy(*given, **named)

    monkeypatch.setattr(layer_overrides, "Policy", unsteady)
    assert moved("exact", "hutch") > 0.1
