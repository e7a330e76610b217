"""Exact norms by forming per-example gradients: ||left^T right||^2, in blocks of examples and rows
of bounded size.

Several uses of one parameter (tied weights) are summed before the norm is taken, never after: cross
terms included. A materialized norm errs by gamma S in the norm (S the spread).
Sources: docs/methods, section 1 and "Real arithmetic".
Shape legend: b examples, g blocks, t positions, p rows, d columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quietgrad.clipping.norms.cost import Cost, Sketch, Throughput
from quietgrad.clipping.norms.estimators.by_rows import norms_by_rows
from quietgrad.clipping.norms.factors import (
    BLOCK_ELEMENTS,
    Contribution,
    DirectGradients,
    Kept,
    ListedGradients,
    MatrixFactors,
    Unfolded,
)
from quietgrad.clipping.norms.rounding import (
    Measured,
    direct,
    least_of,
    norm_gamma,
    squared_norms,
)
from quietgrad.clipping.norms.spread import margin_and_least, spread_of

CACHE_OVER_MEMORY = 4.0  # speed of copies within a processor's cache over that of memory
CALLS_PER_PIECE = 3  # routines called for each piece of a convolution's per-example gradients


@dataclass(frozen=True)
class Materialized:
    """t p d multiplications per example; kept, 3 p d entries of traffic instead, and no weighted
    product.
    """

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        each = cost.examples * cost.blocks * cost.positions
        return each * (cost.columns if cost.one_hot else cost.rows * cost.columns)

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        # Kept: written, read for the norm, read for the sum, which is read and written once for all
        # examples.
        entries = cost.gradient_entries * (3.0 + 2.0 / cost.examples if kept else 1.0)
        if cost.one_hot and not kept:
            entries = min(entries, 2.0 * cost.factor_entries)
        if cost.examples_a_call:
            calls = CALLS_PER_PIECE * -(-cost.examples // cost.examples_a_call)
            entries += calls * speed.call_overhead * speed.entries_per_second
        if cost.examples_a_call > 1:
            patches = cost.examples * cost.blocks * cost.positions * cost.columns
            entries += patches / CACHE_OVER_MEMORY
        return entries

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        return materialized_norms(uses, dtype)


def kept_gradients(uses: Sequence[MatrixFactors], dtype: torch.dtype) -> tuple[Measured, Kept]:
    """Norms of one parameter's per-example gradients, and the gradients, to be summed by their
    weights.
    """
    pieces, spread = _pieces(uses, dtype), spread_of(uses, dtype)
    if pieces is None:
        whole = materialized_gradients(uses, dtype)
        return replace(direct(whole.values_bn, spread.plain), terms=spread.terms), whole
    some, squares = [], []
    for gradients in pieces:
        some.append(gradients)
        squares.append(squared_norms(gradients))  # at once: they still lie in the processor's cache
    squared = torch.cat(squares)
    slack = norm_gamma(uses[0].like, dtype) * squared
    none, least = torch.zeros_like(squared), least_of(spread.plain)
    return Measured(squared, slack, none, least, spread.terms), ListedGradients(tuple(some))


def _pieces(uses: Sequence[MatrixFactors], dtype: torch.dtype) -> Iterator[Tensor] | None:
    """Per-example gradients a few examples at a time, where they come that way; sums of several
    uses do not.
    """
    return uses[0].pieces(dtype) if len(uses) == 1 else None


def materialized_gradients(uses: Sequence[MatrixFactors], dtype: torch.dtype) -> DirectGradients:
    """[b, g p d] per-example gradients of one parameter, kept whole: memory b g p d."""
    s = uses[0].sizes
    total: Tensor | None = None
    for use in uses:
        pieces = use.pieces(dtype)
        part = (
            use.unfolded().gradient_rows(0, s.p, dtype)
            if pieces is None
            else torch.cat(tuple(pieces))
        )
        part = part.reshape(s.b, -1)
        total = part if total is None else total.add_(part)
    assert total is not None
    return DirectGradients(total)


def added_up(uses: Sequence[Contribution], dtype: torch.dtype) -> DirectGradients:
    """Per-example gradients of a parameter whose uses are of several kinds: memory b g p d."""
    total: Tensor | None = None
    total_spread: Tensor | None = None
    for use in uses:
        if isinstance(use, DirectGradients):
            values, spread = use.values_bn.to(dtype), use.spread_b
        else:
            values = materialized_gradients([use], dtype).values_bn
            spread = spread_of([use], dtype).plain
        total = values if total is None else total + values
        if spread is not None:
            total_spread = spread if total_spread is None else total_spread + spread
    assert total is not None
    return DirectGradients(total, total_spread)


def materialized_norms(
    uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int = BLOCK_ELEMENTS
) -> Measured:
    """Norms by forming the per-example gradients, a block of examples and rows at a time."""
    by_rows = norms_by_rows(uses, dtype, block_elements)
    if by_rows is not None:
        return by_rows
    pieces = _pieces(uses, dtype)
    if pieces is None:
        squared = _squares_in_blocks(uses, dtype, block_elements)
    else:
        squared = torch.cat([squared_norms(gradients) for gradients in pieces])
    # What is measured and what the sum will hold are two roundings of the same product.
    terms = 2 * sum(use.additions for use in uses)
    bounds = margin_and_least(spread_of(uses, dtype), terms, uses[0].like, dtype)
    return Measured(squared, norm_gamma(squared, dtype) * squared, *bounds)


def _squares_in_blocks(
    uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int
) -> Tensor:
    s = uses[0].sizes
    rows = max(1, min(s.p, block_elements // max(1, s.d * s.g)))
    most = max(use.sizes.patch_entries for use in uses)
    examples = max(1, min(s.b, block_elements // max(1, rows * s.d * s.g, most)))
    parts = []
    for i in range(0, s.b, examples):
        some: list[Unfolded] = [use.examples(slice(i, i + examples)).unfolded() for use in uses]
        squared = some[0].right_bgtd.new_zeros(some[0].sizes.b, dtype=torch.float64)
        for r in range(0, s.p, rows):
            total: Tensor | None = None
            for use in some:
                part = use.gradient_rows(r, min(s.p, r + rows), dtype)
                total = part if total is None else total.add_(part)
            assert total is not None
            squared += squared_norms(total)
            del part, total  # else the next block would be formed beside this one
        parts.append(squared)
    return torch.cat(parts)
