"""A small run to attack: its configuration, data, loss and model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.plan import PrivateRun

RECORDS = 60
CONFIG = PrivacyConfig(noise_multiplier=1.2, expected_batch_size=12, steps=8)


def plan_of(**changes: Any) -> PrivacyPlan:
    return replace(CONFIG, **changes).build(RECORDS)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, 5, generator=generator), torch.randint(
        0, 3, (RECORDS,), generator=generator
    )


def at(indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data()
    return x[indices], y[indices]


def opened(**changes: Any) -> tuple[PrivateRun, np.ndarray]:
    """A run with an open batch of at least two records."""
    while True:
        started = plan_of(**changes).start()
        indices = next(started.batches())
        if len(indices) > 1:
            return started, indices
