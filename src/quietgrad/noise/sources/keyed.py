"""The ordinary source of noise: numpy's and torch's generators on keyed Philox streams. Fast;
statistically sound; not cryptographic, and floating-point numbers like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class KeyedSource:
    """Normal numbers in the dtype of the gradients (docs/privacy/assumptions.md, for what these
    cannot do).
    """

    name = "keyed"
    grid = 0.0

    def normal(
        self, like: Tensor, key: RandomKey, step: int, name: str, scale: float = 1.0
    ) -> Tensor:
        drawn = normal(like, key, step, name)
        return drawn if scale == 1.0 else drawn.mul_(scale)

    def how_drawn(self, like: Mapping[str, Tensor]) -> str:
        return how_drawn(like)


def how_drawn(like: Mapping[str, Tensor]) -> str:
    """What ``normal`` depends on beside key, step and name.

    Args:
        like: tensors in the dtype and on the device of the gradients.
    """
    ways = set()
    for tensor in like.values():
        kind = tensor.device.type
        if kind == "cpu":
            source = f"numpy {np.__version__}"
        else:  # a GPU's numbers depend on how many processors share the work
            model = torch.cuda.get_device_name(tensor.device) if kind == "cuda" else kind
            source = f"torch {torch.__version__} on {model}"
        ways.add(f"{str(tensor.dtype).removeprefix('torch.')} by {source}")
    return ", ".join(sorted(ways))


def normal(like: Tensor, key: RandomKey, step: int, name: str) -> Tensor:
    """Standard normal noise in the shape, dtype and device of ``like``: a function of (key, step,
    name) and the kind of device alone.
    """
    if like.dtype == torch.float64:
        # a stream of its own: the same words in another precision are another, related, noise
        name = f"{name}\0float64"
    if like.device.type == "cpu":
        kind = "float64" if like.dtype == torch.float64 else "float32"
        drawn = key.generator("noise", step, name).standard_normal(tuple(like.shape), dtype=kind)  # type: ignore[call-overload]
        return torch.as_tensor(drawn).to(like.dtype)
    generator = torch.Generator(device=like.device)
    generator.manual_seed(
        key.words("noise", step, name)[0]
    )  # CUDA's generator is a Philox counter with a 64-bit key
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
