"""B(theta) with E exp(-theta (R - 1)) <= exp(B(theta)) for every gradient whose sketched parameters
are measured by Hutch++ with k columns or more (docs/hutchpp_envelope/moments.md, theorem 1).

A function phi_j on [0, 1], convex, increasing and 0 at 0, bounds log E exp(-theta (R - 1)), given
what the last j columns of the range sketch leave, by its sum over eigenvalues. It is held by the
slopes of its chords on a grid, the same for all theta; every column takes of it what ``columns``
says.

Enclosure: every choice that is made (grid, tilt, thetas) gives a valid bound. Rounding is directed
by explicit allowances, each above what IEEE double precision can do to the operations it stands for
(u = 2^-53): sums of n non-negative terms err by n u, and so on.
Symbols: theta, k, l eigenvalue, t tilt.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.accounting.hutch_plus_plus.columns import Grid, U
from quietgrad.events import HIDDEN_SHARE

Array = NDArray[np.float64]

THETAS = 56
SMALLEST_THETA, LARGEST_THETA = 0.03, 1000.0  # times k
# t of lemma 4: any is valid for any theta. A small one for large theta, which it multiplies; below
# the first bound on theta / k the first is taken, and so on.
TILTS = ((12.0, 1e-2), (120.0, 3e-3), (np.inf, 1e-3))


@dataclass(frozen=True)
class Exponents:
    """[m] each: E exp(-thetas[i] (R - 1)) <= exp(bounds[i])."""

    thetas: Array
    bounds: Array


@functools.lru_cache(maxsize=16)
def exponents(sketch_dim: int) -> Exponents:
    """For k = ``sketch_dim``. Cost: k (some tens of milliseconds) the first time."""
    k = sketch_dim
    thetas = np.geomspace(SMALLEST_THETA * k, LARGEST_THETA * k, THETAS)
    bounds: list[float] = []
    for limit, tilt in TILTS:
        grid = Grid.of(HIDDEN_SHARE**2 / tilt * (1 + 8 * U))
        for theta in thetas[len(bounds) :][thetas[len(bounds) :] <= limit * k]:
            bounds.append(bounded_exponent(float(theta) * (1 + tilt) * (1 + 8 * U), k, grid))
    return Exponents(thetas, np.array(bounds))


def bounded_exponent(theta: float, k: int, grid: Grid) -> float:
    """An upper bound of B(theta)."""
    nodes, widths = grid.nodes, np.diff(grid.nodes)
    n = widths.size
    # phi_0 at the nodes, rounded up; phi_0 is convex, so chords lie above.
    phi = theta * nodes - k / 2 * np.log1p(2 * theta * nodes / k) + 32 * U * theta * nodes
    slopes = np.diff(phi) / widths + 8 * U * phi[1:] / widths
    for _ in range(k):
        # A convex increasing majorant with value 0 at 0, exactly so in its slopes.
        slopes = np.maximum(np.maximum.accumulate(slopes), 0.0)
        phi[1:] = np.cumsum(slopes * widths)
        taken = grid.least_taken(phi * (1 - (2 * n + 8) * U))
        # On the cell (i - 1, i) at least what node i - 1 takes is taken: shares and phi increase.
        slopes[1:] -= np.diff(taken[:-1]) / widths[1:]
        slopes[1:] += 8 * U * (np.abs(slopes[1:]) + 2 * taken[1:-1] / widths[1:])
    parts = slopes * widths
    heights = np.cumsum(parts) + 4 * n * U * np.cumsum(np.abs(parts))
    steepest = float(np.max(heights / nodes[1:]))
    return max(steepest, 0.0) * (1 + 16 * U) + k * 64 * U
