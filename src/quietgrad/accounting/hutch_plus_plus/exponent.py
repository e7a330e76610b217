"""B(theta) with E exp(-theta (R - 1)) <= exp(B(theta)) for every gradient whose sketched parameters
are measured by Hutch++ with k columns or more (docs/hutchpp_envelope/moments.md, theorem 1).

A function phi_j on [0, 1], convex, increasing and 0 at 0, bounds log E exp(-theta (R - 1)), given
what the last j columns of the range sketch leave, by its sum over eigenvalues. It is held by the
slopes of its chords on a grid, the same for all theta; one column takes pi (1 - exp(-phi)) off it.

Enclosure: every choice that is made (grid, scale s, tilt) gives a valid bound. Rounding is directed
by explicit allowances, each above what IEEE double precision can do to the operations it stands for
(u = 2^-53): sums of n non-negative terms err by n u, and so on. Of scipy's ``erfcx`` a relative
error of 1e-12 is allowed for (it states 1e-13; a test compares it with quadrature). There is no
quadrature here.
Symbols: theta, k, l eigenvalue, c = (1 - l + ridge) / l, s scale of one column's tangent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from quietgrad.events import HIDDEN_SHARE

Array = NDArray[np.float64]

TILTS = (3e-3, 1e-2, 3e-2)  # t of the proof: any is valid, the best is taken for each theta

NODES = 1000
GRADING = 1.5  # nodes are finer near 0; a grid whose spacing jumps makes chords too steep
THETAS = 44
SMALLEST_THETA, LARGEST_THETA = 0.03, 20.0  # times k
SCALES = 1.0 + np.geomspace(2e-3, 6.0, 17)

U = 2.0**-53
ERFCX_ERROR = 1e-12


@dataclass(frozen=True)
class Exponents:
    """[m] each: E exp(-thetas[i] (R - 1)) <= exp(bounds[i])."""

    thetas: Array
    bounds: Array


@functools.lru_cache(maxsize=16)
def exponents(sketch_dim: int) -> Exponents:
    """For k = ``sketch_dim``. Cost: k (some milliseconds) the first time."""
    k = sketch_dim
    thetas = np.geomspace(SMALLEST_THETA * k, LARGEST_THETA * k, THETAS)
    bounds = np.full(THETAS, np.inf)
    for tilt in TILTS:
        grid = Grid.of(HIDDEN_SHARE**2 / tilt * (1 + 8 * U))
        tilted = thetas * (1 + tilt) * (1 + 8 * U)
        tried = np.array([bounded_exponent(tilted, k, np.full(THETAS, s), grid) for s in SCALES])
        bounds = np.minimum(bounds, tried.min(axis=0))
        around = SCALES[tried.argmin(axis=0)] - 1.0
        for nearer in (0.7, 0.85, 1.2, 1.4):
            s = 1.0 + around * nearer
            bounds = np.minimum(bounds, bounded_exponent(tilted, k, s, grid))
    return Exponents(thetas, bounds)


@dataclass(frozen=True)
class Grid:
    """Nodes on [0, 1], [n + 1], from 0 to 1; ``shares``: lower bounds of pi there."""

    nodes: Array
    shares: Array

    @classmethod
    def of(cls, ridge: float, n: int = NODES) -> Grid:
        nodes = np.linspace(0.0, 1.0, n + 1) ** GRADING
        return cls(nodes, smallest_share(nodes, ridge))


def smallest_share(eigenvalue: Array, ridge: float) -> Array:
    """A lower bound of pi(l) = E[l g^2 / (l g^2 + 1 - l + ridge)], g standard normal, increasing in
    l: 1 - sqrt(pi) x erfcx(x), x = sqrt(c / 2).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        c = (1.0 - eigenvalue + ridge) / eigenvalue * (1 + 8 * U)  # pi falls with c
        x = np.sqrt(c / 2)
        closed = 1.0 - np.sqrt(np.pi) * x * special.erfcx(x) - 2 * ERFCX_ERROR
        # 1/(2 x^2) - 3/(4 x^4), two terms of an enveloping asymptotic series: sharper where x is
        # large and the closed form cancels.
        series = (1 / c) * (1 - 3 / c) * (1 - 16 * U)
    share = np.maximum(np.where(np.isfinite(closed), closed, 0.0), series)
    return np.where(eigenvalue > 0, np.maximum(share, 0.0), 0.0)


def bounded_exponent(thetas: Array, k: int, scales: Array, grid: Grid) -> Array:
    """[m] upper bounds of B(theta) for one constant scale s >= 1 for all columns, each theta with
    its own.
    """
    nodes, widths = grid.nodes, np.diff(grid.nodes)
    n = widths.size
    theta, s = thetas[:, None], scales[:, None]
    # phi_0 at the nodes, rounded up; phi_0 is convex, so chords lie above.
    phi = theta * nodes - k / 2 * np.log1p(2 * theta * nodes / k) + 32 * U * theta * nodes
    slopes = np.diff(phi, axis=1) / widths + 8 * U * phi[:, 1:] / widths
    for _ in range(k):
        # A convex increasing majorant with value 0 at 0, exactly so in its slopes.
        slopes = np.maximum(np.maximum.accumulate(slopes, axis=1), 0.0)
        phi[:, 1:] = np.cumsum(slopes * widths, axis=1)
        taken = -np.expm1(-phi * (1 - (2 * n + 8) * U))
        taken *= s * grid.shares * (1 - 16 * U)  # a lower bound of s pi (1 - exp(-phi))
        # On the cell (i - 1, i) at least what node i - 1 takes is taken: pi and phi increase.
        slopes[:, 1:] -= np.diff(taken[:, :-1], axis=1) / widths[1:]
        slopes[:, 1:] += 8 * U * (np.abs(slopes[:, 1:]) + 2 * taken[:, 1:-1] / widths[1:])
    parts = slopes * widths
    heights = np.cumsum(parts, axis=1) + 4 * n * U * np.cumsum(np.abs(parts), axis=1)
    steepest = np.max(heights / nodes[1:], axis=1)
    price = k * (scales - 1.0 - np.log(scales))
    return np.maximum(steepest, 0.0) * (1 + 16 * U) + price + k * 64 * U * scales
