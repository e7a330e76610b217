"""What a loop for Opacus makes under ``no_grad`` or detaches: targets of a public teacher, weights
of records of their own outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine

TINY = 2e-6  # noise that leaves sums as they are; the clipper stays 1e-3 below the norm
X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def private(**options: Any) -> Any:
    """(model, optimiser, loader)."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=20),
        **({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options),
    )


def teacher() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(5, 2)


def under_no_grad(out: Tensor, x: Tensor, y: Tensor, taught: nn.Linear) -> Tensor:
    with torch.no_grad():
        told = taught(x)
    soft = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(told / 2, 1), reduction="none")
    return F.cross_entropy(out, y, reduction="none") + soft.sum(1)


def detached(out: Tensor, x: Tensor, y: Tensor, taught: nn.Linear) -> Tensor:
    told = taught(x).detach()
    return F.cross_entropy(out, y, reduction="none") + (out - told).pow(2).mean(1)


def own_certainty(out: Tensor, x: Tensor, y: Tensor, taught: nn.Linear) -> Tensor:
    """A weight without a gradient, made of the outputs that have one."""
    with torch.no_grad():
        weight = 1 - F.softmax(out, 1).gather(1, y[:, None]).squeeze(1)
    return weight * F.cross_entropy(out, y, reduction="none")


@pytest.mark.parametrize("losses", [under_no_grad, detached, own_certainty])
def test_what_a_loop_makes_without_gradients_gets_none(losses: Callable[..., Tensor]) -> None:
    """Distillation from a public model, and weights of records."""
    taught = teacher()
    model, optimizer, loader = private(
        noise_multiplier=TINY, loss_reduction="sum", max_grad_norm=0.5
    )
    before = copy.deepcopy(model._module)
    for x, y in loader:
        rows = (torch.Tensor(x.plain), y.plain)
        optimizer.zero_grad()
        losses(model(x), x, y, taught).sum().backward()
        optimizer.step()
        break
    total = [torch.zeros_like(p) for p in before.parameters()]
    for one, label in zip(*(t.split(1) for t in rows), strict=True):
        loss = losses(before(one), one, label, taught).sum()
        found = torch.autograd.grad(loss, list(before.parameters()))
        factor = min(1.0, 0.5 / float(torch.stack([g.norm() for g in found]).norm()))
        total = [t + g * factor for t, g in zip(total, found, strict=True)]
    for p, expected in zip(model.parameters(), total, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=3e-3, atol=1e-2)  # 20 records
    assert all(p.grad is None for p in taught.parameters())


def test_a_teacher_that_would_learn_is_refused() -> None:
    taught = teacher()
    model, optimizer, loader = private()
    with pytest.raises(ValueError, match="gradient that has no noise"):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            with torch.no_grad():
                still = taught(x)
            (F.cross_entropy(out, y) + F.mse_loss(still * taught(x), out)).backward()
            optimizer.step()
