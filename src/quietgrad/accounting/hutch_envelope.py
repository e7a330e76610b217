"""Envelope of R when every trainable parameter is sketched by Hutch: R = sum_j lambda_j
chi2_j(k)/k, sum_j lambda_j = 1, D terms.

    x <= 1             F_e(x), all weight on one term: chi2(k)/k
    1 < x < x_plus     F_u(x_plus): a distribution function grows with x, so the supremum at x is at
                       most the one at x_plus
    x >= x_plus        F_u(x), weight spread evenly: chi2(kD)/(kD)

x_plus is the largest x at which some spectrum lambda still lies above the even one. The supremum is
reached by spectra with at most two different values, i of one and j of the other (DP-SGD-RC,
Proposition 5.2, after Szekely and Bakirov), and each crosses the even spectrum once (Theorem B.7),
so x_plus is the largest of their crossings. They are found for all pairs on a logarithmic grid at
once, and the distance to 1 is doubled for what lies between grid points: the middle region is so
narrow that this costs nothing (docs/errata.md, E13, shows that the paper's x_plus = 1 + 2/(kD) is
too small for large D, where x_plus - 1 is about 0.87 / (k sqrt(D))).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

SLACK = 1e-7  # added to the envelope above 1
NODES = 40
# Covers what lies between grid points and the quadrature's error, which reaches 7e-4 at k = 2 and
# 1e-7 at k = 32. With a margin of 1 the adversarial tests find violations; with 2 they find none.
MARGIN = 2.0


@dataclass(frozen=True)
class HutchEnvelope:
    """The three-part envelope.

    Attributes:
        sketch_dim: k.
        total_rank: D.
        x_plus: start of the third part, in [1, 2].
        upper_end: y at which discretisation may stop; less than 1e-4 of the mass lies above.
    """

    sketch_dim: int
    total_rank: int
    x_plus: float
    upper_end: float

    def cdf(self, x: Array) -> Array:
        """F_Y at x (any shape)."""
        k, d = self.sketch_dim, self.total_rank
        concentrated = mean_chi2_cdf(x, k)
        spread = np.minimum(1.0, mean_chi2_cdf(np.maximum(x, self.x_plus), k * d) + SLACK)
        return np.where(x <= 1.0, concentrated, np.maximum(spread, concentrated if d == 1 else 0.0))


@functools.lru_cache(maxsize=32)
def hutch_envelope(sketch_dim: int, total_rank: int) -> HutchEnvelope:
    """The envelope for k = ``sketch_dim`` and D = ``total_rank``. Cost: about
    a second, whatever D.
    """
    k, d = sketch_dim, total_rank
    x_plus = 1.0 if d == 1 else min(2.0, 1.0 + MARGIN * (largest_crossing(k, d) - 1.0))
    degrees = float(k) * d
    upper_end = float(special.gammaincinv(degrees / 2, 1 - 1e-4) * 2 / degrees)
    return HutchEnvelope(k, d, x_plus, max(upper_end, x_plus))


def largest_crossing(k: int, d: int) -> float:
    """Largest x in [1, 2] at which a two-valued spectrum of at most ``d`` terms lies above the even
    one, over a logarithmic grid.
    """
    i, j, share = _two_valued_spectra(d)
    low = np.full(i.shape, np.log(1e-9))
    high = np.zeros(i.shape)
    for _ in range(30):
        middle = (low + high) / 2
        x = 1.0 + np.exp(middle)
        above = two_valued_cdf(x, i, j, share, k) > mean_chi2_cdf(x, float(k) * d) + SLACK
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return 1.0 + float(np.exp(np.max(high)))


def two_valued_cdf(x: Array, i: Array, j: Array, share: Array, k: int) -> Array:
    """P(share * chi2(ik)/(ik) + (1 - share) * chi2(jk)/(jk) <= x), elementwise; j = 0 means all of
    it on the first part.

    Quadrature over the part of smaller spread, at its quantiles, so that the integrand is smooth.
    """
    one = np.asarray(j) == 0
    shape_a = np.asarray(i) * k / 2.0
    shape_b = np.where(one, 1.0, np.asarray(j)) * k / 2.0
    weight_a = np.where(one, 1.0, share)
    weight_b = np.where(one, 0.0, 1.0 - np.asarray(share))
    # Outer: the smaller standard deviation, weight / sqrt(shape).
    swap = (weight_a / np.sqrt(shape_a) < weight_b / np.sqrt(shape_b)) & ~one
    inner_shape, outer_shape = np.where(swap, shape_b, shape_a), np.where(swap, shape_a, shape_b)
    inner_weight, outer_weight = (
        np.where(swap, weight_b, weight_a),
        np.where(swap, weight_a, weight_b),
    )
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    # Substituting u = (3 s^2 - 2 s^3) concentrates nodes in both tails of the outer part.
    s = (nodes + 1) / 2
    u, jacobian = 3 * s**2 - 2 * s**3, 3 * s * (1 - s)
    total = np.zeros(np.broadcast(x, inner_shape).shape)
    for probability, weight in zip(u, weights * jacobian, strict=True):
        outer = special.gammaincinv(outer_shape, probability) / outer_shape * outer_weight
        argument = np.maximum(x - outer, 0.0) / inner_weight
        total = total + weight * special.gammainc(inner_shape, inner_shape * argument)
    return np.asarray(total)


def _two_valued_spectra(d: int) -> tuple[Array, Array, Array]:
    """Grid of (i, j, share): i terms share ``share`` of the weight equally, j terms the rest; i + j
    is d or fewer.
    """
    counts = np.unique(np.round(np.geomspace(1, d, 14)).astype(int))
    spectra = [(float(n), 0.0, 1.0) for n in counts if n < d]
    for n in np.unique([d, max(2, d // 2), *counts[counts >= 2]]):
        for i in counts[counts < n]:
            even = i / n
            # Shares above the even one, from just above it to nearly all: on the scale at which the
            # spread changes.
            for odds in np.geomspace(1.5, 1e3 * max(1.0, n / i), 16):
                share = even * odds / (1 - even + even * odds)
                spectra.append((float(i), float(n - i), share))
    grid = np.array(spectra)
    return grid[:, 0], grid[:, 1], grid[:, 2]


def mean_chi2_cdf(x: Array, degrees: float) -> Array:
    """Distribution function of chi2(degrees)/degrees at x."""
    return np.asarray(special.gammainc(degrees / 2, degrees * np.maximum(x, 0.0) / 2))
