"""What a workload is: what the noise of all steps does to the result, as a quadratic form
tr(W X^-1) that the mixing matrix minimises.

Symbols: T steps, W = F F^T [T, T] the workload, F [T, r] its factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quietgrad.checks import require_at_least, require_int
from quietgrad.noise.correlation.powers import DROPPED

Floats = NDArray[np.float64]

INDEFINITENESS = 1e-9


class Workload(Protocol):
    """A quadratic form over the steps."""

    @property
    def steps(self) -> int: ...

    @property
    def name(self) -> str: ...

    def factor(self) -> Floats:
        """F [T, r] with W = F F^T up to rounding."""
        ...


@dataclass(frozen=True)
class DenseWorkload:
    """Any symmetric positive semi-definite W, [T, T]."""

    matrix: Floats

    @property
    def steps(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def name(self) -> str:
        return "given matrix"

    def factor(self) -> Floats:
        """By Cholesky where that works, else by eigenvalues, dropping those below rounding. Cost
        T^3.
        """
        try:
            return np.asarray(np.linalg.cholesky(self.matrix), dtype=np.float64)
        except np.linalg.LinAlgError:
            values, vectors = np.linalg.eigh(self.matrix)
            if values[0] < -INDEFINITENESS * values[-1]:
                raise ValueError(
                    f"workload is indefinite: its smallest eigenvalue is {values[0]:.3g}, its "
                    f"largest {values[-1]:.3g}; a workload is a sum of squares "
                    "(set negative curvature to zero before building it)"
                ) from None
            kept = values > DROPPED * values[-1]
            return vectors[:, kept] * np.sqrt(values[kept])


@dataclass(frozen=True, eq=False)
class Factored:
    """A workload whose factor is at hand: found once for several matrices.

    Attributes:
        matrix: F [T, r].
        name: of the workload that it is of.
    """

    matrix: Floats
    name: str

    @property
    def steps(self) -> int:
        return int(self.matrix.shape[0])

    def factor(self) -> Floats:
        return self.matrix


def require_steps(steps: int) -> None:
    require_int("steps", steps)
    require_at_least("steps", steps, 1, "a run has at least one step")
