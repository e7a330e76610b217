"""Hutch++: norms exact on the range of a first sketch, estimated by a second one on the rest.

Sources: docs/methods, section 1; DP-SGD-RC, Algorithm 2 with errata E2 and E3.
Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quietgrad.clipping.norms.cost import Cost, Sketch, Throughput
from quietgrad.clipping.norms.estimators.by_rows import norms_by_rows
from quietgrad.clipping.norms.estimators.hutch import Hutch
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.sketches import (
    drawn,
    head_margin,
    project_columns,
    project_rows,
    sketched,
    spread_beside,
    tail_margin,
    worst_mean,
)
from quietgrad.clipping.norms.factors import MatrixFactors, OneHotFactors, Unfolded
from quietgrad.clipping.norms.factors.sums.columns import EVEN, sums_over_columns
from quietgrad.clipping.norms.factors.sums.positions import add_over_positions
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import (
    Measured,
    gamma,
    norm_gamma,
    smallest_normal,
    squared_norms,
)
from quietgrad.clipping.norms.spread import Spread
from quietgrad.events import HIDDEN_SHARE

HEAD_ROWS = 2048  # of the head of Hutch++ that are formed at once
# Rows of the basis whose products are formed at once, in float64: so few that no library divides
# them among its threads, which would follow from how many examples there are.
GRAM_ROWS = 64


@dataclass(frozen=True)
class HutchPlusPlus:
    """Three times Hutch's multiplications, in two passes."""

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        return 3 * Hutch().multiplications(cost, sketch_dim)

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        return 2 * Hutch().traffic(cost, kept, speed)

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        name, k, projections, scratch, _ = sketch
        return hutch_plus_plus_norms(uses, name, k, projections, dtype, scratch)


def hutch_plus_plus_norms(
    uses: Sequence[MatrixFactors],
    name: str,
    sketch_dim: int,
    projections: Projections,
    dtype: torch.dtype,
    scratch: Scratch | None = None,
) -> Measured:
    """Hutch++ estimates: exact for per-example gradients of rank below k.

    With M the p x d gradient of one example, Q an orthonormal basis of M^T S and Y = M^T P: ||M
    Q||^2 + ||Y - Q Q^T Y||^2. Rounding is looked at, not assumed: that Q is orthonormal, and what
    of M^T S it does not span (``_hidden``).
    """
    some = [use.unfolded() for use in uses]
    s, own = some[0].sizes, scratch is None
    scratch = scratch or Scratch()
    exact = norms_by_rows(some, dtype)
    if exact is not None:
        return exact
    # Each block of a grouped convolution gets a basis of its own; the squared norms of blocks add
    # up. Both sketches in one pass over the factors, which costs more than their products.
    project = project_rows if s.p >= s.d else project_columns
    columns = min(sketch_dim, s.p, s.d)
    probes = (
        projections.gaussian(name, "range", max(s.p, s.d), columns),
        projections.gaussian(name, "tail", max(s.p, s.d), sketch_dim),
    )
    both = torch.cat([drawn(probe, some[0], dtype) for probe in probes], dim=1)
    sketches, rows = _even(project(some, both, dtype, scratch)), min(s.p, s.d)
    if own:
        scratch.let_go()
    range_bgks, tail = sketches.split([columns, sketch_dim], dim=2)
    del probes, both, sketches
    range_bgsk, tail = range_bgks.transpose(2, 3), tail.contiguous()
    basis_bgsk, triangle_bgkk = torch.linalg.qr(range_bgsk)
    # What of Q^T Y is wrong stays within the span of Q, where it adds to the norm; what the second
    # product loses does not.
    lost = _thin_error(columns, tail, dtype) * squared_norms(tail).sqrt()
    tail.sub_((tail @ basis_bgsk) @ basis_bgsk.transpose(2, 3))
    squared_bg = _squared_by_block(tail) + _head_norms(
        some, basis_bgsk[:, :, :rows], dtype, scratch
    )
    squared = squared_bg.sum(1)
    spread = spread_beside(uses, dtype, scratch)
    # The head's basis is orthonormal but for what is found, and no more random than the data. Head
    # and tail are orthogonal: so are their errors.
    shorter = sums_over_columns(min(s.p, s.d), paired=False)
    longer = sums_over_columns(max(s.p, s.d))
    head = head_margin(some, shorter, columns, tail, dtype)
    margin = (head**2 + tail_margin(some, longer, sketch_dim, tail, dtype) ** 2) ** 0.5
    slack = _skewed(basis_bgsk) * squared
    if columns < min(s.p, s.d):  # else the basis spans everything
        seen = tail_margin(some, longer, columns, tail, dtype)
        hidden = _hidden(some, range_bgsk, basis_bgsk, triangle_bgkk, spread, seen, dtype)
        slack += ((hidden / HIDDEN_SHARE).square_() - squared_bg).clamp_min_(0).sum(1)
    measured = sketched(squared, uses, spread, margin, sketch_dim, dtype, slack)
    return replace(measured, margin=measured.margin + lost)


