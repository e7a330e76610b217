"""The random scale Z of a record's contribution under randomized clipping, as a discrete
distribution rounded upwards.

Symbols: R ratio of sketched to true squared norm, Y its stochastic lower bound (the envelope), Z =
Y^(-1/2) the scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.accounting.envelope import envelope_cdf, envelope_quantile, envelope_upper_end
from quietgrad.accounting.hutch_envelope import mean_chi2_cdf
from quietgrad.accounting.hutch_plus_plus.law import atoms, distribution_bound
from quietgrad.events import ClippingClaim, ExactClipping, RandomizedClipping

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ScaleMixture:
    """Z takes value ``scales[i]`` with probability ``weights[i]``; what is left over,
    ``lost_mass``, counts as delta.

    Attributes:
        scales: [n], values of Z, each the largest of its bin.
        weights: [n], probabilities; together with ``lost_mass`` they sum to 1.
        lost_mass: probability below the smallest y, where no scale bounds the contribution.
        widest_relative_bin: largest (z_upper / z_lower - 1) over the bins: no contribution is
            overstated by more.
    """

    scales: Array
    weights: Array
    lost_mass: float
    widest_relative_bin: float


# A step's divergence is convex in R where the mean of its noise moves by at most sqrt(12) standard
# deviations (docs/hutchpp_envelope/convexity.md, theorem 2).
LARGEST_CONVEX_SHIFT = 12.0 * (1 - 1e-9)
LARGEST_CONVEX_FROM = 0.7


def convex_from(sigma: float, squared_shift: float = 0.0) -> float:
    """r0 above which a step's divergence is convex in R, rounded up to a power of 2^(1/8), so that
    near noise multipliers share their mixture; 1 where that is too near 1 to be of use.

    Args:
        sigma: noise multiplier.
        squared_shift: of what is released beside the gradients, sum of 1 / nu^2.
    """
    room = LARGEST_CONVEX_SHIFT - squared_shift
    if room <= 0 or sigma**2 * room <= 1.0:
        return 1.0
    found = 2.0 ** (math.ceil(-8 * math.log2(sigma**2 * room)) / 8)
    return found if found <= LARGEST_CONVEX_FROM else 1.0


def scale_mixture(
    clipping: ClippingClaim, tail_mass: float, bins: int, convex: float = 1.0
) -> ScaleMixture:
    """Discretises Z upwards: every bin of y takes its smallest y; with the convex and the hutch++
    envelope, and ``convex`` below 1, in the convex order above that.

    Args:
        clipping: exact clipping gives the point mass at 1.
        tail_mass: probability that may be moved below the smallest y, and so into delta, per step.
        bins: number of bins; the overstatement of the noise multiplier falls like 1/bins.
        convex: ``convex_from`` of the step that it is for; 1: for any.

    Returns:
        The mixture. Sound whatever ``bins`` is: the discrete Z is stochastically larger than the
            true one.
    """
    if isinstance(clipping, ExactClipping):
        return ScaleMixture(np.ones(1), np.ones(1), 0.0, 0.0)
    if clipping.in_convex_order and convex < 1.0:
        mixture = _convex_scale_mixture(clipping, tail_mass, bins, convex)
        if float(mixture.weights.sum()) <= 1 + 1e-9:  # else more is moved down than there is
            return mixture
    return _randomized_scale_mixture(clipping, tail_mass, bins)


@functools.lru_cache(maxsize=64)
def _convex_scale_mixture(
    clipping: RandomizedClipping, tail_mass: float, bins: int, convex: float
) -> ScaleMixture:
    moments = clipping.envelope == "hutch++"
    y, weights, lost = atoms(clipping.sketch_dim, convex, tail_mass, bins, moments)
    scales = y**-0.5
    return ScaleMixture(scales, weights, lost, float(np.max(scales[:-1] / scales[1:] - 1.0)))


@functools.lru_cache(maxsize=64)
def _randomized_scale_mixture(
    clipping: RandomizedClipping, tail_mass: float, bins: int
) -> ScaleMixture:
    lowest = envelope_quantile(clipping, tail_mass)
    highest = envelope_upper_end(clipping)
    edges = _edges_for_small_rounding(lambda y: envelope_cdf(clipping, y), lowest, highest, bins)
    # Bins are [edge, next edge), so that the jump of either envelope at 1 counts as lying at 1
    # itself. Both are continuous from the left, with the value of chi2(k)/k at 1; the mass from the
    # last edge on sits at that edge.
    below = distribution_bound if clipping.envelope == "hutch++" else _one_term
    cdf = np.where(edges <= 1.0, below(clipping.sketch_dim, edges), envelope_cdf(clipping, edges))
    weights = np.append(np.diff(cdf), 1.0 - cdf[-1])
    scales = edges**-0.5
    keep = weights > 0
    widest = float(np.max(scales[:-1] / scales[1:] - 1.0)) if edges.size > 1 else 0.0
    return ScaleMixture(scales[keep], weights[keep], float(cdf[0]), widest)


def _one_term(sketch_dim: int, y: Array) -> Array:
    return mean_chi2_cdf(y, sketch_dim)


def _edges_for_small_rounding(
    cdf: Callable[[Array], Array], lowest: float, highest: float, bins: int
) -> Array:
    """Edges whose widths go like density^(-1/2) in log y, which minimises the sum of mass times
    width.
    """
    log_y = np.linspace(np.log(lowest), np.log(highest), 4097)
    mass = np.maximum(np.diff(cdf(np.exp(log_y))), 0.0)
    # Half of the bins follow the density, half are spread evenly over the tail: for few projections
    # and small deltas it is the tail that decides.
    importance = np.sqrt(mass)
    importance = importance / importance.sum() + 1.0 / importance.size
    position = np.concatenate([[0.0], np.cumsum(importance)])
    edges = np.exp(np.interp(np.linspace(0.0, position[-1], bins + 1), position, log_y))
    edges[0], edges[-1] = lowest, highest
    return np.unique(np.append(edges, 1.0))
