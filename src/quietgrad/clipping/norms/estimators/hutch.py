"""Hutchinson's estimate of squared norms: ||right^T (left P)||^2 with P of variance 1/k, k columns;
linear in the positions.

Sources: docs/methods, section 1; DP-SGD-RC with erratum E2.
Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quietgrad.clipping.norms.cost import Cost, Sketch, Throughput
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.sketches import (
    drawn,
    project_columns,
    project_rows,
    sketched,
    tail_margin,
)
from quietgrad.clipping.norms.factors import MatrixFactors
from quietgrad.clipping.norms.rounding import Measured, squared_norms
from quietgrad.clipping.norms.spread import spread_of

# Rows of a sketch; a longer dimension is projected itself, or its sketch would take more memory
# than the factors.
LONGEST_SKETCH = 8192


@dataclass(frozen=True)
class Hutch:
    """t k (p + d) multiplications per example."""

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        return (
            cost.examples * cost.blocks * cost.positions * sketch_dim * (cost.rows + cost.columns)
        )

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        return 0.0

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        return hutch_norms(uses, *sketch, dtype)


def hutch_norms(
    uses: Sequence[MatrixFactors],
    name: str,
    sketch_dim: int,
    projections: Projections,
    dtype: torch.dtype,
) -> Measured:
    """Hutchinson estimates of the squared norms: unbiased, relative variance 2/k at rank one.

    One dimension is projected by one Gaussian matrix, the same for every example and use that meets
    parameter ``name`` in this release: the smaller one, which needs fewer draws, unless the sketch,
    [larger, k] for each example, would be too large (tables, heads over a vocabulary). Either has
    the same law.
    """
    some = [use.unfolded() for use in uses]
    s = some[0].sizes
    side = _projected(s.p, s.d)
    projection = drawn(projections.gaussian(name, "hutch", side, sketch_dim), some[0], dtype)
    rows = side == s.p
    sketch = (
        project_rows(some, projection, dtype) if rows else project_columns(some, projection, dtype)
    )
    spread = spread_of(uses, dtype)
    return sketched(
        squared_norms(sketch),
        some,
        spread,
        tail_margin(some, side, sketch_dim, sketch, dtype),
        sketch_dim,
        dtype,
    )


def _projected(p: int, d: int) -> int:
    """Which dimension Hutch projects. By shape alone: who is in the batch must not decide it."""
    smaller, larger = sorted((p, d))
    return larger if larger > LONGEST_SKETCH else smaller
