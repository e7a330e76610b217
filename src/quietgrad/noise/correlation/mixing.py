"""The mixing matrix of correlated noise: banded, unit columns, as good as it can be shown to be for
a workload.

Symbols: T steps, b bands, C_mix lower triangular, X = C_mix^T C_mix with unit diagonal, W the
workload.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from quietgrad.checks import require_at_least, require_int, require_positive, require_word
from quietgrad.noise.correlation import solver
from quietgrad.noise.correlation.banded import BandedLower, Floats
from quietgrad.noise.correlation.certificate import kkt_residual, optimality_gap
from quietgrad.noise.correlation.curvature import Curvature, Response
from quietgrad.noise.correlation.quadratic_form import Workload
from quietgrad.noise.correlation.workloads import PrefixSums, as_workload

Family = Literal["auto", "banded", "toeplitz"]
FAMILIES: tuple[Family, ...] = get_args(Family)
LARGEST_BANDED = 4096  # steps up to which "auto" takes the whole banded family
TOLERANCE = 1e-7
SECONDS = 40.0


@dataclass(frozen=True)
class MixingMatrix:
    """C_mix with what is known of it.

    Attributes:
        banded: its columns.
        objective: tr(W X^-1).
        independent: the same for independent noise, tr(W).
        relative_gap: proven upper bound on (objective - smallest possible objective) / objective
            over all banded matrices; None where it was not computed (Toeplitz family).
        family: "banded" or "toeplitz".
        workload: what W is, in words.
        kkt_residual: how far the optimality conditions are from being met, from 0 to 1
            (``quietgrad.noise.correlation.certificate``); None for the Toeplitz family.
    """

    banded: BandedLower
    objective: float
    independent: float
    relative_gap: float | None
    family: str
    workload: str
    kkt_residual: float | None = None

    @property
    def steps(self) -> int:
        return self.banded.steps

    @property
    def bands(self) -> int:
        return self.banded.bands

    @property
    def matrix(self) -> NDArray[np.float64]:
        """C_mix, [T, T] float64, lower triangular. Memory grows as T^2; ``banded`` holds the same
        in T b.
        """
        return self.banded.dense()


def save_mixing(mixing: MixingMatrix, path: str | Path) -> None:
    """Writes the matrix and what is known of it to one .npz file, whole or not at all. Public."""
    known = {f.name: getattr(mixing, f.name) for f in fields(mixing) if f.name != "banded"}
    temporary = Path(path).with_suffix(".tmp.npz")
    np.savez_compressed(temporary, columns=mixing.banded.columns, known=json.dumps(known))
    os.replace(temporary, path)


def load_mixing(path: str | Path) -> MixingMatrix:
    """Reads what ``save_mixing`` wrote, bit by bit.

    Raises:
        ValueError: if there is no such file, or it is not one.
    """
    try:
        with Path(path).open("rb") as opened, np.load(opened) as held:
            return MixingMatrix(BandedLower(held["columns"]), **json.loads(str(held["known"])))
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise ValueError(f"mixing={str(path)!r} is no mixing matrix: {error}") from error


def mixing_matrix(
    workload: Workload | NDArray[np.float64],
    bands: int,
    family: str = "auto",
    max_seconds: float = SECONDS,
) -> MixingMatrix:
    """Minimises tr(W X^-1) over b-banded X = C_mix^T C_mix with unit diagonal (NoiseCurve, problem
    P1).

    Args:
        workload: W, [T, T] symmetric positive semi-definite, or ``PrefixSums``, ``Curvature``.
        bands: b, at most T; 1 is independent noise.
        family: "banded" (every banded matrix), "toeplitz" (columns alike: b numbers, for many
            steps), or "auto": banded up to 4096 steps.
        max_seconds: after so much time of descent the best matrix so far is taken; ``relative_gap``
            says what that may cost.

    Returns:
        The matrix, never worse than independent noise. Cost a step of descent: T b r for a workload
        of rank r (T for prefix sums, a few dozens for curvature); small problems are solved by
        Newton's method instead. Toeplitz prefix sums: T b. Memory T (b + r).

    Raises:
        ValueError, TypeError: a workload that is not square, symmetric, finite and positive
            semi-definite; bands outside 1 .. T; an unknown family.
    """
    load = as_workload(workload)
    require_int("bands", bands)
    require_at_least("bands", bands, 1, "1 means independent noise")
    if bands > load.steps:
        raise ValueError(
            f"bands={bands} exceeds steps={load.steps}; use at most as many bands as steps"
        )
    require_word("family", family, FAMILIES)
    require_positive("max_seconds", max_seconds)
    if family == "auto":
        family = "banded" if load.steps <= LARGEST_BANDED else "toeplitz"
    deadline = time.monotonic() + max_seconds
    if family == "toeplitz":
        return _toeplitz(load, bands, deadline)
    return _banded(load, bands, deadline)


def solved_without_a_factor(load: Workload, family: str) -> bool:
    """Whether the Toeplitz family is found from responses to single steps, so that nothing of size
    T^2 is formed. Prefix sums count as such in any family: their factor is cheap.
    """
    if isinstance(load, PrefixSums):
        return True
    toeplitz = family == "toeplitz" or (family == "auto" and load.steps > LARGEST_BANDED)
    return toeplitz and isinstance(load, Curvature) and load.horizon != "final"


def _banded(load: Workload, bands: int, deadline: float) -> MixingMatrix:
    factor, steps = load.factor(), load.steps
    identity = solver.unit_columns(np.tile(np.eye(1, bands)[0], (steps, 1)))
    independent = float(np.vdot(factor, factor))
    if bands == 1:
        return MixingMatrix(
            BandedLower(identity), independent, independent, 0.0, "banded", load.name, 0.0
        )
    columns = _best_toeplitz(factor, bands, deadline)
    unknowns = (bands - 1) * steps - bands * (bands - 1) // 2
    if unknowns <= solver.NEWTON_UNKNOWNS:
        columns = solver.newton(columns, factor, TOLERANCE)
    else:
        columns = solver.descend(columns, factor, deadline, TOLERANCE)
    found = BandedLower(columns)
    value = solver.objective(columns, factor)
    if not value <= independent:
        found, value = BandedLower(identity), independent
    gap, residual = optimality_gap(found, factor), kkt_residual(found, factor)
    return MixingMatrix(found, value, independent, gap, "banded", load.name, residual)


def _toeplitz(load: Workload, bands: int, deadline: float) -> MixingMatrix:
    if isinstance(load, PrefixSums):
        if load.learning_rates is not None:
            raise ValueError(
                "family='toeplitz' treats all steps alike, which a schedule of learning rates does "
                "not; use family='banded' (cost T^2 b), or a constant rate"
            )
        responses = [Response(load.impulse()[:, None], np.ones(load.steps))]
    elif isinstance(load, Curvature) and solved_without_a_factor(load, "toeplitz"):
        responses = load.responses()
    else:
        factor = load.factor()
        independent = float(np.vdot(factor, factor))
        columns = _best_toeplitz(factor, bands, deadline)
        value = solver.objective(columns, factor)
        return MixingMatrix(BandedLower(columns), value, independent, None, "toeplitz", load.name)

    def evaluate(coefficients: Floats) -> solver.Evaluation:
        return _surrogate(coefficients, responses)

    independent = sum(response.independent() for response in responses)
    candidates = [
        np.eye(1, bands)[0],
        solver.descend_toeplitz(_square_root(bands), evaluate, deadline),
    ]
    values = [sum(toeplitz_objective(c, response) for response in responses) for c in candidates]
    best = int(np.argmin(values))
    columns = solver.unit_columns(np.tile(candidates[best], (load.steps, 1)))
    return MixingMatrix(
        BandedLower(columns), values[best], independent, None, "toeplitz", load.name
    )


def _best_toeplitz(factor: Floats, bands: int, deadline: float) -> Floats:
    """[T, b] unit columns from b coefficients, by descent from independent noise or the square
    root, whichever is better; so never worse than either.
    """
    steps = factor.shape[0]

    def columns_from(coefficients: Floats) -> Floats:
        return solver.unit_columns(np.tile(coefficients, (steps, 1)))

    def evaluate(coefficients: Floats) -> solver.Evaluation:
        columns = columns_from(coefficients)
        value, slope = solver.gradient(columns, factor)
        return value, (slope * columns[:, :1] / coefficients[0]).sum(axis=0)

    starts = [np.eye(1, bands)[0], _square_root(bands)]
    best = min(starts, key=lambda c: solver.objective(columns_from(c), factor))
    return columns_from(solver.descend_toeplitz(best, evaluate, deadline))


def _square_root(bands: int) -> Floats:
    """[b] coefficients of (1 - x)^(-1/2): near the optimum for prefix sums (Fichtenberger,
    Henzinger and Upadhyay 2023).
    """
    ratios = np.arange(1, 2 * bands - 2, 2) / np.arange(2, 2 * bands - 1, 2)
    return np.concatenate([[1.0], np.cumprod(ratios)])


def _surrogate(coefficients: Floats, responses: Sequence[Response]) -> solver.Evaluation:
    """log of n^2 times the responses to K, and its gradient: all columns counted as if none was cut
    at the last step (there are b - 1 such). K inverse of the Toeplitz matrix, n a column's norm.

    Cost T b r. d(1 / c(x)) / d c_m = - x^m / c(x)^2.
    """
    bands = len(coefficients)
    n2 = float((coefficients**2).sum())
    value, slope = 0.0, np.zeros(bands)
    with np.errstate(all="ignore"):
        for response in responses:
            steps = len(response.lagged)
            sums = lfilter(
                [1.0], coefficients, response.lagged, axis=0
            )  # first column of the response to K
            slopes = lfilter([1.0], coefficients, sums, axis=0)
            weighted = response.lag_weights()[:, None] * sums
            value += float((weighted * sums).sum())
            slope += [-2 * float(np.vdot(weighted[m:], slopes[: steps - m])) for m in range(bands)]
    if not (np.isfinite(value) and np.isfinite(slope).all()):
        return solver.TOO_BAD, np.zeros_like(coefficients)
    return float(np.log(n2 * value)), slope / value + 2 * coefficients / n2


def toeplitz_objective(coefficients: Floats, response: Response) -> float:
    """The response to N K with the norms N of all columns, the cut ones too: only the last b - 1
    rows differ from n K. Cost T b^2 r.
    """
    steps, bands = len(response.lagged), len(coefficients)
    unit = np.zeros(steps)
    unit[0] = 1.0
    inverse = lfilter([1.0], coefficients, unit)
    sums = lfilter([1.0], coefficients, response.lagged, axis=0)
    lengths = np.minimum(bands, steps - np.arange(steps))
    norms = np.sqrt(np.cumsum(coefficients**2))[lengths - 1]
    first_cut = max(0, steps - bands + 1)
    whole = norms[0]
    uncut = np.cumsum(response.steps[:first_cut][::-1])[::-1]  # by lag
    total = whole**2 * float(uncut @ (sums[:first_cut] ** 2).sum(axis=1))
    for t in range(first_cut, steps):
        row = whole * sums[: t + 1]  # by lag t - j
        for s in range(first_cut, t + 1):
            row[t - s :] += (norms[s] - whole) * inverse[: s + 1, None] * response.lagged[t - s]
        total += float(response.steps[t] * (row**2).sum())
    return total
