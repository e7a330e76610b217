"""A user's file, for ``mypy --strict``: the public API has types that a stranger's code can rely
on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import Clipping, PrivacyConfig, PrivacyPlan, PrivateRun
from quietgrad.accounting import epsilon, noise_multiplier
from quietgrad.clipping import ClippedSum, clipped_gradients
from quietgrad.events import PoissonGaussian

Batch = tuple[Tensor, Tensor]


def per_example_loss(model: nn.Module, batch: Batch) -> Tensor:
    """[records]."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(run: PrivateRun, model: nn.Module, batch: Batch) -> float:
    """Epsilon spent."""
    for indices in run.batches():
        run.backward(model, per_example_loss, (batch[0][indices], batch[1][indices]))
    return run.epsilon()


def main() -> tuple[float, float, float]:
    """Three numbers."""
    config = PrivacyConfig(
        target_epsilon=2.0, expected_batch_size=20, epochs=1, clipping=Clipping()
    )
    plan: PrivacyPlan = config.build(dataset_size=200)
    model = nn.Linear(3, 2)
    inputs = torch.randn(200, 3)
    batch = (inputs, (inputs[:, 0] > 0).long())
    with plan.start() as run:
        spent = train(run, model, batch)
    alone: ClippedSum = clipped_gradients(model, per_example_loss, batch, 1.0)
    assert alone.gradients
    sigma: float = noise_multiplier(1.0, 1e-5, sample_rate=0.1, steps=10)
    return spent, epsilon(PoissonGaussian(1.0, 0.1, 10), 1e-5), sigma
