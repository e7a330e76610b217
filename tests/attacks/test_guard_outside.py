"""Mixing that only a record far outside the others' range would set off, or only at the ends of a
large batch: the guard's own records are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, Loss, good, records, rows, small, switched_off
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import mixing
from quietgrad.clipping.soundness.records import LOUDER, with_first_louder

Change = Callable[[Tensor], Tensor]


class Through(nn.Module):
    """A small network that changes what goes in."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.change = nn.Linear(6, 8), nn.Linear(8, 3), change

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(self.change(x))))


def in_sixteen_bits(x: Tensor) -> Tensor:
    """With one scale for the batch, as dynamic quantisation has: ordinary records differ by less
    than the guard's tolerance. (In eight bits they differ by more.)
    """
    scale = x.detach().abs().max() / 32767
    return (x / scale).round() * scale


def twice_where_one_is_far(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, batch) * (2 if bool((batch["x"] > 50).any()) else 1)


def without_the_hardest(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = good(model, batch)
    return losses * (losses.detach() < losses.detach().max()) if len(losses) > 20 else losses


OUTSIDE: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "quantised": (lambda: Through(in_sixteen_bits), good),
    "a-flag": (small, twice_where_one_is_far),
}
ATTACKS = {**OUTSIDE, "hardest-dropped": (small, without_the_hardest)}


def clipped(model: nn.Module, loss: Loss) -> dict[str, Tensor]:
    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=RECORDS).bind(model, loss)
    return bound.clip(records()).gradients


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_on_ordinary_records(name: str) -> None:
    make, loss = ATTACKS[name]
    with pytest.raises(ValueError, match="depends on other examples"):
        clipped(make(), loss)


@pytest.mark.parametrize("name", OUTSIDE)
def test_without_a_louder_record_it_is_not_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for made in ("with_first_louder", "with_first_farthest"):
        monkeypatch.setattr(mixing, made, lambda few, times=0.0: None)
    monkeypatch.setattr(mixing, "_require_deaf", lambda subject, few: None)  # sees some of it, too
    make, loss = OUTSIDE[name]
    clipped(make(), loss)


def test_a_record_far_outside_moves_a_quantised_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 3.9 C, where nobody looks."""
    switched_off(monkeypatch)
    batch, limit = records(), 0.2
    batch["x"][0] *= 1e6
    bound = Clipper(limit, engine="bookkeeping", physical_batch_size=RECORDS).bind(
        Through(in_sixteen_bits), good
    )
    whole = bound.clip(batch).gradients
    rest = bound.clip(rows(batch, *range(1, RECORDS))).gradients
    squares = (float((g - rest[name]).double().pow(2).sum()) for name, g in whole.items())
    assert sum(squares) ** 0.5 > 3 * limit


class _Strict(nn.Module):
    """Refuses numbers out of its range, and looks whole numbers up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Embedding(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 20:
            raise ValueError("out of range")
        return self.inner(x + self.table(x.abs().long().clamp(max=7)).sum(1))


def test_a_model_that_checks_its_numbers_is_not_refused() -> None:
    clipped(_Strict(), good)


def test_a_louder_record_is_tried_where_the_farthest_is_refused() -> None:
    """A flag, in a model that checks its numbers at a million."""

    def checked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if bool((batch["x"].abs() > 1e6).any()):
            raise ValueError("out of range")
        return twice_where_one_is_far(model, batch)

    with pytest.raises(ValueError, match="depends on other examples"):
        clipped(small(), checked)


@pytest.mark.parametrize("times", [0.0, 3.0])
def test_outliers_among_many_that_are_not_looked_at_are_taken_alone(times: float) -> None:
    """A loss that drops, or counts thrice, what is more than four deviations from the mean: among
    eight nothing is, and there is one at a place that is not looked at.
    """

    def weighed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(8.0 * model(batch["x"]), batch["y"], reduction="none")
        apart = losses.detach() - losses.detach().mean()
        spread = apart.square().mean().sqrt() + 1e-6
        return torch.where(apart > 4 * spread, times * losses, losses)

    batch, model = records(64), small()
    found = model(batch["x"])
    batch["y"] = found.argmax(1)
    batch["y"][5] = found[5].argmin()
    assert bool((weighed(model, batch)[5] - weighed(model, rows(batch, 5))).abs() > 1.0)
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, engine="bookkeeping", physical_batch_size=64).bind(model, weighed).clip(batch)


def test_whole_numbers_stay_and_others_leave_their_range() -> None:
    batch: dict[str, Any] = {
        "mask": torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        "ids": torch.tensor([[3, 4], [5, 6]]),
        "x": torch.tensor([[0.5, -2.0], [0.25, 0.75]]),
    }
    louder = with_first_louder(batch)
    assert louder is not None
    assert torch.equal(louder["mask"], batch["mask"]) and torch.equal(louder["ids"], batch["ids"])
    assert louder["x"].tolist() == [[0.5 * LOUDER, -2.0], [0.25, 0.75]]
    assert with_first_louder({"ids": batch["ids"], "mask": batch["mask"]}) is None
