"""Ghost norms whose Gram matrices are formed in float64.

A ghost norm errs by gamma S^2 in its square (S the spread): with a large common part in a layer's
inputs (a date, an uncentred column) and output gradients that cancel over positions, S is many
times the norm, the bound then says little, and example after example is measured again as its own
gradient. In float64 gamma is 5e-10 of what it was. What remains is what the weighted sum itself may
be off by, gamma S in the norm and in the sum's own precision, so examples are measured again from
S of some hundred times the norm on, instead of some ten times.
Source: docs/methods, section 1 and "Real arithmetic".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quietgrad.clipping.norms.cost import Cost, Sketch, Throughput
from quietgrad.clipping.norms.estimators.ghost import Ghost, ghost_norms
from quietgrad.clipping.norms.factors import MatrixFactors
from quietgrad.clipping.norms.rounding import Measured
from quietgrad.clipping.norms.spread import margin_and_least, spread_of

GHOST = Ghost()
OVER_FLOAT32 = 2.0  # time and memory of the same product in float64


@dataclass(frozen=True)
class Ghost64:
    """Twice the work and the memory of ``Ghost``."""

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        return OVER_FLOAT32 * GHOST.multiplications(cost, sketch_dim)

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        # Beside the Gram matrices a wide copy of the factors is written and read.
        return OVER_FLOAT32 * (GHOST.traffic(cost, kept, speed) + 2.0 * cost.factor_entries)

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        exact = ghost_norms(uses, torch.float64)
        positions = sum(use.sizes.t for use in uses)
        bounds = margin_and_least(spread_of(uses, dtype), positions, uses[0].like, dtype)
        return Measured(exact.squared, exact.slack, *bounds)
