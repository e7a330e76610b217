"""The slow oracle: one example at a time through plain autograd. Everything fast is tested against
it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.norms.rounding import SHARE
from quietgrad.tensors import Batch, batch_size_of, trainable_parameters


def oracle_gradients(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch
) -> list[dict[str, Tensor]]:
    """Per-example gradients, a list over examples of parameter name -> gradient. Cost: one backward
    pass per example.
    """
    parameters = trainable_parameters(model)
    result = []
    for i in range(batch_size_of(batch)):
        loss = per_example_loss(model, slice_batch(batch, i, i + 1)).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        result.append(
            {
                name: torch.zeros_like(p) if g is None else g.detach()
                for (name, p), g in zip(parameters.items(), gradients, strict=True)
            }
        )
    return result


def oracle_norms(gradients: list[dict[str, Tensor]]) -> Tensor:
    """[examples] norms over all parameters together."""
    return torch.stack(
        [
            torch.sqrt(sum((g.double().pow(2).sum() for g in one.values()), torch.zeros(())))
            for one in gradients
        ]
    )


def oracle_clipped_sum(
    gradients: list[dict[str, Tensor]], max_grad_norm: float
) -> dict[str, Tensor]:
    """Sum of clipped gradients, norms enlarged as everywhere (``rounding.SHARE``); an example whose
    norm is not finite adds zero.
    """
    norms = oracle_norms(gradients)
    total = {name: torch.zeros_like(g) for name, g in gradients[0].items()}
    for norm, one in zip(norms.tolist(), gradients, strict=True):
        if not torch.isfinite(torch.tensor(norm)):
            continue
        factor = min(1.0, max_grad_norm / (norm * (1.0 + SHARE))) if norm > 0 else 1.0
        for name, g in one.items():
            total[name] += factor * g
    return total
