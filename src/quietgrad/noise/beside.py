"""Noise for numbers that are released beside the gradients of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quietgrad.events import SensitivityClaim, SideRelease
from quietgrad.noise.sources.grid import covered, noise_std
from quietgrad.noise.sources.source import NoiseSource
from quietgrad.randomness import RandomKey


def cover_side_sums(
    sums: Mapping[str, Tensor],
    releases: Iterable[SideRelease],
    source: NoiseSource,
    key: RandomKey,
    step: int,
) -> dict[str, float]:
    """Name -> sum with its noise, of what is due at this step.

    Each has a stream of its own, so its noise is independent of that of the gradients, of the other
    numbers and of all other steps, also where the gradients' noise is correlated.

    Args:
        sums: name -> float64 scalar to which one record adds at most 1 in absolute value; none for
            a batch without records. Private.
        releases: what is accounted for.
        source: where the noise comes from; on a grid the sums are rounded to it, and the noise is
            larger by what that costs.
        key, step: as for the gradients' noise.
    """
    noisy = {}
    for side in releases:
        if not side.at(step):
            continue
        private = sums.get(side.name, torch.zeros((), dtype=torch.float64, device="cpu"))
        total = private.detach().to("cpu", torch.float64).reshape(1)
        std = noise_std(side.noise_multiplier, SensitivityClaim(1.0), 1, 1, source.grid)
        # No parameter's name has two dots in a row.
        row = source.normal(total, key, step, f"..{side.name}")
        noisy[side.name] = float(covered(total, row, std, source.grid))
    return noisy
