"""What random sketches of per-example gradients share: projections of the factors, and what
rounding does to them.

Every use of a parameter meets the same projection, so several uses (tied weights) are sums of
sketches. Sketches are accumulated in float32 at least. Their ``margin`` covers rounding: with a
projection that knows nothing of the data, every partial sum is Gaussian, and the error is at most
gamma(p + t) S times a weighted mean of roots of chi-squares over k, hence at most rho(k) gamma(p +
t) S but with probability 1e-12 (the exponential moment of a mean is at most that of one, so
Chernoff's bound needs no union: Laurent and Massart 2000, Lemma 1); lengths of sums are taken as
constants of the parameter, so that padding does not change what a record is divided by.
Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors import Unfolded
from quietgrad.clipping.norms.factors.products import (
    add_over_positions,
    chain_of_columns,
    chain_of_positions,
    thin_product,
)
from quietgrad.clipping.norms.rounding import Measured, chain, gamma, norm_gamma, steady
from quietgrad.clipping.norms.spread import Spread

LOG_FAILURE = 27.7  # -log of 1e-12


def sketched(
    squared: Tensor, uses: Sequence[Unfolded], spread: Spread, margin: float, dtype: torch.dtype
) -> Measured:
    """An estimate with its bounds; ``margin``: of the sketch, in units of the spread, the sum's own
    is added.
    """
    positions = steady(sum(use.sizes.t for use in uses))
    slack = torch.add(spread.lost, squared, alpha=norm_gamma(squared, dtype))
    bound = spread.norm.mul_(margin + gamma(chain(positions), squared, dtype))
    for use in uses:
        if use.one_hot:
            bound.add_(use.spread_by_rows(dtype), alpha=gamma(positions, squared, dtype))
    return Measured(squared, slack, bound)


def tail_margin(
    uses: Sequence[Unfolded], projected: int, sketch_dim: int, like: Tensor, dtype: torch.dtype
) -> float:
    """Of a Gaussian sketch, in units of the spread; ``projected``: length of the dimension that is
    projected.
    """
    products = gamma(chain_of_columns(projected), like, dtype) + position_gamma(uses, like, dtype)
    return _rho(sketch_dim) * products


def position_gamma(uses: Sequence[Unfolded], like: Tensor, dtype: torch.dtype) -> float:
    """Of sums over positions, as many for any padding: what a record is divided by must not depend
    on it.
    """
    positions = steady(sum(use.sizes.t for use in uses))
    return gamma(chain_of_positions(positions), like, dtype)


def _rho(sketch_dim: int) -> float:
    """Root of what chi2(k)/k exceeds with probability 1e-12 at most (Laurent and Massart 2000,
    Lemma 1).
    """
    return math.sqrt(
        1.0 + 2.0 * math.sqrt(LOG_FAILURE / sketch_dim) + 2.0 * LOG_FAILURE / sketch_dim
    )


def drawn(projection: Tensor, like: Unfolded, dtype: torch.dtype) -> Tensor:
    """A projection where the factors are."""
    return projection.to(device=like.right_bgtd.device, dtype=dtype)


def project_rows(uses: Sequence[Unfolded], projection: Tensor, dtype: torch.dtype) -> Tensor:
    """(M^T P)^T summed over uses: [b, g, k, d] for P of shape [p, k] or [b, g, p, k]."""
    total: Tensor | None = None
    for use in uses:
        total = add_over_positions(total, use.right_bgtd, use.left_product(projection, dtype))
    assert total is not None
    return total


def project_columns(uses: Sequence[Unfolded], projection: Tensor, dtype: torch.dtype) -> Tensor:
    """(M P)^T summed over uses: [b, g, k, p] for P of shape [d, k] or [b, g, d, k]."""
    total: Tensor | None = None
    for use in uses:
        total = use.add_left(total, thin_product(use.right_bgtd, projection, dtype))
    assert total is not None
    return total
