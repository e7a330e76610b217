"""Workloads that are ready to use: prefix sums, curvature, or any matrix that is given.

Symbols: T steps, beta momentum, A [T, T] weights of the gradients in the iterates, W = A^T A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from quietgrad.noise.correlation.curvature import Curvature
from quietgrad.noise.correlation.quadratic_form import (
    DenseWorkload,
    Factored,
    Floats,
    Workload,
    require_steps,
)

ASYMMETRY = 1e-9


@dataclass(frozen=True)
class PrefixSums:
    """Squared errors of all iterates, W = A^T A: what banded matrix factorisation minimises
    (Choquette-Choo et al. 2023, "DP-BandMF").

    Attributes:
        steps: T.
        momentum: beta of SGD with momentum; the iterate then holds sums of sums.
        learning_rates: one a step, up to a common factor; None for a constant one.
    """

    steps: int
    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        require_steps(self.steps)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum!r} must be in [0, 1)")
        if self.learning_rates is not None:
            if len(self.learning_rates) != self.steps:
                raise ValueError(
                    f"learning_rates has {len(self.learning_rates)} entries for "
                    f"steps={self.steps}; give one a step"
                )
            if min(self.learning_rates) < 0 or not max(self.learning_rates) > 0:
                raise ValueError(
                    "learning_rates must be at least 0, and one of them positive; drop the steps "
                    "that do nothing"
                )

    @property
    def name(self) -> str:
        extras = [f"momentum {self.momentum:g}"] if self.momentum else []
        extras += ["learning-rate schedule"] if self.learning_rates is not None else []
        return "prefix sums" + (f" ({', '.join(extras)})" if extras else "")

    def impulse(self) -> Floats:
        """[T] first column of A where the learning rate is constant: the weight of a gradient k
        steps later.
        """
        start = np.zeros(self.steps)
        start[0] = 1.0
        return lfilter([1.0], [1.0, -1.0], lfilter([1.0], [1.0, -self.momentum], start))

    def weights(self) -> Floats:
        """A [T, T]: w_0 - w_{t+1} = sum_j A[t, j] g_j."""
        rates = (
            np.ones(self.steps) if self.learning_rates is None else np.asarray(self.learning_rates)
        )
        lag = np.arange(self.steps)[:, None] - np.arange(self.steps)[None, :]
        velocity = np.where(lag >= 0, self.momentum ** np.maximum(lag, 0), 0.0)
        return np.cumsum(rates[:, None] * velocity, axis=0)

    def factor(self) -> Floats:
        return np.ascontiguousarray(self.weights().T)


def prefix_sum_workload(
    steps: int, momentum: float = 0.0, learning_rates: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """W = A^T A of ``PrefixSums``, [T, T] float64; with the defaults W[j, l] = T - max(j, l).

    Args:
        steps: T.
        momentum: beta of SGD with momentum.
        learning_rates: [T], a schedule.

    Raises:
        ValueError, TypeError: for arguments out of range. Memory grows as T^2; beyond a few
            thousand steps pass ``PrefixSums`` itself to ``mixing_matrix``.
    """
    a = PrefixSums(
        steps, momentum, None if learning_rates is None else tuple(map(float, learning_rates))
    ).weights()
    return a.T @ a


def as_workload(workload: object) -> Workload:
    """A workload as it is, or a matrix checked for shape, finiteness and symmetry.

    Raises:
        ValueError: for anything else, naming what is wrong.
    """
    if isinstance(workload, PrefixSums | Curvature | DenseWorkload | Factored):
        return workload
    matrix = np.asarray(workload, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(
            f"workload has the shape {matrix.shape}; it must be square, [steps, steps]"
        )
    if not np.isfinite(matrix).all():
        raise ValueError(
            "workload holds entries that are not finite; check the learning rate and the "
            "eigenvalues"
        )
    scale = np.abs(matrix).max()
    if not scale > 0:
        raise ValueError("workload is zero: nothing depends on the noise")
    if np.abs(matrix - matrix.T).max() > ASYMMETRY * scale:
        raise ValueError("workload is not symmetric; pass W = A^T A, not A")
    return DenseWorkload((matrix + matrix.T) / 2)
