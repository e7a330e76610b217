"""What random sketches of per-example gradients share: projections of the factors, and what
rounding does to them.

Every use of a parameter meets the same projection, so several uses (tied weights) are sums of
sketches. Sketches are accumulated in float32 at least. Their ``margin`` covers rounding: an error
is at most u times the sum, over all additions, of what they give (any order). In a row of n
entries, cut into m sums of c, with a projection P that knows nothing of the data,

    sum over additions of |P^T g_v| <= (c sqrt(m) + w + sqrt(n)) |g| in the mean,

g_v the part of the row g that has been added: c additions within each sum, whose |g_v| are roots of
squares that add up, those of the sums, and one rounding a product. The m sums are added up in
pairs: the additions of a level give parts of the row that share nothing, so that its n norms add up
to sqrt(n) |g| at most, and w is the sum of sqrt(n) over all v = ceil(log2(m)) levels (``Sums``; one
after the other, w = v = m). That sum of norms is a Lipschitz function of sqrt(k) P, whose entries
are standard normal, with constant (c + v + 1) |g| / sqrt(k) (within a level, and over sums, the
parts' projections share nothing), so it exceeds its mean by
sqrt(2 * 55.3 / k) (c + v + 1) |g| with probability 1e-24 at most
(Gaussian concentration: Boucheron, Lugosi and Massart, Concentration Inequalities, theorem 5.6).

Positions add up in |a_t| |g_t|, that is in the spread S: a partial sum over positions is at most
the sum of its positions' |a_t| |P^T g_t|, so what additions are off by is a sum of such terms whose
weights are known. Each |P^T g_t| / |g_t| is chi(k) / sqrt(k); whatever they have to do with each
other, their weighted mean is above the expected shortfall of one at level 1e-24 with that
probability at most, since the expected shortfall is subadditive and above the quantile (Acerbi and
Tasche, On the coherence of expected shortfall, 2002). Lengths of sums count what is the record's
own, so that padding does not change what it is divided by.

A sketch has three such bounds (columns, positions, underflow), Hutch++ two sketches, the first of
them bounded block by block: all hold but for 6e-24 a record, release, layer and block. No delta
counts that: over 10^4 releases, 200 layers and 32 blocks it is 4e-16.

What the sum is off by counts sqrt(2) times, beside a sketch. A sketched norm sqrt(R) |g| may let a
record count for less than C, R up to 2 (``LARGEST_COUNTED_RATIO``), and then has to be above
sqrt(R) |g'|, g' what the sum holds: by sqrt(R) |g' - g| <= sqrt(2) |g' - g|.
Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from scipy import special
from torch import Tensor

from quietgrad.clipping.norms.factors import (
    DenseFactors,
    MatrixFactors,
    OneHotFactors,
    Unfolded,
)
from quietgrad.clipping.norms.factors.rows import at_least, row_norms
from quietgrad.clipping.norms.factors.sums.columns import Sums
from quietgrad.clipping.norms.factors.sums.pairs import levels
from quietgrad.clipping.norms.factors.sums.positions import (
    add_over_positions,
    additions_over_positions,
)
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import (
    LONGEST_CHAIN,
    LONGEST_RUN,
    MOST_COUNTED,
    Measured,
    gamma,
    least_of,
    norm_gamma,
)
from quietgrad.clipping.norms.spread import Spread, spread_of
from quietgrad.sending import sent

LOG_FAILURE = 55.3  # -log of 1e-24, of each bound on a sketch's rounding

# Up to so many positions of a convolution, and in a few uses, bounds are the same for all records.
STEADY_POSITIONS, FEW_USES = 1024, 2


def sketched(
    squared: Tensor,
    uses: Sequence[MatrixFactors],
    spread: Spread,
    margin: float | Tensor,
    sketch_dim: int,
    dtype: torch.dtype,
    more_slack: Tensor | float = 0.0,
) -> Measured:
    """An estimate with its bounds; ``margin``: of the sketch, in units of the spread, that of the
    sum is added. ``uses``: as the sum is formed of them.
    """
    slack = torch.add(spread.lost, squared, alpha=norm_gamma(squared, dtype)) + more_slack
    own, least = own_rounding(uses, squared, dtype), least_of(spread.plain)
    bound = spread.norm.mul_(margin + MOST_COUNTED * own.of_spread)
    for use in uses:
        if isinstance(use, OneHotFactors):
            # Once in the sum, once in a sketch with an orthonormal basis, once in a Gaussian one.
            times = MOST_COUNTED + 1.0 + worst_mean(sketch_dim)
            bound.add_(use.errors_by_rows(dtype), alpha=times)
    return own.beside(Measured(squared, slack, bound, least, spread.terms))


def steady(measured: Measured, uses: Sequence[MatrixFactors], dtype: torch.dtype) -> Measured:
    """What was measured of formed gradients, with a bound that follows from the record alone: not
    from whether they were kept, nor from how long others are.
    """
    if all(isinstance(use, OneHotFactors) for use in uses):
        return measured
    # Once in what is measured, once in the sum.
    own = own_rounding(uses, uses[0].like, dtype)
    times = 1.0 + MOST_COUNTED
    margin = spread_of(uses, dtype).norm.mul_(times * own.of_spread)
    for use in uses:
        if isinstance(use, OneHotFactors):
            margin.add_(use.errors_by_rows(dtype), alpha=times)
    return own.beside(own.beside(replace(measured, margin=margin)))


def spread_beside(uses: Sequence[MatrixFactors], dtype: torch.dtype, scratch: Scratch) -> Spread:
    """``spread_of``, with what a projection found of the norms of rows of a single dense use."""
    use = uses[0]
    if len(uses) > 1 or not isinstance(use, DenseFactors):
        return spread_of(uses, dtype)
    factors = {"right": use.right_bgtd, "left": use.left_bgtp}
    found = {name: scratch.norms_of(name, factor) for name, factor in factors.items()}
    each = [
        row_norms(factors[name], dtype) if norms is None else norms for name, norms in found.items()
    ]
    norms = at_least(torch.stack(each), max(use.sizes.p, use.sizes.d))
    return spread_of(uses, dtype, [norms.flatten(1, 2)])


class OwnRounding(NamedTuple):
    """What a record's own sum over positions may be off by: a share of its spread, and a share of
    the norm of its gradient. One number, or [b].
    """

    of_spread: float | Tensor
    of_norm: float | Tensor

    def beside(self, measured: Measured) -> Measured:
        """An estimate of |M| as one of (1 + ``of_norm``) |M|."""
        if isinstance(self.of_norm, float) and self.of_norm == 0.0:
            return measured  # whose slack may be infinite
        share = self.of_norm * (2.0 + self.of_norm)
        more = (measured.squared + measured.slack) * share
        if isinstance(share, Tensor):
            more = torch.where(share > 0, more, 0.0)
        return replace(measured, slack=measured.slack + more)


def own_rounding(uses: Sequence[MatrixFactors], like: Tensor, dtype: torch.dtype) -> OwnRounding:
    """Of the weighted sum, a function of the record alone.

    Dense factors are added up in short runs. A convolution's native routine adds one position of
    its output after the other, all n of them (``native_additions``). Of n terms there are n - 1
    partial sums whatever the order, and each is at most the entries before it and at most the whole
    and the entries after it: at most (s + |m|) / 2 in an entry m, s the sum of absolute values. So
    they err by n u (S + |M|) / 2.
    """
    native = [use for use in uses if use.sizes.taps]
    if not native:
        return OwnRounding(gamma(_own_additions(uses), like, dtype), 0.0)
    if len(uses) == 1:
        half = gamma(native_additions(native[0]) / 2, like, dtype)
        return OwnRounding(half, half)
    return _of_several(uses, native, like, dtype)


def _of_several(
    uses: Sequence[MatrixFactors],
    native: Sequence[MatrixFactors],
    like: Tensor,
    dtype: torch.dtype,
) -> OwnRounding:
    """``own_rounding`` of several uses, convolutions among them: of those in which a record has a
    gradient, whatever others have. Only in one: as if there were no other.
    """
    dense = [use for use in uses if not use.sizes.taps]
    positions = torch.stack([_holds(use) * native_additions(use) for use in native]).sum(0)
    of_dense = torch.stack([_holds(use) for use in dense]).any(0) if dense else False
    more = of_dense * _own_additions(dense) if dense else 0.0
    held = torch.stack([_holds(use) for use in uses]).sum(0)
    several = torch.exp2(torch.ceil(torch.log2(positions.clamp_min(1.0)))) + held + more
    half = gamma(positions.clamp_min(STEADY_POSITIONS) / 2, like, dtype)
    alone = held < 2
    return OwnRounding(
        torch.where(alone, half, gamma(several, like, dtype)), torch.where(alone, half, 0.0)
    )


def _holds(use: MatrixFactors) -> Tensor:
    """[b] whether a use holds anything of a record: else it adds exact zeros."""
    return use.alive().flatten(1).any(1)


def native_additions(use: MatrixFactors) -> float | Tensor:
    """Output positions of a convolution at which a record has a gradient: one number up to
    ``STEADY_POSITIONS``, else [b], rounded up to a power of two. Not from the first to the last:
    where images are padded, the rows of a smaller one lie apart.
    """
    if use.sizes.t <= STEADY_POSITIONS:
        return float(STEADY_POSITIONS)
    count = use.alive().any(dim=1).sum(1, dtype=torch.float64).clamp_min(STEADY_POSITIONS)
    return torch.exp2(torch.ceil(torch.log2(count)))


def _own_additions(uses: Sequence[MatrixFactors]) -> float | Tensor:
    """On the longest path through a record's own sum over positions of dense factors: a block, the
    blocks of a run, runs in pairs, uses one after the other. Up to two million positions it is the
    same for all.
    """
    runs = max(-(-use.sizes.t // LONGEST_RUN) for use in uses)
    in_use = LONGEST_CHAIN + LONGEST_RUN // LONGEST_CHAIN + max(11, levels(runs))
    return in_use + _uses_of_each(uses)


def tail_margin(
    uses: Sequence[MatrixFactors], sums: Sums, sketch_dim: int, like: Tensor, dtype: torch.dtype
) -> float | Tensor:
    """Of a Gaussian sketch, in units of the spread; ``sums``: of the dimension that is projected.
    One number, or [b].
    """
    norms, most = sums.across()
    mean = sums.within * math.sqrt(sums.stretches) + norms + math.sqrt(sums.entries)
    excess = math.sqrt(2.0 * LOG_FAILURE / sketch_dim) * (sums.within + most + 1)
    columns = gamma(mean + excess, like, dtype)
    return columns + worst_mean(sketch_dim) * position_gamma(uses, like, dtype)


def head_margin(
    uses: Sequence[MatrixFactors], sums: Sums, columns: int, like: Tensor, dtype: torch.dtype
) -> float | Tensor:
    """Of a sketch with an orthonormal basis of so many columns, in units of the spread: any part of
    it has norm one at most, whatever it knows of the data. One number, or [b].
    """
    norms, _ = sums.across()
    additions = sums.within * math.sqrt(sums.stretches) + norms + math.sqrt(columns)
    return gamma(additions, like, dtype) + position_gamma(uses, like, dtype)


def position_gamma(
    uses: Sequence[MatrixFactors], like: Tensor, dtype: torch.dtype
) -> float | Tensor:
    """Of sums over positions. One number, or [b]."""
    positions = sum(use.sizes.t for use in uses)
    return gamma(additions_over_positions(positions) + _uses_of_each(uses), like, dtype)


def _uses_of_each(uses: Sequence[MatrixFactors]) -> float | Tensor:
    """How many uses hold something of a record: what is added where it has no gradient is exactly
    zero. A function of the record alone, or a record that pads its micro-batch would change what
    all others are divided by: one number for few uses, else [b], rounded up to a power of two.
    """
    if len(uses) <= FEW_USES:
        return float(FEW_USES)
    count = torch.stack([_holds(use) for use in uses]).sum(0, dtype=torch.float64)
    return torch.exp2(torch.ceil(torch.log2(count.clamp_min(FEW_USES))))


@cache
def worst_mean(sketch_dim: int) -> float:
    """What a weighted mean of |P^T g| / |g| exceeds with probability 1e-24 at most: the expected
    shortfall of chi(k) / sqrt(k). With c_k the mean of chi(k), E[X; X > q] = c_k P(chi(k + 1) > q).
    """
    k, failure = sketch_dim, math.exp(-LOG_FAILURE)
    half_square = special.gammainccinv(k / 2, failure)
    mean = math.sqrt(2.0) * math.exp(math.lgamma((k + 1) / 2) - math.lgamma(k / 2))
    beyond = mean * float(special.gammaincc((k + 1) / 2, half_square)) / failure
    return 1.001 * beyond / math.sqrt(k)


def drawn(projection: Tensor, like: MatrixFactors, dtype: torch.dtype) -> Tensor:
    """A projection where the factors are."""
    return sent(projection, like.like.device).to(dtype)


def project_rows(
    uses: Sequence[Unfolded],
    projection: Tensor,
    dtype: torch.dtype,
    scratch: Scratch | None = None,
) -> Tensor:
    """(M^T P)^T summed over uses: [b, g, k, d] for P of shape [p, k] or [b, g, p, k]; in
    ``scratch``, where that is given.
    """
    total: Tensor | None = None
    for use in uses:
        small = use.left_product(projection, dtype, scratch)
        total = add_over_positions(total, use.right_bgtd, small, scratch)
    assert total is not None
    return total


def project_columns(
    uses: Sequence[MatrixFactors],
    projection: Tensor,
    dtype: torch.dtype,
    scratch: Scratch | None = None,
) -> Tensor:
    """(M P)^T summed over uses: [b, g, k, p] for P of shape [d, k], or for unfolded factors
    [b, g, d, k]; in ``scratch``, where that is given.
    """
    total: Tensor | None = None
    for use in uses:
        small = use.right_product(projection, dtype, scratch)
        total = use.add_left(total, small, scratch=scratch)
    assert total is not None
    return total
