"""Workloads, random banded matrices and the dense objective, for the tests of mixing matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from quietgrad.noise import (
    curvature_workload,
    mixing_matrix,
    prefix_sum_workload,
)
from quietgrad.noise.correlation.banded import (
    BandedLower,
    Floats,
)
from quietgrad.noise.correlation.mixing import MixingMatrix
from quietgrad.noise.correlation.solver import unit_columns

DECAYING = tuple(float(8 / i**1.2) for i in range(1, 201))
RATE = 0.2  # of SGD; 8 * 0.2 < 2: nothing is clamped


def random_definite(steps: int) -> Floats:
    a = np.random.default_rng(0).standard_normal((steps, steps))
    return a @ a.T / steps + 0.1 * np.eye(steps)


WORKLOADS: dict[str, Callable[[int], Floats]] = {
    "prefix sums": prefix_sum_workload,
    "momentum": lambda steps: prefix_sum_workload(steps, 0.9),
    "curvature": lambda steps: curvature_workload(DECAYING, RATE, steps),
    "random definite": random_definite,
}


def factor_of(workload: Floats) -> Floats:
    """F with F F^T = W by eigenvalues: curvature workloads are singular to rounding, which Cholesky
    does not take.
    """
    values, vectors = np.linalg.eigh(workload)
    kept = values > 1e-14 * values[-1]
    return vectors[:, kept] * np.sqrt(values[kept])


def dense_objective(matrix: Floats, workload: Floats) -> float:
    """tr(W X^-1) with nothing of the library; |C^-T F|^2 rather than a trace of X^-1, which squares
    the condition number.
    """
    return float(np.square(np.linalg.solve(matrix.T, factor_of(workload))).sum())


def random_banded(steps: int, bands: int, seed: int) -> BandedLower:
    """Unit columns; the diagonal is kept away from 0 so that dense inverses are accurate."""
    columns = np.random.default_rng(seed).uniform(-1, 1, (steps, bands)) / bands
    columns[:, 0] = np.abs(columns[:, 0]) + 1
    return BandedLower(unit_columns(columns))


@cache
def optimum(steps: int, bands: int, workload: str) -> MixingMatrix:
    """By Newton's method: small sizes only."""
    return mixing_matrix(WORKLOADS[workload](steps), bands)
