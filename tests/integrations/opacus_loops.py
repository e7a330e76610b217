"""Bodies of training loops as Opacus scripts have them, for one batch of twelve records each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RECORDS = 12


@dataclass(frozen=True)
class Loop:
    """A model, its records, and what a loop does up to ``backward``."""

    name: str
    model: Callable[[], nn.Module]
    records: Callable[[], tuple[Tensor, ...]]
    body: Callable[..., None]
    in_opacus: bool = True
    alone: bool = True  # whether it runs on one record


class Recurrent(nn.Module):
    """Names to classes: the state is made by the loop."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = layer(6, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def init_hidden(self, n: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, n, 8), torch.zeros(2, n, 8)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        out, hidden = self.lstm(self.embedding(x), hidden)
        return self.out(out[:, -1, :]), hidden


class Two(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"class": self.a(h), "value": self.b(h)}


class OwnLoss(nn.Module):
    """A loss of the model's own, the mean over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x)
        return F.cross_entropy(logits, labels), logits


def numbers(*shape: int) -> Tensor:
    return torch.randn(RECORDS, *shape, generator=torch.Generator().manual_seed(1))


def classes(k: int, *shape: int) -> Tensor:
    return torch.randint(0, k, (RECORDS, *shape), generator=torch.Generator().manual_seed(2))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 3),
    )


def plain(model: Any, x: Tensor, y: Tensor) -> None:
    nn.CrossEntropyLoss()(model(x.float()), y).backward()


def by_function(model: Any, x: Tensor, y: Tensor) -> None:
    log_p = F.log_softmax(model(x.view(x.size(0), -1)), dim=1)
    loss = F.nll_loss(log_p, y) / 2 + 0.1 * log_p.pow(2).mean()
    loss.backward()


def binary(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)[:, :1].squeeze()
    nn.BCEWithLogitsLoss()(out, (y > 0).float()).backward()


def with_state(model: Any, x: Tensor, y: Tensor) -> None:
    out, _ = model(x, model.init_hidden(len(x)))
    F.cross_entropy(out, y).backward()


def positions(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)  # [n, positions, classes]
    F.cross_entropy(out.view(-1, 3), y.view(-1)).backward()


def two_heads(model: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)
    loss = F.cross_entropy(out["class"], y)
    loss += F.mse_loss(out["value"].squeeze(-1), x.sum(dim=1))
    loss.backward()


def two_losses(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    (0.5 * F.cross_entropy(model(x + 1), y)).backward()


def real_and_fake(model: Any, x: Tensor, y: Tensor) -> None:
    fake = torch.ones(x.size(0), 5)
    ones = torch.full((x.size(0),), 1.0)
    real = F.binary_cross_entropy(torch.sigmoid(model(x)[:, 0]), ones)
    made = F.binary_cross_entropy(torch.sigmoid(model(fake)[:, 0]), torch.zeros_like(ones))
    (real + made).backward()


def own_loss(model: Any, x: Tensor, y: Tensor) -> None:
    outputs = model(x, labels=y)
    outputs[0].backward()


def weighted_records(model: Any, x: Tensor, y: Tensor) -> None:
    each = F.cross_entropy(model(x), y, reduction="none")
    (each * torch.tensor([1.0, 2.0, 3.0])[y]).mean().backward()


def _recurrent() -> nn.Module:
    return Recurrent(nn.LSTM)


LOOPS = [
    Loop("plain", perceptron, lambda: (numbers(5), classes(3)), plain),
    Loop("function", perceptron, lambda: (numbers(5), classes(3)), by_function),
    Loop("binary", perceptron, lambda: (numbers(5), classes(3)), binary, alone=False),
    Loop("images", images, lambda: (numbers(1, 8, 8), classes(3)), plain),
    Loop("recurrent", _recurrent, lambda: (classes(20, 7), classes(3)), with_state, False),
    Loop("positions", perceptron, lambda: (numbers(4, 5), classes(3, 4)), positions),
    Loop("two heads", Two, lambda: (numbers(5), classes(3)), two_heads),
    Loop("two losses", perceptron, lambda: (numbers(5), classes(3)), two_losses, False),
    Loop("real and fake", perceptron, lambda: (numbers(5), classes(3)), real_and_fake, False),
    Loop("own loss", OwnLoss, lambda: (numbers(5), classes(3)), own_loss),
    Loop("weighted", perceptron, lambda: (numbers(5), classes(3)), weighted_records),
]
