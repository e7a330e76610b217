"""Records, a small model, a good loss and plans for the attacks on the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper, per_example_norms
from quietgrad.clipping.soundness.guard import Guard
from quietgrad.plan import PrivacyConfig

Loss = Callable[[nn.Module, Any], Tensor]
RECORDS = 24


def records(n: int = RECORDS, seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n, 6, generator=source) + 1.0,
        "y": torch.randint(0, 3, (n,), generator=source),
    }


def rows(batch: dict[str, Tensor], *which: int) -> dict[str, Tensor]:
    return {name: t[list(which)] for name, t in batch.items()}


def small(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def good(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


class With(nn.Module):
    """A small network with something done to its hidden features."""

    def __init__(self, change: Callable[[With, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 3)
        self.change = change
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.drop(self.change(self, torch.tanh(self.first(x)))))


def without_mean(model: With, h: Tensor) -> Tensor:
    return h - h.detach().mean(0, keepdim=True)


def sorted_by_first(model: With, h: Tensor) -> Tensor:
    return h[h.detach()[:, 0].argsort()]


def in_training_only(model: With, h: Tensor) -> Tensor:
    return without_mean(model, h) if model.training else h


def mixed_up(model: With, h: Tensor) -> Tensor:
    return 0.5 * h + 0.5 * h[torch.randperm(len(h))].detach()


def info_nce(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    h = F.normalize(model(batch["x"]), dim=1)
    partners = F.normalize(model(batch["x"].roll(1, dims=1)), dim=1)
    return F.cross_entropy(h @ partners.T / 0.1, torch.arange(len(h)), reduction="none")


def hardest_eight(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = good(model, batch)
    least = losses.detach().topk(max(min(len(losses) // 2, 8), 1)).values[-1]
    return losses * (losses.detach() >= least)


def hardest_sixteen(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """All of them, in the few examples of a small check."""
    losses = good(model, batch)
    least = losses.detach().topk(min(len(losses), 16)).values[-1]
    return losses * (losses.detach() >= least)


def moved(model: nn.Module, loss: Loss, batch: dict[str, Tensor]) -> float:
    """By how many C the sum moves, at most, when one record is taken out; the guard must be off."""
    clip = 0.2 * float(per_example_norms(model, loss, batch).max())
    bound = Clipper(clip, engine="bookkeeping", physical_batch_size=RECORDS).bind(model, loss)
    whole = bound.clip(batch).gradients
    found = []
    for out in range(RECORDS):
        rest = bound.clip(rows(batch, *(i for i in range(RECORDS) if i != out))).gradients
        found.append(
            sum(float((g - rest[name]).double().pow(2).sum()) for name, g in whole.items()) ** 0.5
            / clip
        )
    return max(found)


def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "is_due", lambda *arguments: False)
    monkeypatch.setattr(Guard, "begin", lambda *arguments: None)


def plan_of(steps: int = 40) -> Any:
    return PrivacyConfig(
        noise_multiplier=1.0,
        target_delta=1e-5,
        expected_batch_size=RECORDS,
        steps=steps,
        max_grad_norm=1.0,
    ).build(RECORDS)


def released(run: Any, model: nn.Module, losses: Callable[[int], Loss]) -> int:
    """Releases until the guard refuses."""
    batch = records()
    for step, chosen in enumerate(run.batches()):
        try:
            clipped = run.clip(model, losses(step), rows(batch, *chosen.tolist()))
        except ValueError as error:
            assert "depends on other examples" in str(error) or "keeps something" in str(error)
            return step
        run.release(clipped)
    return run.released


class KeepsMean(nn.Module):
    """Publishes the mean of the private batch through state_dict, and does nothing else with it."""

    def __init__(self, how: str, opens_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("large", torch.zeros(2**19))
        self.how, self.opens_at, self.now = how, opens_at, 0

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.now >= self.opens_at:
            if self.how == "in-place":
                self.mean.copy_(mean)
            elif self.how == "assigned":
                self.mean = mean
            elif self.how == "data":
                self.mean.data.copy_(mean)
            elif self.how == "new":
                self.register_buffer("another", mean)
            elif self.how == "large":
                self.large[:6] = mean
            elif self.how == "parameter":
                with torch.no_grad():
                    self.inner.bias.add_(mean[:3])
            elif self.how == "parameter-data":
                self.inner.bias.data += mean[:3]
        return self.inner(x)


class Remembers(nn.Module):
    """A running mean in a plain attribute, which no state_dict holds and every later forward pass
    reads.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3)
        self.running = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        h = x - self.running
        self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return self.inner(h)
