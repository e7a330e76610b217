"""Exact norms from Gram matrices over positions: sum((left left^T) * (right right^T)), in blocks of
examples and tiles.

Several uses of one parameter (tied weights) are summed before the norm is taken, never after: cross
terms included. A ghost norm errs by gamma S^2 in its square (S the spread): where positions cancel,
it says nothing, and its bound says so.
Sources: docs/methods, section 1 and "Real arithmetic".
Shape legend: b examples, g blocks, t positions, p rows, d columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.norms.cost import Cost, Sketch, Throughput
from quietgrad.clipping.norms.factors import BLOCK_ELEMENTS, MatrixFactors, Unfolded
from quietgrad.clipping.norms.factors.direct import Side
from quietgrad.clipping.norms.factors.products import gram_chain, gram_products
from quietgrad.clipping.norms.factors.rows import at_least
from quietgrad.clipping.norms.rounding import Measured, gamma, smallest_normal
from quietgrad.clipping.norms.spread import (
    ROUNDING,
    Spread,
    beside_bias,
    diagonal_norms,
    margin_and_least,
    spread_of,
)

FEW_POSITIONS = 256  # up to which sums over pairs of positions are bounded by row
PRODUCTS_AT_ONCE = 512  # of a ghost norm's inner product that are added up in the working precision


@dataclass(frozen=True)
class Ghost:
    """t^2 (p + d) multiplications per example; the weighted product stays to be done."""

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        right = cost.columns if cost.gram_columns is None else cost.gram_columns
        each = cost.examples * cost.blocks * cost.positions * cost.positions
        return each * (right + (0 if cost.one_hot else cost.rows))

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        # Two Gram matrices written and read, their product written and read.
        return 6.0 * cost.examples * cost.blocks * cost.positions**2

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        return ghost_norms(uses, dtype)


def in_one_tile(use: MatrixFactors) -> bool:
    """Whether Gram matrices of all positions of a use of one block are formed at once."""
    s = use.sizes
    return s.g == 1 and s.t > 1 and s.t * s.t <= BLOCK_ELEMENTS


def ghost_norms(
    uses: Sequence[MatrixFactors],
    dtype: torch.dtype,
    block_elements: int = BLOCK_ELEMENTS,
    ones: Side | None = None,
) -> Measured:
    """Norms from Gram matrices over positions, a tile of positions and a block of examples at a
    time.

    Either Gram matrix errs by gamma |a| |a'| and gamma |g| |g'| in its entries; what that does to
    the squared norm is bounded with the other matrix as it is, which for ordinary gradients is many
    times sharper than gamma S^2.

    ``ones``: the factor of a use ``in_one_tile`` that gets a column of ones, for the bias of its
    layer, whose squared norm is then in it.
    """
    grams = uses[0].grams(dtype, block_elements) if len(uses) == 1 else None
    if grams is None:
        assert ones is None, "a bias would be left out of the norm"
        sums = _in_tiles(uses, dtype, block_elements)
        return _measured_by_ghost(uses, sums, spread_of(uses, dtype), dtype)
    g = uses[0].sizes.g
    parts, norms, of_weight, of_bias = [], [], [], []
    for right, left, rows in grams:
        if ones is not None:
            of_weight.append(rows.clone())
            of_bias.append(diagonal_norms(left if ones == "right" else right))
            (right if ones == "right" else left).add_(1.0)
            rows[0 if ones == "right" else 1].square_().add_(1.0).mul_(ROUNDING).sqrt_()
        part = sums_at_once(right, left, rows)
        parts.append(part if g == 1 else part.unflatten(1, (-1, g)).sum(2))
        norms.append(rows)
    sums = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    spread = spread_of(uses, dtype, norms)
    if ones is not None:
        spread = beside_bias(spread, spread_of(uses, dtype, of_weight), torch.cat(of_bias))
    return _measured_by_ghost(uses, sums, spread, dtype, int(ones is not None))


def _in_tiles(uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int) -> Tensor:
    """[3, b], see ``_sums``, over all pairs of uses."""
    b = uses[0].sizes.b
    most = max(use.sizes.patch_entries for use in uses)
    examples = max(1, min(b, block_elements // max(1, most)))
    parts = []
    for e in range(0, b, examples):
        some = [use.examples(slice(e, e + examples)).unfolded() for use in uses]
        pairs = [(first, second) for i, first in enumerate(some) for second in some[i:]]
        crosses = [
            (_ghost_product(one, two, dtype, block_elements), 1 if one is two else 2)
            for one, two in pairs
        ]
        parts.append(
            sum((times * cross for cross, times in crosses), torch.zeros_like(crosses[0][0]))
        )
    return torch.cat(parts, dim=1)


class Errors(NamedTuple):
    """Relative errors of a parameter's Gram matrices, of the sum of products of their entries, and
    what such sums may lose to underflow. Numbers, or [x] tensors, one for each example.
    """

    of_right: float | Tensor
    of_left: float | Tensor
    of_products: float
    lost: float | Tensor


def errors_of(uses: Sequence[MatrixFactors], dtype: torch.dtype, more: int = 0) -> Errors:
    """Of one parameter, all its uses together; ``more``: columns that are added to either factor
    once its products are formed.
    """
    s, like = uses[0].sizes, uses[0].like
    # Those of a convolution are formed otherwise where that is cheaper.
    of_right = gamma(s.d + s.taps if s.taps else gram_chain(s.d) + more, like, dtype)
    one_hot = all(use.one_hot for use in uses)
    of_left = 0.0 if one_hot else gamma(s.p if s.taps else gram_chain(s.p) + more, like, dtype)
    of_products = gamma(PRODUCTS_AT_ONCE, like, dtype)
    positions = sum(use.sizes.t for use in uses)
    # The bounds are sums over pairs of positions of products that may have been flushed to zero
    # themselves.
    lost = s.g * positions * (positions + 1) * smallest_normal(dtype)
    return Errors(of_right, of_left, of_products, (of_right + of_left + of_products) * lost)


def _measured_by_ghost(
    uses: Sequence[MatrixFactors], sums: Tensor, spread: Spread, dtype: torch.dtype, more: int = 0
) -> Measured:
    """From [3, b] sums over pairs of positions, see ``_sums``; ``more``: see ``errors_of``."""
    positions = sum(use.sizes.t for use in uses)
    slack = slack_of(sums, spread, errors_of(uses, dtype, more))
    bounds = margin_and_least(spread, positions, uses[0].like, dtype)
    return Measured(sums[0].clamp_min(0), slack, *bounds)


def slack_of(sums: Tensor, spread: Spread, errors: Errors) -> Tensor:
    """[x] what the squared norms ``sums[0]`` may be too small by, from [3, x] ``_sums``."""
    _, left_bound, right_bound = sums
    of_right, of_left, of_products, lost = errors
    slack = left_bound * (of_right + of_products)
    slack.add_(right_bound * of_left).add_(spread.lost)
    slack.add_(spread.squared * (3.0 * of_right * (of_left + of_right)))
    return slack.add_(lost)


def _sums(
    right: Tensor, left: Tensor, n: tuple[Tensor, Tensor], m: tuple[Tensor, Tensor]
) -> Tensor:
    """[3, x] float64: sums over a pair of tiles of K_right K_left, of |K_left| |a| |a'| and of
    |K_right| |g| |g'|.

    Args:
        right, left: [x, t, t'] Gram matrices.
        n, m: [x, t] and [x, t'] norms |a|, |a'| and |g|, |g'|.
    """
    return torch.stack([_inner_products(right, left), _between(left, *n), _between(right, *m)])


def sums_at_once(right: Tensor, left: Tensor, norms: Tensor) -> Tensor:
    """``_sums`` over all pairs of positions; ``norms``: [2, x, t], |a| and |g|.

    Up to ``FEW_POSITIONS`` the sums of |K| |a| |a'| are bounded by row, by Cauchy and Schwarz: one
    reading of a Gram matrix, not four, for a bound some sqrt(t) times as large.
    """
    x, t = norms.shape[1:]
    if t > FEW_POSITIONS:
        return _sums(right, left, (norms[0], norms[0]), (norms[1], norms[1]))
    rows = norms.new_empty(2, x, t)
    torch.linalg.vector_norm(left, dim=2, out=rows[0])
    torch.linalg.vector_norm(right, dim=2, out=rows[1])
    bounds = at_least(rows, t).mul_(norms).sum(2, dtype=torch.float64)
    whole = torch.linalg.vector_norm(norms, dim=2).double().mul_(1.001)
    return torch.cat([_inner_products(right, left).unsqueeze(0), bounds.mul_(whole)])


def _between(gram: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """[x] float64, sum of |gram| one two; never too small but for products that were flushed to
    zero.
    """
    products = gram.abs().mul_(one.unsqueeze(2)).mul_(two.unsqueeze(1))
    larger = 1.001 + 2.0 * gamma(gram.shape[2], gram, gram.dtype)
    return products.sum(2).sum(1, dtype=torch.float64).mul_(larger)


def _inner_products(first: Tensor, second: Tensor) -> Tensor:
    """[x] float64 sums over both other dimensions of products of entries: runs of them in the
    working precision, their sum in float64.
    """
    if first.shape[2] <= PRODUCTS_AT_ONCE:
        return torch.mul(first, second).sum(2).sum(1, dtype=torch.float64)
    one, two = first.flatten(1), second.flatten(1)
    b, n = one.shape
    whole = n - n % PRODUCTS_AT_ONCE
    runs = (x[:, :whole].reshape(-1, 1, PRODUCTS_AT_ONCE) for x in (one, two))
    first_runs, second_runs = runs
    total = torch.bmm(first_runs, second_runs.transpose(1, 2)).view(b, -1).double().sum(1)
    if whole < n:
        total += torch.bmm(one[:, None, whole:], two[:, whole:, None]).view(-1)
    return total


def _ghost_product(
    first: Unfolded, second: Unfolded, dtype: torch.dtype, block_elements: int
) -> Tensor:
    """[3, b] inner products <M_first, M_second> and the sums that bound their errors, see
    ``_sums``.
    """
    s, t2 = first.sizes, second.sizes.t
    b, g, t1 = s.b, s.g, s.t
    same = first is second
    n, m = zip(
        *(use.row_norms(dtype) for use in ((first,) if same else (first, second))), strict=True
    )
    if t1 == t2 == 1 and same:
        squared = (n[0].double() * m[0].double()).square_().sum((1, 2))
        bounds = squared * (1.0 + 4.0 * gamma(s.p + s.d, squared, dtype))
        return torch.stack([squared, bounds, bounds])
    n = tuple(at_least(x, s.d) for x in n)
    m = tuple(at_least(x, s.p) for x in m)
    side = max(1, int((block_elements // g) ** 0.5))
    # A whole row of tiles where it fits, square tiles where it does not: of a square, tiles above
    # the diagonal count twice.
    tile1, tile2 = (t1, t2) if g * t1 * t2 <= block_elements else (min(t1, side), min(t2, side))
    examples = max(1, min(b, block_elements // max(1, g * tile1 * tile2)))
    result = first.right_bgtd.new_zeros(3, b, dtype=torch.float64)
    for i in range(0, b, examples):
        rows = slice(i, i + examples)
        for r in range(0, t1, tile1):
            one = first.positions(rows, slice(r, r + tile1))
            for u in range(r if same else 0, t2, tile2):
                two = one if same and r == u else second.positions(rows, slice(u, u + tile2))
                right = gram_products(one.right_bgtd, two.right_bgtd, dtype).flatten(0, 1)
                left = one.left_gram(two, dtype).expand(-1, g, -1, -1).flatten(0, 1)
                ends = [
                    (
                        x[0][rows, :, r : r + tile1].flatten(0, 1),
                        x[-1][rows, :, u : u + tile2].flatten(0, 1),
                    )
                    for x in (n, m)
                ]
                part = _sums(right, left, *ends).unflatten(1, (-1, g)).sum(2)
                result[:, rows] += 2 * part if same and r != u else part
    return result
