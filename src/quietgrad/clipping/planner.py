"""Which norm estimator each parameter gets, and whether its per-example gradients are kept: the cheapest by modelled time.

Modelled costs per example over the non-private step (docs/clipping.md; design of the methods, section 1), in multiplications and in memory traffic:

    ghost               t^2 (p + d)              the weighted product stays to be done
    materialized        t p d                    likewise; row blocks bound the memory
    materialized, kept  3 p d entries of traffic the weighted product becomes a sum of p d entries: nothing is computed twice
    hutch, hutch++      t k (p + d), three times that
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from quietgrad.clipping.estimators import BLOCK_ELEMENTS, examples_in_cache, pixel_gram_pays
from quietgrad.clipping.factors import ConvolutionFactors, MatrixFactors, OneHotFactors
from quietgrad.clipping.throughput import Throughput

Estimator = Literal["auto", "exact", "materialized", "ghost", "hutch", "hutch++"]
ESTIMATORS: tuple[Estimator, ...] = ("auto", "exact", "materialized", "ghost", "hutch", "hutch++")
SKETCHES: tuple[Estimator, ...] = ("hutch", "hutch++")
DEFAULT_SKETCH_DIM = 32
CACHE_OVER_MEMORY = 4.0  # speed of copies within a processor's cache over that of memory
CALLS_PER_PIECE = 3  # routines called for each piece of a convolution's per-example gradients


@dataclass(frozen=True)
class Cost:
    """The sizes of one parameter's per-example gradient that decide its estimator, for one micro-batch.

    Attributes:
        examples: b.
        positions: t, over all uses of the parameter.
        rows, columns: p and d.
        blocks: g, diagonal blocks (groups of a convolution).
        one_hot: an embedding table in all its uses.
        gram_columns: multiplications of the right Gram matrix per pair of positions, where cheaper than d (convolutions).
        examples_a_call: for convolutions on a processor: how many examples' gradients are formed at once; 0 elsewhere.
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

    def multiplications(self, estimator: str, sketch_dim: int) -> float:
        """Per micro-batch, over the weighted product."""
        each = self.examples * self.blocks
        t, p, d = self.positions, self.rows, self.columns
        if estimator == "ghost":
            right = d if self.gram_columns is None else self.gram_columns
            return each * t * t * (right + (0 if self.one_hot else p))
        if estimator == "materialized":
            return each * t * (d if self.one_hot else p * d)
        return each * t * sketch_dim * (p + d) * (3 if estimator == "hutch++" else 1)

    def seconds(self, estimator: str, kept: bool, sketch_dim: int, speed: Throughput) -> float:
        """Modelled seconds per micro-batch over the non-private step."""
        traffic = 0.0
        work = self.multiplications(estimator, sketch_dim)
        if estimator == "materialized":
            # Kept: written, read for the norm, read for the sum, which is read and written once for all examples.
            traffic = self.gradient_entries * (3.0 + 2.0 / self.examples if kept else 1.0)
            if self.examples_a_call:
                calls = CALLS_PER_PIECE * -(-self.examples // self.examples_a_call)
                traffic += calls * speed.call_overhead * speed.entries_per_second
            if self.examples_a_call > 1:
                patches = self.examples * self.blocks * self.positions * self.columns
                traffic += patches / CACHE_OVER_MEMORY
            if kept:
                work = 0.0
        elif estimator == "ghost":
            # Two Gram matrices written and read, their product written and read.
            traffic = 6.0 * self.examples * self.blocks * self.positions**2
        return work / speed.batched_multiplications_per_second + traffic / speed.entries_per_second


@dataclass(frozen=True)
class Choice:
    """What one parameter gets in one micro-batch.

    Attributes:
        estimator: "materialized", "ghost", "hutch" or "hutch++".
        kept: the per-example gradients are kept and summed by their weights; else the factors are kept and multiplied once more.
        seconds: modelled cost over the non-private step.
        sketch_dim: k, of sketches.
    """

    estimator: Estimator
    kept: bool
    seconds: float
    sketch_dim: int = DEFAULT_SKETCH_DIM


@dataclass(frozen=True)
class Policy:
    """How estimators are chosen.

    Attributes:
        estimator: "auto" and "exact" take the cheapest exact one; the other words are taken literally.
        sketch_dim: k of sketches.
        speed: of the device.
        kept_entries: per-example gradients of one parameter may be kept up to this many entries, or up to the size of the factors
            they replace, whichever is more.
        may_keep: False for engines that have no use for kept gradients.
    """

    estimator: Estimator
    sketch_dim: int
    speed: Throughput
    kept_entries: int = BLOCK_ELEMENTS
    may_keep: bool = True

    def choose(self, cost: Cost) -> Choice:
        """The estimator for one parameter, all its uses together. Sketches are never chosen unasked: they change the noise multiplier."""
        return _choice(self, cost)

    def _choose(self, cost: Cost) -> Choice:
        limit = max(self.kept_entries, cost.factor_entries)
        fits = self.may_keep and cost.gradient_entries <= limit
        materialized = Choice(
            "materialized", fits, cost.seconds("materialized", fits, self.sketch_dim, self.speed), self.sketch_dim
        )
        if self.estimator == "materialized":
            return materialized
        name: Estimator = "ghost" if self.estimator in ("auto", "exact") else self.estimator
        other = Choice(name, False, cost.seconds(name, False, self.sketch_dim, self.speed), self.sketch_dim)
        if self.estimator in ("auto", "exact") and cost.positions > 1 and materialized.seconds < other.seconds:
            return materialized
        return other


@lru_cache(maxsize=4096)
def _choice(policy: Policy, cost: Cost) -> Choice:
    return policy._choose(cost)


def cost_of(uses: Sequence[MatrixFactors]) -> Cost:
    """Sizes of one parameter's uses in one micro-batch."""
    s = uses[0].sizes
    t = sum(u.sizes.t for u in uses)
    one_hot = all(isinstance(u, OneHotFactors) for u in uses)
    gram_columns, examples_a_call = None, 0
    if len(uses) == 1 and isinstance(uses[0], ConvolutionFactors):
        use = uses[0]
        examples_a_call = 0 if use.x.is_cuda else examples_in_cache(use)
        if pixel_gram_pays(use):
            taps = use.geometry.taps
            gram_columns = (use.input_positions / t) ** 2 * s.d / taps + 2 * taps
    return Cost(s.b, t, s.p, s.d, s.g, one_hot, gram_columns, examples_a_call)
