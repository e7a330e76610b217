"""Powers of many contractions at once: what noise of one step does later, and few nodes that stand
for many.

Symbols: x a node (1 minus learning rate times eigenvalue), mu its weight, T steps, n nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal

Floats = NDArray[np.float64]

DROPPED = (
    1e-15  # relative to the largest: what a factor leaves out is below the rounding of the rest
)


def mean_over_horizons(nodes: Floats, weights: Floats, steps: int) -> Floats:
    """[T, T] (1/T) sum over t of sum_i mu_i x_i^(2t - 2 - j - l), t > max(j, l): a geometric sum,
    Toeplitz minus Hankel, O(T n + T^2).
    """
    x = np.clip(
        nodes, -1 + 1e-7, 1 - 1e-12
    )  # at -1 the quotient below is 0 / 0; its limit is reached to 1e-7 T
    share = weights / (1 - x**2) / steps
    lags = np.arange(2 * steps + 1)
    sequence = np.array([float(share @ x**lag) for lag in lags])
    j = np.arange(steps)
    out = sequence[np.abs(j[:, None] - j[None, :])] - sequence[2 * steps - j[:, None] - j[None, :]]
    return np.asarray(out, dtype=np.float64)


def gauss_rule(nodes: Floats, weights: Floats, count: int) -> tuple[Floats, Floats]:
    """The ``count``-node Gauss quadrature of a discrete measure, by Lanczos with full
    reorthogonalisation (Golub and Meurant 2010, section 4).
    """
    basis = np.zeros((count, len(nodes)))
    total = weights.sum()
    basis[0] = np.sqrt(weights / total)
    diagonal, off = [], []
    for k in range(count):
        next_one = nodes * basis[k]
        diagonal.append(float(next_one @ basis[k]))
        for _ in range(2):
            next_one -= basis[: k + 1].T @ (basis[: k + 1] @ next_one)
        size = float(np.linalg.norm(next_one))
        if k + 1 == count or size < 1e-14:
            break
        off.append(size)
        basis[k + 1] = next_one / size
    found, vectors = eigh_tridiagonal(np.array(diagonal), np.array(off))
    return found, total * vectors[0] ** 2


def powers(nodes: Floats, weights: Floats, steps: int) -> Floats:
    """[T, n] sqrt(mu) x^k: what a step's noise does k steps later."""
    return nodes[None, :] ** np.arange(steps)[:, None] * np.sqrt(weights)


def truncated(factor: Floats) -> Floats:
    """F with the directions below rounding left out: W of smooth powers has a
    rank of a few dozens.
    """
    u, s, _ = np.linalg.svd(factor, full_matrices=False)
    kept = s**2 > DROPPED * s[0] ** 2
    return u[:, kept] * s[kept]
