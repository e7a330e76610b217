"""The only way from a ``ClippedSum`` to a ``NoisySum``: independent Gaussian noise, drawn once per step from keyed streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quietgrad.checks import require_positive
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class GaussianNoise:
    """Independent noise of standard deviation sigma * C in every entry of every parameter.

    Attributes:
        noise_multiplier: sigma, relative to the clipping norm, on the sum of clipped gradients.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)

    def release(self, clipped: ClippedSum, key: RandomKey, step: int) -> NoisySum:
        """Adds the noise of step ``step``.

        Args:
            clipped: the whole batch's sum (all micro-batches and ranks added up).
            key: root of the streams.
            step: number of the release. It must never be used twice with one key: two sums with the same noise give away their difference.

        Returns:
            The released sum. Cost: one normal draw per entry; memory: one copy of the trainable parameters.
        """
        std = self.noise_multiplier * clipped.claim.max_grad_norm
        noisy = {name: g + normal(g, key, step, name).mul_(std) for name, g in clipped.gradients.items()}
        return NoisySum(noisy, std)


def how_drawn(like: Mapping[str, Tensor]) -> str:
    """What ``normal`` depends on beside key, step and name: a public fact. Where it differs, equal keys give other numbers.

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
    """Standard normal noise in the shape, dtype and device of ``like``: a function of (key, step, name) and the kind of device alone."""
    if like.dtype == torch.float64:
        name = (
            f"{name}\0float64"  # a stream of its own: the same words in another precision are another, related, noise
        )
    if like.device.type == "cpu":
        kind = "float64" if like.dtype == torch.float64 else "float32"
        drawn = key.generator("noise", step, name).standard_normal(tuple(like.shape), dtype=kind)  # type: ignore[call-overload]
        return torch.as_tensor(drawn).to(like.dtype)
    generator = torch.Generator(device=like.device)
    generator.manual_seed(key.words("noise", step, name)[0])  # CUDA's generator is a Philox counter with a 64-bit key
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
