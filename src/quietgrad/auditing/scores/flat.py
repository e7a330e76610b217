"""Gradients as one vector, in a fixed order of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Layout:
    """Names, shapes and places of parameters in the vector."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.names = tuple(like)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in like.items()}
        self.sizes = [like[name].numel() for name in self.names]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def flatten(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """[size] in the widest dtype of the parts."""
        return torch.cat([gradients[name].detach().reshape(-1) for name in self.names])

    def restore(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of [..., size] as [..., *shape] of every parameter."""
        parts = vector.split(self.sizes, dim=-1)
        return {
            name: part.reshape((*vector.shape[:-1], *self.shapes[name]))
            for name, part in zip(self.names, parts, strict=True)
        }
