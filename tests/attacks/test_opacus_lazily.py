"""Loops of the Opacus kind run the model on the batch before anything is clipped: what it keeps of
that batch is gone again when the guard looks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.grad_sample import GradSampleModule

C, N = 0.4, 12


class Normalised(nn.Module):
    """Takes off the mean of the first batch, for ever."""

    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0, keepdim=True)
        return x - self.mean


def first_sum(n: int, layer: nn.Module) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, 5, generator=draw), torch.randint(0, 3, (N,), generator=draw)
    x[-1] *= 50
    torch.manual_seed(0)
    model: Any = nn.Sequential(layer, nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    raw: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=raw,
        data_loader=DataLoader(TensorDataset(x[:n], y[:n]), batch_size=n),
        noise_multiplier=1.0,
        max_grad_norm=C,
    )
    sums: list[dict[str, Tensor]] = []
    release = optimizer._release

    def note(clipped: Any) -> None:
        sums.append({name: g.clone() for name, g in clipped.gradients.items()})
        release(clipped)

    optimizer._release = note
    for rows, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        if isinstance(layer, Last):
            assert layer.last is not None and len(layer.last) == len(rows)
        optimizer.step()
    return sums[0]


class Last(nn.Module):
    """Keeps its input for the loop to look at, and does not read it."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return x


def distance(layer: type[nn.Module]) -> float:
    a, b = (first_sum(n, layer()) for n in (N, N - 1))
    return math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a)) / C


def test_a_model_that_keeps_something_of_the_first_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.0\.mean keeps something between calls"):
        first_sum(N, Normalised())


def test_without_it_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GradSampleModule, "forget_records", lambda *_: None)
    assert distance(Normalised) > 1.5


def test_what_the_loop_looks_at_stays_until_the_step() -> None:
    assert distance(Last) < 1.0 + 1e-5
