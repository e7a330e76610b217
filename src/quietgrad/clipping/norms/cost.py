"""What a norm costs: the sizes that decide, the stated speeds of a device, and what every estimator
says of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import MatrixFactors
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import Measured


class Throughput(NamedTuple):
    """Speeds of one device.

    Attributes:
        multiplications_per_second: of a large matrix product.
        batched_multiplications_per_second: of a batched product of small matrices.
        entries_per_second: float32 entries read or written by elementwise work.
        call_overhead: seconds that one call of a routine costs whatever its size.
        rows_at_half_speed: rows of a matrix product at which the device runs at half its speed.
    """

    multiplications_per_second: float
    batched_multiplications_per_second: float
    entries_per_second: float
    call_overhead: float
    rows_at_half_speed: float


# Stated, not measured, so that two runs of one configuration choose alike and agree to the last
# bit. Only ratios matter for the choices.
MODELLED_PROCESSOR = Throughput(
    multiplications_per_second=1e11,
    batched_multiplications_per_second=5e10,
    entries_per_second=2.5e9,
    call_overhead=2e-5,
    rows_at_half_speed=48.0,
)
MODELLED_GPU = Throughput(
    multiplications_per_second=1.5e14,
    batched_multiplications_per_second=6e13,
    entries_per_second=5e11,
    call_overhead=1e-5,
    rows_at_half_speed=1024.0,
)


def modelled_throughput(device: torch.device) -> Throughput:
    """Stated speeds of a kind of device."""
    return MODELLED_GPU if device.type == "cuda" else MODELLED_PROCESSOR


class Cost(NamedTuple):
    """The sizes of one parameter's per-example gradient that decide its estimator, for one
    micro-batch.

    Attributes:
        examples: b.
        positions: t, over all uses of the parameter.
        rows, columns: p and d.
        blocks: g, diagonal blocks (groups of a convolution).
        one_hot: an embedding table in all its uses.
        gram_columns: multiplications of the right Gram matrix per pair of positions, where fewer
            than d (convolutions).
        examples_a_call: how many examples' gradients are formed at once, where they come in pieces
            (convolutions on a processor); 0 elsewhere.
    """

    examples: int
    positions: int
    rows: int
    columns: int
    blocks: int = 1
    one_hot: bool = False
    gram_columns: float | None = None
    examples_a_call: int = 0

    @property
    def gradient_entries(self) -> int:
        """Entries of the micro-batch's per-example gradients."""
        return self.examples * self.blocks * self.rows * self.columns

    @property
    def factor_entries(self) -> int:
        """Entries of the factors that the gradients are made of."""
        left = 0 if self.one_hot else self.rows
        return self.examples * self.blocks * self.positions * (left + self.columns)


def cost_of(uses: Sequence[MatrixFactors]) -> Cost:
    """Sizes of one parameter's uses in one micro-batch."""
    use, s = uses[0], uses[0].sizes
    if len(uses) == 1:
        return Cost(s.b, s.t, s.p, s.d, s.g, use.one_hot, use.gram_columns, use.examples_a_call)
    one_hot = all(u.one_hot for u in uses)
    return Cost(s.b, sum(u.sizes.t for u in uses), s.p, s.d, s.g, one_hot)


class Sketch(NamedTuple):
    """What a sketch of one parameter's gradients is made with; other estimators do not look at it.

    Attributes:
        name: of the parameter.
        sketch_dim: k.
        projections: of this release.
        scratch: memory for what passes.
        block: name that all parameters share which may meet one projection.
    """

    name: str
    sketch_dim: int
    projections: Projections
    scratch: Scratch | None = None
    block: str | None = None


class NormEstimator(Protocol):
    """One way to take norms of per-example gradients: one file of this folder, one line of
    ``choice``.
    """

    def multiplications(self, cost: Cost, sketch_dim: int) -> float:
        """Per micro-batch, over the weighted product."""

    def traffic(self, cost: Cost, kept: bool, speed: Throughput) -> float:
        """Entries read and written per micro-batch, routine calls as the entries they are worth."""

    def norms(self, uses: Sequence[MatrixFactors], sketch: Sketch, dtype: torch.dtype) -> Measured:
        """Of one parameter, all its uses together, with what they may be wrong by."""


def seconds(
    estimator: NormEstimator, cost: Cost, kept: bool, sketch_dim: int, speed: Throughput
) -> float:
    """Modelled seconds per micro-batch over the non-private step."""
    # Kept gradients are the weight gradient's work: nothing is computed twice.
    work = 0.0 if kept else estimator.multiplications(cost, sketch_dim)
    traffic = estimator.traffic(cost, kept, speed)
    return work / speed.batched_multiplications_per_second + traffic / speed.entries_per_second
