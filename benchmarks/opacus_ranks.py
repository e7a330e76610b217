"""Opacus' ghost clipping on several processes, for benchmarks in which Quietgrad runs beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
NORM, NOISE = 1.0, 1.0


def sharded(model: nn.Module) -> nn.Module:
    """By its own wrapper, which makes every layer a unit of its own."""
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    return FSDP2Wrapper(model)


class OpacusSteps:
    """Steps of one rank: ``model`` as ``sharded`` gave it, or whole; noise is Opacus' own."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, share: int, in_shards: bool
    ) -> None:
        warnings.filterwarnings("ignore", module="opacus")
        from opacus.grad_sample import (
            GradSampleModuleFastGradientClipping,
            GradSampleModuleFastGradientClippingFSDP,
        )
        from opacus.optimizers import (
            DistributedDPOptimizerFastGradientClipping,
            DPOptimizerFastGradientClipping,
            FSDPOptimizerFastGradientClipping,
        )

        wrapper: Any = GradSampleModuleFastGradientClipping
        kind: Any = DPOptimizerFastGradientClipping
        if in_shards:
            wrapper = GradSampleModuleFastGradientClippingFSDP
            kind = FSDPOptimizerFastGradientClipping
        elif dist.is_initialized():
            kind = DistributedDPOptimizerFastGradientClipping
        self.model = wrapper(model, max_grad_norm=NORM, use_ghost_clipping=True)
        self.optimizer = kind(
            optimizer,
            noise_multiplier=NOISE,
            max_grad_norm=NORM,
            expected_batch_size=share,
        )

    def step(self, parts: Sequence[dict[str, Tensor]], loss: Loss) -> None:
        """One release from micro-batches; in the end the optimiser has stepped."""
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        self.optimizer.zero_grad()
        for number, part in enumerate(parts, 1):
            self.optimizer.signal_skip_step(do_skip=number < len(parts))
            losses = loss(self.model, part)
            DPTensorFastGradientClipping(self.model, self.optimizer, losses).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
