"""The random scale Z of a record's contribution under randomized clipping, as a discrete
distribution rounded upwards.

Symbols: R ratio of sketched to true squared norm, Y its stochastic lower bound (the envelope), Z =
Y^(-1/2) the scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.accounting.envelope import envelope_cdf, envelope_quantile, envelope_upper_end
from quietgrad.accounting.hutch_envelope import mean_chi2_cdf
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


def scale_mixture(clipping: ClippingClaim, tail_mass: float, bins: int) -> ScaleMixture:
    """Discretises Z upwards: every bin of y takes its smallest y.

    Args:
        clipping: exact clipping gives the point mass at 1.
        tail_mass: probability that may be moved below the smallest y, and so into delta, per step.
        bins: number of bins; the overstatement of the noise multiplier falls like 1/bins.

    Returns:
        The mixture. Sound whatever ``bins`` is: the discrete Z is stochastically larger than the
            true one.
    """
    if isinstance(clipping, ExactClipping):
        return ScaleMixture(np.ones(1), np.ones(1), 0.0, 0.0)
    return _randomized_scale_mixture(clipping, tail_mass, bins)


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
    cdf = np.where(
        edges <= 1.0, mean_chi2_cdf(edges, clipping.sketch_dim), envelope_cdf(clipping, edges)
    )
    weights = np.append(np.diff(cdf), 1.0 - cdf[-1])
    scales = edges**-0.5
    keep = weights > 0
    widest = float(np.max(scales[:-1] / scales[1:] - 1.0)) if edges.size > 1 else 0.0
    return ScaleMixture(scales[keep], weights[keep], float(cdf[0]), widest)


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
