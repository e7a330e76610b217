"""Ghost norms in float64: where float32's bound says too little, they still tell the norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.accumulator import Accumulator
from quietgrad.clipping.norms import rounding
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients

EXAMPLES = 12


class Centred(nn.Module):
    """Its inputs' common part cancels over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(20, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.outer(torch.tanh(h - h.mean(1, keepdim=True))).mean(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def measured_again(estimator: str, offset: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many examples were measured as their own gradients; the sum is the oracle's."""
    torch.manual_seed(0)
    model = Centred()
    source = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 24, 20, generator=source)
    x[..., 0] += offset
    batch = (x, torch.randint(0, 4, (EXAMPLES,), generator=source))
    looked_at: list[int] = []
    own = Accumulator.gradient_of
    monkeypatch.setattr(
        Accumulator,
        "gradient_of",
        lambda self, example: looked_at.append(example) or own(self, example),
    )
    clip = 0.05
    bound = Clipper(clip, estimator, engine="bookkeeping").bind(model, loss)
    bound.check(batch)
    looked_at.clear()
    found = bound.clip(batch, step=0).gradients
    exact = oracle_clipped_sum(oracle_gradients(model, loss, batch), clip)
    for name, wanted in exact.items():
        # What both are formed from are float32 sums that cancel.
        assert float((found[name] - wanted).norm()) < 2e-3 * clip * EXAMPLES, name
    return len(set(looked_at))


def test_examples_need_no_second_look_where_ghost_norms_do(monkeypatch) -> None:
    assert measured_again("ghost", 0.0, monkeypatch) == 0
    assert measured_again("ghost", 500.0, monkeypatch) == EXAMPLES
    assert measured_again("ghost64", 500.0, monkeypatch) == 0


def test_what_the_sum_itself_may_be_off_by_still_counts(monkeypatch) -> None:
    monkeypatch.setattr(rounding, "OF_SPREAD", 0.0)  # such gradients are shortened further
    assert measured_again("ghost64", 1e7, monkeypatch) == EXAMPLES
