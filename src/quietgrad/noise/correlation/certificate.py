"""How far a mixing matrix can be from the best one: a lower bound on the convex problem's optimum
from its dual.

Problem: minimise tr(W X^-1) over positive definite b-banded X with unit diagonal. For any tau >= 0
put G = X^-1 W X^-1 and Z = G + tau X^-1. Every Z' that is at least G (as a quadratic form) and zero
in the band off its diagonal is feasible for the dual, whose value 2 tr((F^T Z' F)^(1/2)) - tr Z'
then is at least 2 tr(W X^-1) - tr Z'. With E the part of Z that offends (in the band, off the
diagonal) and r_i = sum_j |E_ij|, Z' = Z - E + D is such a matrix for the diagonal D_i = max(0, r_i
- tau / R_i), R_i = sum_j |X_ij|, since diag(r) >= E and diag(R) >= X; and tr Z' = tr(W X^-1) + tau
T - <E, X> + tr D. So

    tr(W X^-1) - optimum <= tau T + sum_i max(0, r_i - tau / R_i) + |<E, X>|.

Derived here; ``tests/noise/test_mixing.py`` holds it to a conic solver's optimum. Where the best X
is nearly singular (a curvature workload of the last step, without a floor) the bound says little;
the residual of the optimality conditions still tells whether descent has ended: at the optimum G is
zero in the band off its diagonal, and its diagonal holds the multipliers of X's unit diagonal.
"""

from __future__ import annotations

import numpy as np

from quietgrad.noise.correlation.banded import BandedLower, Floats, band_of_product


def optimality_gap(mixing: BandedLower, factor: Floats, chunk: int = 512) -> float:
    """Upper bound on tr(W X^-1) minus its smallest possible value, relative to tr(W X^-1). Cost:
    T^2 b for the band of X^-1, memory T ``chunk``.

    Args:
        mixing: C with unit columns.
        factor: F [T, r], W = F F^T.
        chunk: columns of the identity solved for at a time.
    """
    steps, bands = mixing.columns.shape
    left = mixing.solve_transposed(factor)
    objective = float(np.vdot(left, left))
    q = mixing.solve(left)
    g = band_of_product(q, q, bands)
    inverse = np.zeros_like(g)
    for start in range(0, steps, chunk):
        identity = np.zeros((steps, min(chunk, steps - start)))
        identity[np.arange(start, start + identity.shape[1]), np.arange(identity.shape[1])] = 1.0
        part = mixing.solve(identity)
        inverse += band_of_product(part, part, bands)
    x = mixing.gram_band()
    x_rows = _row_sums(np.abs(x))
    best = np.inf
    for tau in objective / steps * 10.0 ** np.arange(-10, 1.1, 0.25):
        offending = g + tau * inverse
        offending[:, 0] = 0.0
        shift = np.maximum(_row_sums(np.abs(offending)) - tau / x_rows, 0.0).sum()
        best = min(best, tau * steps + float(shift) + 2 * abs(float((offending * x).sum())))
    return min(best / objective, 1.0)  # no optimum is below zero


def kkt_residual(mixing: BandedLower, factor: Floats) -> float:
    """Largest |G_ij| / sqrt(G_ii G_jj) in the band off the diagonal: 0 at the optimum, at most 1.
    Not changed by scaling steps or workload. Cost: T b r.

    Args:
        mixing: C with unit columns.
        factor: F [T, r], W = F F^T.
    """
    q = mixing.solve(mixing.solve_transposed(factor))
    g = band_of_product(q, q, mixing.columns.shape[1])
    size = np.sqrt(np.maximum(g[:, 0], np.finfo(np.float64).tiny))
    steps, bands = g.shape
    return max(
        (
            float((np.abs(g[: steps - m, m]) / (size[: steps - m] * size[m:])).max())
            for m in range(1, bands)
        ),
        default=0.0,
    )


def _row_sums(band: Floats) -> Floats:
    steps, bands = band.shape
    rows = band[:, 0].copy()
    for m in range(1, bands):
        rows[: steps - m] += band[: steps - m, m]
        rows[m:] += band[: steps - m, m]
    return rows