def _even(sketches_bgks: Tensor) -> Tensor:
    """With zeros at the ends of rows, on a processor. Where a matrix begins in memory, and so a
    record's place in its batch, shows in the rounding of a library's factorisation and products;
    this way all begin alike.
    """
    odd = 0 if sketches_bgks.is_cuda else -sketches_bgks.shape[3] % EVEN
    return torch.nn.functional.pad(sketches_bgks, (0, odd)) if odd else sketches_bgks


def _hidden(
    uses: Sequence[Unfolded],
    range_bgsk: Tensor,
    basis_bgsk: Tensor,
    triangle_bgkk: Tensor,
    spread: Spread,
    margin: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """[b, g] an upper bound of sqrt(k) ||(I - Q Q^T) M^T S||_F: zero but for rounding. A function
    of the gradient and of S alone.

    A gradient for which it is above ``HIDDEN_SHARE`` of its norm is measured as at least this over
    ``HIDDEN_SHARE``, so at least its norm; for all others the envelope has allowed for so much
    (docs/hutchpp_envelope/moments.md, lemma 4).

    Args:
        range_bgsk: M^T S as computed.
        margin: what its rounding may have hidden, in units of the spread.
    """
    k = basis_bgsk.shape[3]
    left = range_bgsk - basis_bgsk @ triangle_bgkk
    # Norms as computed, enlarged by what squares may have lost.
    flushed = math.sqrt(left.shape[2] * k * smallest_normal(dtype))
    larger = 1.0 + norm_gamma(left, dtype)
    left_bg, whole_bg = (
        _squared_by_block(x).sqrt_().mul_(larger).add_(flushed) for x in (left, range_bgsk)
    )
    rounding = _thin_error(k, left, dtype)
    if isinstance(margin, Tensor):
        margin = margin.unsqueeze(1)
    hidden = left_bg * (1.0 + rounding) + whole_bg * rounding + spread.by_block * margin
    each = spread.lost.sqrt()
    for use in uses:
        if isinstance(use, OneHotFactors):
            each = each + use.errors_by_rows(dtype)
    return math.sqrt(k) * (hidden + worst_mean(k) * each.unsqueeze(1))


def _thin_error(k: int, like: Tensor, dtype: torch.dtype) -> float:
    """What a product Q T of k columns, and a difference with it, may be off by, over ||T||_F: gamma
    ||Q||_F.
    """
    return 1.1 * math.sqrt(k) * gamma(k, like, dtype)


def _skewed(basis_bgsk: Tensor) -> Tensor:
    """[b] by what share ||M Q||^2 may be below that of an orthonormal basis of the same span: twice
    ||Q^T Q - I||_F, which is found, plus the rounding of finding it.
    """
    b, g, s, k = basis_bgsk.shape
    gram = -torch.eye(k, dtype=torch.float64, device=basis_bgsk.device).repeat(b, g, 1, 1)
    for some in basis_bgsk.split(GRAM_ROWS, dim=2):
        rows = some.double()
        gram.add_(rows.transpose(2, 3) @ rows)
    found = gram.square().sum((2, 3)).amax(1).sqrt() + k * gamma(s, basis_bgsk, torch.float64)
    return torch.where(found < 0.5, 2.0 * found, torch.inf)


def _squared_by_block(values: Tensor) -> Tensor:
    """[b, g] float64 sums of squares over all other dimensions."""
    return squared_norms(values.flatten(0, 1)).unflatten(0, values.shape[:2])


def _head_norms(
    uses: Sequence[Unfolded], basis_bgsk: Tensor, dtype: torch.dtype, scratch: Scratch
) -> Tensor:
    """[b, g] ||M Q||^2 (M^T Q where p < d), a block of the larger dimension at a time."""
    s = uses[0].sizes
    tall = s.p >= s.d
    if any(use.one_hot for use in uses):
        return _squared_by_block(
            (project_columns if tall else project_rows)(uses, basis_bgsk, dtype)
        )
    smalls = [
        use.right_product(basis_bgsk, dtype, scratch)
        if tall
        else use.left_product(basis_bgsk, dtype, scratch)
        for use in uses
    ]
    squared = smalls[0].new_zeros(s.b, s.g, dtype=torch.float64)
    for start in range(0, max(s.p, s.d), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        total: Tensor | None = None
        for use, small in zip(uses, smalls, strict=True):
            if tall:
                total = use.add_left(total, small, rows)
            else:
                total = add_over_positions(total, use.right_bgtd[..., rows], small)
        assert total is not None
        squared += _squared_by_block(total)
        del total
    return squared
