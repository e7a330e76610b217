"""Models whose layers ``parallelize_module`` cuts over the ranks of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Bottleneck(nn.Module):
    """Two layers that are cut, with biases, between norms that are not."""

    def __init__(self, inputs: int = 6, hidden: int = 6, outputs: int = 3) -> None:
        super().__init__()
        self.before = nn.LayerNorm(inputs)
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, 8)
        self.after = nn.LayerNorm(8)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.before(x)))
        found: Tensor = self.head(self.after(self.down(hidden)))
        return found


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def bottleneck(dtype: torch.dtype = torch.float64, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return Bottleneck(**sizes).to(dtype)


def cut(model: nn.Module, plan: dict[str, Any] | None = None) -> nn.Module:
    """The model, its layers cut over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, PLAN if plan is None else plan)
