"""Which norm estimator each parameter gets, and whether its per-example gradients are kept: the
cheapest by modelled time.

Modelled costs per example over the non-private step (docs/clipping/estimators.md; design of the
methods, section 1), in multiplications and in memory traffic:

    ghost               t^2 (p + d)              the weighted product stays to be done
    materialized        t p d                    likewise; row blocks bound the memory
    materialized, kept  3 p d entries of traffic the weighted product becomes a sum of p d entries:
                        nothing is computed twice
    hutch, hutch++      t k (p + d), three times that; t (p + d) entries of traffic, twice that
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from quietgrad.clipping.norms.cost import Cost, NormEstimator, Throughput, seconds
from quietgrad.clipping.norms.estimators.ghost import Ghost
from quietgrad.clipping.norms.estimators.ghost64 import Ghost64
from quietgrad.clipping.norms.estimators.hutch import Hutch
from quietgrad.clipping.norms.estimators.hutch_plus_plus import HutchPlusPlus
from quietgrad.clipping.norms.estimators.materialized import Materialized
from quietgrad.clipping.norms.factors import BLOCK_ELEMENTS

Estimator = Literal["auto", "exact", "materialized", "ghost", "ghost64", "hutch", "hutch++"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
SKETCHES: tuple[Estimator, ...] = ("hutch", "hutch++")
DEFAULT_SKETCH_DIM = 32

# Smaller matrices cost little whichever way: they are sketched where a sketch was asked for.
LARGE_SIDE = 256

# An estimator is one file, with its cost and its norms, and one line here.
ESTIMATOR_OF: Mapping[str, NormEstimator] = {
    "materialized": Materialized(),
    "ghost": Ghost(),
    "ghost64": Ghost64(),
    "hutch": Hutch(),
    "hutch++": HutchPlusPlus(),
}


@dataclass(frozen=True)
class Choice:
    """What one parameter gets in one micro-batch.

    Attributes:
        estimator: "materialized", "ghost", "hutch" or "hutch++".
        kept: the per-example gradients are kept and summed by their weights; else the factors are
            kept and multiplied once more.
        seconds: modelled cost over the non-private step.
        sketch_dim: k, of sketches.
    """

    estimator: Estimator
    kept: bool
    seconds: float
    sketch_dim: int = DEFAULT_SKETCH_DIM


class Policy(NamedTuple):
    """How estimators are chosen.

    Attributes:
        estimator: "auto" and "exact" take the cheapest exact one; the other words are taken
            literally.
        sketch_dim: k of sketches.
        speed: of the device.
        kept_entries: per-example gradients of one parameter may be kept up to this many entries, or
            up to the size of the factors they replace, whichever is more.
        may_keep: False for engines that have no use for kept gradients.
        steady: nothing that norms are divided by may follow from the micro-batch's sizes, since
            none is measured again (beside sketches). Exact ones are materialized then.
    """

    estimator: Estimator
    sketch_dim: int
    speed: Throughput
    kept_entries: int = BLOCK_ELEMENTS
    may_keep: bool = True
    steady: bool = False

    def for_shape(self, shape: Sequence[int]) -> Policy:
        """For one parameter of that shape, of all ranks together: a matrix whose smaller side is at
        most k (an adapter's of low rank) is formed, not sketched. Its gradient is no larger than
        the sketch, costs fewer multiplications and has no variance; what is sketched follows from
        shapes alone, so it is the same in every micro-batch.
        """
        narrow = len(shape) == 2 and min(shape) <= self.sketch_dim and max(shape) >= LARGE_SIDE
        if self.estimator in SKETCHES and narrow:
            return self._replace(estimator="materialized", steady=True)
        return self

    def choose(self, cost: Cost) -> Choice:
        """The estimator for one parameter, all its uses together. Sketches are never chosen
        unasked: they change the noise multiplier.
        """
        return _choice(self, cost)

    def _choose(self, cost: Cost) -> Choice:
        limit = max(self.kept_entries, cost.factor_entries)
        fits = self.may_keep and cost.gradient_entries <= limit
        if self.steady and cost.one_hot:
            fits = False  # measured by rows, whose bound is their own
        materialized = Choice(
            "materialized", fits, self._seconds("materialized", cost, fits), self.sketch_dim
        )
        if self.estimator == "materialized" or (self.steady and self.estimator not in SKETCHES):
            return materialized
        name: Estimator = "ghost" if self.estimator in ("auto", "exact") else self.estimator
        other = Choice(name, False, self._seconds(name, cost, False), self.sketch_dim)
        if (
            self.estimator in ("auto", "exact")
            and cost.positions > 1
            and materialized.seconds < other.seconds
        ):
            return materialized
        return other

    def _seconds(self, name: Estimator, cost: Cost, kept: bool) -> float:
        return seconds(ESTIMATOR_OF[name], cost, kept, self.sketch_dim, self.speed)


@lru_cache(maxsize=4096)
def _choice(policy: Policy, cost: Cost) -> Choice:
    return policy._choose(cost)
