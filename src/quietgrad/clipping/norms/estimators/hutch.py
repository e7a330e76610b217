"""Hutchinson's estimate of squared norms: ||right^T (left P)||^2 with P of variance 1/k, k columns;
linear in the positions.

Sources: docs/methods, section 1; DP-SGD-RC with erratum E2.
Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.norms.cost import Cost, Sketch, Throughput
from quietgrad.clipping.norms.estimators.by_rows import norms_by_rows
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.sketches import (
    drawn,
    project_columns,
    project_rows,
    sketched,
    spread_beside,
    tail_margin,
)
from quietgrad.clipping.norms.factors import MatrixFactors, Unfolded
from quietgrad.clipping.norms.factors.sums.columns import Sums, sums_over_columns
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import Measured, squared_norms


@dataclass(frozen=True)
class Hutch:
    """t k (p + d) multiplications per example."""

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        return (
            cost.examples * cost.blocks * cost.positions * sketch_dim * (cost.rows + cost.columns)
        )

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        """Both factors are read once: with few projections that takes as long as products."""
        return float(cost.factor_entries)

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        name, k, projections, scratch, block = sketch
        return hutch_norms(uses, block or name, k, projections, dtype, scratch)


def hutch_norms(
    uses: Sequence[MatrixFactors],
    name: str,
    sketch_dim: int,
    projections: Projections,
    dtype: torch.dtype,
    scratch: Scratch | None = None,
) -> Measured:
    """Hutchinson estimates of the squared norms: unbiased, relative variance 2/k at rank one.

    One dimension is projected by one Gaussian matrix, the same for every example and use that meets
    stream ``name`` in this release: that of patches where they need not be formed for it, else
    the larger one, so that the sketch is [smaller, k] for each example. Either has the same law.
    Tables that are only read are measured exactly.
    """
    s, own = uses[0].sizes, scratch is None
    scratch = scratch or Scratch()
    sums = uses[0].column_sums(dtype) if s.taps else None
    if sums is not None:
        projection = drawn(projections.gaussian(name, "hutch", s.d, sketch_dim), uses[0], dtype)
        sketch = project_columns(uses, projection, dtype, scratch)
        return _estimate(sketch, uses, uses, sums, sketch_dim, dtype, scratch)
    some = [use.unfolded() for use in uses]
    exact = norms_by_rows(some, dtype)
    if exact is not None:
        return exact
    sketch, sums = sketch_of(some, name, sketch_dim, projections, dtype, scratch)
    if own:
        scratch.let_go()
    return _estimate(sketch, uses, some, sums, sketch_dim, dtype, scratch)


def sketch_of(
    uses: Sequence[Unfolded],
    name: str,
    sketch_dim: int,
    projections: Projections,
    dtype: torch.dtype,
    scratch: Scratch,
) -> tuple[Tensor, Sums]:
    """Of factors whose positions are there: the sketch, and how its columns are added up."""
    s = uses[0].sizes
    side = max(s.p, s.d)
    projection = drawn(projections.gaussian(name, "hutch", side, sketch_dim), uses[0], dtype)
    project = project_rows if s.p > s.d else project_columns
    return project(uses, projection, dtype, scratch), sums_over_columns(side)


def _estimate(
    sketch: Tensor,
    uses: Sequence[MatrixFactors],
    some: Sequence[MatrixFactors],
    sums: Sums,
    sketch_dim: int,
    dtype: torch.dtype,
    scratch: Scratch,
) -> Measured:
    """``some``: the uses as they were projected."""
    margin = tail_margin(some, sums, sketch_dim, sketch, dtype)
    spread = spread_beside(uses, dtype, scratch)
    return sketched(squared_norms(sketch), uses, spread, margin, sketch_dim, dtype)
