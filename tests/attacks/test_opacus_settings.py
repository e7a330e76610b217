"""Opacus scripts that set the noise, the clipping norm or the divisor of means by what they read
off private batches: what is released, and the engine's history, tell it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.following.constants import Constants
from quietgrad.integrations.opacus.optimizers import steady

N, BATCH = 60, 20
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
Rule = Callable[[Any, float, int], None]  # of the optimizer, the loss and the batch's size


def script(before: Rule, after: Rule, seen: list[Any] | None = None) -> PrivacyEngine:
    """Two epochs, with a line before each step and one after it; ``seen``: losses that were read,
    and the divisors of the steps.
    """
    torch.manual_seed(1)
    model: Any = nn.Linear(5, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            read, size = loss.item(), len(x)
            before(optimizer, read, size)
            optimizer.step()
            after(optimizer, read, size)
            if seen is not None:
                seen.append((read, size, optimizer.expected_batch_size))
    return engine


def nothing(optimizer: Any, loss: float, size: int) -> None:
    pass


def noise_by_the_loss(optimizer: Any, loss: float, size: int) -> None:
    optimizer.noise_multiplier = loss


def norm_by_the_loss(optimizer: Any, loss: float, size: int) -> None:
    optimizer.max_grad_norm = loss


def divisor_by_the_size(optimizer: Any, loss: float, size: int) -> None:
    optimizer.expected_batch_size = size


@pytest.mark.parametrize("rule", [noise_by_the_loss, norm_by_the_loss])
@pytest.mark.parametrize("first", [True, False])
def test_noise_and_norm_that_were_read_off_a_batch_are_refused(rule: Rule, first: bool) -> None:
    with pytest.raises(ValueError, match="read off private records"):
        script(*((rule, nothing) if first else (nothing, rule)))


def test_without_the_look_the_history_tells_a_private_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Constants, "require_settings", lambda *_: None)
    seen: list[Any] = []
    engine = script(noise_by_the_loss, nothing, seen)
    assert {sigma for sigma, _, _ in engine.accountant.history} == {loss for loss, _, _ in seen}


def test_the_divisor_of_means_is_no_batch_s_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a batch's own size is private"):
        script(divisor_by_the_size, nothing)
    own = type("Own", (), {"expected_batch_size": BATCH})
    monkeypatch.setattr(steady.FixedDivisor, "expected_batch_size", own.expected_batch_size)  # type: ignore[attr-defined]
    seen: list[Any] = []
    script(divisor_by_the_size, nothing, seen)
    assert all(size == divisor for _, size, divisor in seen)  # 1 / n of the noise tells n


def test_rules_that_look_at_nothing_private_go_on() -> None:
    def rule(optimizer: Any, loss: float, size: int) -> None:
        optimizer.noise_multiplier = torch.tensor(0.97 * float(optimizer.noise_multiplier))
        optimizer.max_grad_norm *= 0.9
        optimizer.expected_batch_size = BATCH  # as it is

    engine = script(nothing, rule)
    assert len(engine.accountant.history) == 6
