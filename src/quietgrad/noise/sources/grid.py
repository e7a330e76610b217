"""Noise on a grid: how sums and noise are added without any rounding error that depends on the
data.

Let tau be the standard deviation of the noise, G the grid in units of tau, g = tau G. The clipped
sum S is rounded to multiples of g, the noise is a *correctly rounded* normal number, and their sum
is formed exactly, in whole multiples of g. Rounding commutes with adding multiples of g, so what is
released is a function of the real-valued Gaussian mechanism on the
rounded sum: the accountant's theorem holds for the numbers that the machine computes. What it costs
is sensitivity: the roundings of two neighbouring sums differ by at most 2 g in an entry (1 g by
rounding, the rest allows for the float64 division before it), so by 2 g sqrt(d) in norm over d
entries, and ``noise_std`` makes the noise larger by as much.

Correlated rows W_t = noise / C[t,t] - sum_m C[t,t-m] / C[t,t] W_{t-m} stay on the grid because the
second part is rounded to it. Given the earlier releases R = Q + W, the release of step t is the
rounded Gaussian mechanism on the query Q_t + round(-sum_m C[t,t-m] / C[t,t] (R_{t-m} - Q_{t-m})).
One record moves Q by at most C + 2 g sqrt(d) once in b steps, which reaches the b rows through a
column of norm at most 1, and each row's rounding by at most 2 g sqrt(d) more: C + 2 g sqrt(d) (1 +
sqrt(b)) in all.

G = 0 stands for ordinary floating-point noise: nothing is rounded, nothing is added to the
sensitivity, and nothing is proved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quietgrad.events import RandomizedClipping, SensitivityClaim

LARGEST = (
    2.0**51
)  # in units of the grid: below it a float64 quotient errs by a quarter of a unit at most
MOST_COST = 0.01
ROUND_UP = 1 + 2.0**-48  # covers the rounding of the few operations below


def rounding_cost(
    noise_multiplier: float, entries: int, bands: int, grid: float, smallest_scale: float = 1.0
) -> float:
    """Share by which rounding to the grid raises the sensitivity, and the noise with it: 2 sigma G
    sqrt(d) (1 + sqrt(b)) up to its square.

    Args:
        noise_multiplier: sigma.
        entries: d, of all parameters together.
        bands: b; 1 is independent noise, which has no second rounding.
        grid: G.
        smallest_scale: the least that a contribution counts for, in units of C.

    Raises:
        ValueError: if it is above one per cent, where the grid is too coarse for such a model.
    """
    if grid == 0:
        return 0.0
    share = (
        2
        * noise_multiplier
        * grid
        * math.sqrt(entries)
        / smallest_scale
        * (1 + math.sqrt(bands) if bands > 1 else 1)
    )
    if not share <= MOST_COST:
        raise ValueError(
            f"noise_multiplier={noise_multiplier:.4g} and {entries:,} trainable entries: the grid "
            f"of source='secure' would raise the sensitivity by {share:.2g}; "
            "train fewer parameters, or use source='keyed'"
        )
    return share / (1 - share) * ROUND_UP


def smallest_scale(claim: SensitivityClaim) -> float:
    """The least that a contribution counts for in the accountant, in units of C."""
    known = claim.clipping
    return known.smallest_scale if isinstance(known, RandomizedClipping) else 1.0


def noise_std(
    noise_multiplier: float, claim: SensitivityClaim, entries: int, bands: int, grid: float
) -> float:
    """tau: sigma times the sensitivity of the sum that is covered, C (1 + rounding_cost). sigma C
    where nothing is rounded.

    Raises:
        ValueError: if the claim is one for which the roundings are not accounted for.
    """
    scale = smallest_scale(claim)
    if grid and not scale:
        raise ValueError(
            "envelope='hutch': with source='secure' only the mixed, convex and hutch++ envelopes "
            "cover what rounding adds, as their contributions count as a part of C at least"
        )
    std = noise_multiplier * claim.max_grad_norm
    return (
        std
        * (1 + rounding_cost(noise_multiplier, entries, bands, grid, scale))
        * (ROUND_UP if grid else 1.0)
    )


def covered(total: Tensor, row: Tensor, std: float, grid: float) -> Tensor:
    """A sum with its noise, in the sum's dtype.

    Args:
        total: a parameter's clipped sum. Private.
        row: its noise, multiples of the grid in float64, or any floats with grid 0. The sum is
            formed where it is.
        std: what one unit of ``row`` is worth.
    """
    if grid == 0:
        return total + row * std
    unit = std * grid
    units = (total.to(row.device, torch.float64) / unit).round_().clamp_(-LARGEST, LARGEST)
    # The sum of two whole numbers is rounded, if at all, as a whole: no digit of it knows one of
    # them better than the other. The same holds for what follows.
    return units.add_(row / grid).mul_(unit).to(total.device, total.dtype)


def settled(row: Tensor, grid: float) -> Tensor:
    """``row`` brought to the nearest multiples of the grid, in place."""
    return row if grid == 0 else row.div_(grid).round_().mul_(grid)


def drift(rows: Sequence[Tensor], coefficients: Sequence[float], grid: float) -> Tensor:
    """- sum_m coefficients[m] rows[m], on the grid. Two roundings a term, in order, whatever the
    processor: a fused multiplication would make the last bit depend on the cut.
    """
    total = torch.zeros_like(rows[0])
    for row, coefficient in zip(rows, coefficients, strict=True):
        total.sub_(row * coefficient)
    return settled(total, grid)
