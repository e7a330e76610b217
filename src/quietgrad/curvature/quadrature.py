"""Stochastic Lanczos quadrature: how many eigenvalues are positive, and what they sum to (Ubaru,
Chen and Saad 2017).

Symbols: p size, m Lanczos steps, s random probes; f(H) has the trace p E[u^T f(H) u] over unit
probes u, and u^T f(H) u is close to sum_k tau_k^2 f(theta_k) with the Ritz values theta_k and first
components tau_k of m steps from u.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import LinearOperator

from quietgrad.checks import require_at_least, require_int
from quietgrad.randomness import RandomKey

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PositivePart:
    """Estimates over the probes, each a mean and its standard error.

    Attributes:
        count, count_error: eigenvalues above ``threshold``.
        mass, mass_error: sum of the positive eigenvalues.
        negative_mass: sum of the negative ones (below 0).
        threshold: what counts as positive in ``count``: the resolution of m steps, so that
            eigenvalues at zero do not count.
    """

    count: float
    count_error: float
    mass: float
    mass_error: float
    negative_mass: float
    threshold: float


def positive_part(
    operator: LinearOperator,
    probes: int = 8,
    steps: int = 80,
    threshold: float | None = None,
    seed: int = 0,
) -> PositivePart:
    """Count and mass of the positive eigenvalues of a symmetric operator.

    Args:
        operator: [p, p].
        probes: s; errors fall as 1 / sqrt(s).
        steps: m, products a probe; what is finer than about (largest - smallest) / m^2 is not
            resolved.
        threshold: smallest eigenvalue that counts (None: that resolution).
        seed: of the probes.

    Cost: s m products, s m^2 p multiplications, m vectors of memory.

    Raises:
        ValueError, TypeError: for numbers out of range.
    """
    for name, value, least in (("probes", probes, 2), ("steps", steps, 2)):
        require_int(name, value)
        require_at_least(name, value, least, f"use at least {least}")
    size = int(operator.shape[0])
    generator = RandomKey.from_seed(seed).generator("initialisation", 0, "quadrature")
    rules = [
        _rule(operator, generator.choice([-1.0, 1.0], size=size), min(steps, size))
        for _ in range(probes)
    ]
    if threshold is None:
        spread = max(nodes.max() for nodes, _ in rules) - min(nodes.min() for nodes, _ in rules)
        threshold = float(spread) / steps**2
    counts = np.array([size * float(weights[nodes > threshold].sum()) for nodes, weights in rules])
    masses = np.array(
        [size * float((weights * np.maximum(nodes, 0)).sum()) for nodes, weights in rules]
    )
    negative = np.array(
        [size * float((weights * np.minimum(nodes, 0)).sum()) for nodes, weights in rules]
    )
    error = np.sqrt(probes)
    return PositivePart(
        float(counts.mean()),
        float(counts.std(ddof=1) / error),
        float(masses.mean()),
        float(masses.std(ddof=1) / error),
        float(negative.mean()),
        threshold,
    )


def _rule(operator: LinearOperator, probe: Floats, steps: int) -> tuple[Floats, Floats]:
    """Nodes and weights of one probe's Gauss quadrature, with full reorthogonalisation."""
    basis = np.zeros((steps, len(probe)))
    basis[0] = probe / np.linalg.norm(probe)
    diagonal, off = [], []
    for k in range(steps):
        moved = np.asarray(operator.matvec(basis[k]), dtype=np.float64).reshape(-1)
        diagonal.append(float(moved @ basis[k]))
        for _ in range(2):
            moved -= basis[: k + 1].T @ (basis[: k + 1] @ moved)
        size = float(np.linalg.norm(moved))
        if k + 1 == steps or size < 1e-10 * max(1.0, abs(diagonal[0])):
            break
        off.append(size)
        basis[k + 1] = moved / size
    nodes, vectors = eigh_tridiagonal(np.array(diagonal), np.array(off))
    return nodes, vectors[0] ** 2
