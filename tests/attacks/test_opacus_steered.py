"""Opacus scripts whose learning rate follows the training loss: the number of the epoch in which it
falls is a fact about private records, and no part of epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.following import steering
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager

N = 60
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
Summary = Callable[[list[float], list[int]], float]

SUMMARIES: dict[str, Summary] = {
    "the last": lambda losses, _: losses[-1],
    "the sum": lambda losses, _: sum(losses),
    "numpy's mean": lambda losses, _: float(np.mean(losses)),
    "over the batches": lambda losses, _: sum(losses) / 3,
    "a meter": lambda losses, sizes: float(np.average(losses, weights=sizes)),
    "over the records": lambda losses, sizes: float(np.dot(losses, sizes)) / N,
}


def script(summary: Summary | None, *, original: bool = False, parts: int | None = None) -> float:
    """Three epochs; the learning rate at their end.

    Args:
        summary: of an epoch's losses and batch sizes, for the schedule; None: a public loss.
        original: whether the schedule is made of the optimizer that ``make_private`` is given.
        parts: most records of a micro-batch.
    """
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    before = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    schedule = (
        before
        if original
        else ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    )

    def one_epoch(batches: Any) -> tuple[list[float], list[int]]:
        losses, sizes = [], []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            sizes.append(len(x))
        return losses, sizes

    for _ in range(3):
        if parts is None:
            losses, sizes = one_epoch(loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=parts, optimizer=optimizer
            ) as smaller:
                losses, sizes = one_epoch(smaller)
        if summary is not None:
            schedule.step(summary(losses, sizes))
        else:
            with torch.no_grad():
                schedule.step(float(F.cross_entropy(model(X[:9] + 0.5), Y[:9])))
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("summary", SUMMARIES)
def test_a_plateau_of_the_training_loss_is_refused(summary: str, original: bool) -> None:
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau.*loss of public records"):
        script(SUMMARIES[summary], original=original)


def test_so_it_is_of_parts_of_batches() -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        script(SUMMARIES["numpy's mean"], parts=8)


def test_unseen_it_steers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering.PassReadings, "require", lambda self, optimizers: None)
    assert script(SUMMARIES["the sum"]) < 0.1


def test_a_plateau_of_public_records_goes_on() -> None:
    assert script(None) < 0.1


def test_numbers_for_a_log_beside_a_schedule_of_epochs_go_on() -> None:
    torch.manual_seed(1)
    net: Any = nn.Linear(5, 2)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    schedule = CosineAnnealingLR(optimizer, 2)
    logged = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            logged.append(loss.item())
        schedule.step()
    assert len(logged) == 6
