"""The spread of a per-example gradient: S = sum over positions of |a_t| |g_t|, to which rounding
errors of everything formed from its factors are proportional.

S is at least the norm of the gradient, and far above it where the contributions of positions
cancel. Cost t (p + d) per example. Never underestimated: squares that may have been flushed to zero
are made up for, so that factors of 1e-23 and 1e25, whose product is an ordinary gradient, do not
pass for zero.
Shape legend: b examples, g blocks, t positions, p rows, d columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors import MatrixFactors
from quietgrad.clipping.norms.factors.rows import at_least, sums_over_positions
from quietgrad.clipping.norms.rounding import gamma, least_of, smallest_normal

ROUNDING = 1.001  # of the spread's own sums


@dataclass(frozen=True)
class Spread:
    """Per example, float64. Private.

    Attributes:
        squared: [b] sum over blocks of S^2.
        lost: [b] what squared inner products may lose to underflow.
        by_block: [b, g] S of each block.
        plain: [b] S without what makes up for flushed squares: nothing of positions that are zero,
            however large the other factor is there, so that no padding counts.
        terms: [b] root of the sum over positions of (|a_t| |g_t|)^2, which S is at least; 0 of
            convolutions, whose patches are not formed.
    """

    squared: Tensor
    lost: Tensor
    by_block: Tensor
    plain: Tensor
    terms: Tensor

    @property
    def norm(self) -> Tensor:
        return self.squared.sqrt()


def spread_of(
    uses: Sequence[MatrixFactors], dtype: torch.dtype, known: Sequence[Tensor] = ()
) -> Spread:
    """Of one parameter, all its uses together: their spreads add up.

    Args:
        uses: of the parameter.
        dtype: of the norms.
        known: of a single use, parts of the [2, n g, t] norms |a_t| and |g_t|, some examples each.
    """
    s = uses[0].sizes
    if len(uses) == 1:
        return spread_from(*uses[0].spread_sums(dtype, known), max(s.p, s.d), dtype)
    each = zip(*(use.spread_sums(dtype) for use in uses), strict=True)
    total, sums, squares = (torch.stack(some).sum(0) for some in each)
    return spread_from(total, sums, squares, max(s.p, s.d), dtype)


def spread_from_norms(norms_2xt: Tensor, longest_x: Tensor, dtype: torch.dtype) -> Spread:
    """Of several parameters' single uses at once, x examples and parameters together.

    Args:
        norms_2xt: |a_t| and |g_t|, as they come; written over.
        longest_x: entries of a row of either factor, at most. float64.
        dtype: of the norms.
    """
    norms = at_least(norms_2xt, longest_x.unsqueeze(1)).unsqueeze(2)
    return spread_from(*sums_over_positions(norms), longest_x, dtype)


def spread_from(
    total_bg: Tensor,
    sums_2bg: Tensor,
    squares_bg: Tensor,
    entries: float | Tensor,
    dtype: torch.dtype,
) -> Spread:
    """``entries``: of a row of either factor, at most; one number, or [b].

    An inner product of two rows loses at most so many smallest numbers, times the norms of the
    other factor's rows.
    """
    flushed = entries * smallest_normal(dtype)
    lost = sums_2bg.square().sum((0, 2)).mul_(flushed)
    by_block = total_bg * ROUNDING
    made_up = sums_2bg.sum(0)
    made_up.mul_(flushed.sqrt().unsqueeze(1) if isinstance(flushed, Tensor) else flushed**0.5)
    # Two infinite ones: what is divided by is infinite, and the record adds zero.
    own = (total_bg - made_up).nan_to_num_(nan=math.inf, posinf=math.inf).clamp_min_(0.0)
    plain = torch.linalg.vector_norm(own, dim=1)
    terms = squares_bg.sum(1).sqrt_()
    return Spread(by_block.square().sum(1), lost, by_block, plain, terms)


def beside_bias(both: Spread, weight: Spread, rows_b: Tensor) -> Spread:
    """Of a weight and its bias that are measured as one matrix, ``both``: what bounds rounding is
    that matrix', and what is divided by at least is that of the two apart. Whether they meet
    follows from the micro-batch's sizes, and no divisor may.

    Args:
        rows_b: spreads of the biases.
    """
    plain = torch.hypot(weight.plain, rows_b).nan_to_num_(nan=math.inf, posinf=math.inf)
    return replace(both, plain=plain, terms=weight.terms)


def diagonal_norms(gram_xtt: Tensor) -> Tensor:
    """[x] float64 sums over positions of rows' norms, as they come (``SummedRows.spread``)."""
    return gram_xtt.diagonal(dim1=1, dim2=2).sqrt().sum(1, dtype=torch.float64)


def margin_and_least(
    spread: Spread, terms: float, like: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """[b] what products over positions may be off by, gamma of that many terms times the spread;
    what is divided by at least; and ``Spread.terms``.
    """
    return spread.norm * gamma(terms, like, dtype), least_of(spread.plain), spread.terms
