"""Layers without a rule, whose forward pass is repeated for each example: what they read besides
their arguments was set for a whole batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.soundness import subject
from quietgrad.randomness import RandomKey

RECORDS, C = 24, 0.1
DRAWN = Projections(RandomKey.from_seed(0))


class Gate(nn.Module):
    """``mask`` is an attribute that the model sets before its call."""

    mask: Tensor

    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.sliced = sliced

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (self.mask[: len(x)] if self.sliced else self.mask)


class Masked(nn.Module):
    def __init__(self, sliced: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(6, 6), Gate(sliced)
        self.head = nn.Linear(6, 3)
        self.first.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.gate.mask = mask
        return self.head(self.gate(self.first(x)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")


def records() -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x, mask = torch.randn(RECORDS, 6, generator=source), torch.rand(RECORDS, 6, generator=source)
    return x, 1 + mask, torch.randint(0, 3, (RECORDS,), generator=source)


def moved(**settings: Any) -> float:
    """By another first record, in units of C."""
    x, mask, y = records()
    bound = Clipper(C, **settings).bind(Masked(sliced=True), loss)
    before = bound.clip((x, mask, y), DRAWN, step=0).gradients["gate.scale"]
    mask = torch.cat([-mask[:1], mask[1:]])
    return (
        float((bound.clip((x, mask, y), DRAWN, step=1).gradients["gate.scale"] - before).norm()) / C
    )


def test_a_layer_that_reads_what_was_set_for_the_batch_is_taken_alone() -> None:
    assert moved() <= 2.0  # one record in another's place


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.parametrize("settings", [{"engine": "bookkeeping"}, {"estimator": "hutch"}], ids=str)
def test_together_it_is_refused_by_name(settings: dict[str, Any], sliced: bool) -> None:
    """Not sliced, repeating it for one example gives as many rows as the batch has."""
    bound = Clipper(C, **settings).bind(Masked(sliced), loss)
    with pytest.raises(
        NotCaptured, match=r"'gate' has no rule, .* set for the whole batch"
    ) as found:
        bound.clip(records(), step=0)
    assert str(RECORDS) not in str(found.value)


def test_what_does_not_run_again_for_one_is_taken_alone() -> None:
    batch = records()
    found = Clipper(C).bind(Masked(sliced=False), loss).clip(batch, step=0).gradients
    right = Clipper(C, engine="one-example").bind(Masked(sliced=False), loss).clip(batch, step=0)
    assert torch.equal(found["gate.scale"], right.gradients["gate.scale"])


def test_without_the_look_one_record_changes_the_gradients_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "repeated_gradients", lambda *_: {})
    assert moved() > 4.0
