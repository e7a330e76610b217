"""Hutch++: norms exact on the range of a first sketch, estimated by a second one on the rest.

Sources: docs/methods, section 1; DP-SGD-RC, Algorithm 2 with errata E2 and E3.
Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.norms.cost import Cost, Sketch, Throughput
from quietgrad.clipping.norms.estimators.hutch import Hutch
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.sketches import (
    drawn,
    head_margin,
    project_columns,
    project_rows,
    sketched,
    tail_margin,
)
from quietgrad.clipping.norms.factors import MatrixFactors, Unfolded
from quietgrad.clipping.norms.factors.products import (
    add_over_positions,
    sums_over_columns,
    thin_product,
)
from quietgrad.clipping.norms.rounding import Measured, gamma, squared_norms
from quietgrad.clipping.norms.spread import spread_of

HEAD_ROWS = 2048  # of the head of Hutch++ that are formed at once


@dataclass(frozen=True)
class HutchPlusPlus:
    """About three times what Hutch takes."""

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        return 3 * Hutch().multiplications(cost, sketch_dim)

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        return 0.0

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        return hutch_plus_plus_norms(uses, *sketch, dtype)


def hutch_plus_plus_norms(
    uses: Sequence[MatrixFactors],
    name: str,
    sketch_dim: int,
    projections: Projections,
    dtype: torch.dtype,
) -> Measured:
    """Hutch++ estimates: exact for per-example gradients of rank below k.

    With M the p x d gradient of one example, Q an orthonormal basis of M^T S and Y = M^T P: ||M
    Q||^2 + ||Y - Q Q^T Y||^2.
    """
    some = [use.unfolded() for use in uses]
    s = some[0].sizes
    # Each block of a grouped convolution gets a basis of its own; the squared norms of blocks add
    # up. Drawn one after the other, so that one only is held.
    project = project_rows if s.p >= s.d else project_columns
    columns = min(sketch_dim, s.p, s.d)
    probe = drawn(projections.gaussian(name, "range", max(s.p, s.d), columns), some[0], dtype)
    basis_bgsk = torch.linalg.qr(project(some, probe, dtype).transpose(2, 3)).Q
    del probe
    probe = drawn(projections.gaussian(name, "tail", max(s.p, s.d), sketch_dim), some[0], dtype)
    tail = project(some, probe, dtype)
    del probe
    tail.sub_((tail @ basis_bgsk) @ basis_bgsk.transpose(2, 3))
    squared = squared_norms(tail)
    spread = spread_of(uses, dtype)
    # The head's basis is orthonormal to the rounding of its factorisation, and no more random than
    # the data. Head and tail are orthogonal: so are their errors.
    shorter, longer = (sums_over_columns(side(s.p, s.d)) for side in (min, max))
    head = head_margin(some, shorter, columns, tail, dtype)
    margin = (head**2 + tail_margin(some, longer, sketch_dim, tail, dtype) ** 2) ** 0.5
    squared += _head_norms(some, basis_bgsk, dtype)
    measured = sketched(squared, some, spread, margin, sketch_dim, dtype)
    skewed = 8.0 * gamma(min(s.p, s.d) + columns, tail, dtype)
    return Measured(measured.squared, measured.slack + skewed * squared, measured.margin)


def _head_norms(uses: Sequence[Unfolded], basis_bgsk: Tensor, dtype: torch.dtype) -> Tensor:
    """[b] ||M Q||^2 (M^T Q where p < d), a block of the larger dimension at a time."""
    s = uses[0].sizes
    tall = s.p >= s.d
    if any(use.one_hot for use in uses):
        return squared_norms((project_columns if tall else project_rows)(uses, basis_bgsk, dtype))
    smalls = [
        thin_product(use.right_bgtd, basis_bgsk, dtype)
        if tall
        else use.left_product(basis_bgsk, dtype)
        for use in uses
    ]
    squared = smalls[0].new_zeros(s.b, dtype=torch.float64)
    for start in range(0, max(s.p, s.d), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        total: Tensor | None = None
        for use, small in zip(uses, smalls, strict=True):
            if tall:
                total = use.add_left(total, small, rows)
            else:
                total = add_over_positions(total, use.right_bgtd[..., rows], small)
        assert total is not None
        squared += squared_norms(total)
        del total
    return squared
