"""The convex problem of the mixing matrix: L-BFGS on a feasible parametrisation, and Newton with a
barrier where it is small.

Symbols: T steps, b bands, W = F F^T, C lower triangular and b-banded with unit columns, X = C^T C,
P = C^-T F, Q = C^-1 P, G = X^-1 W X^-1 = Q Q^T.

Every C with unit columns and positive diagonal is feasible, and X determines C, so a stationary
point in C is one of the convex problem in X: its optimum. The objective is tr(W X^-1) = |P|^2, its
gradient in C the band of -2 P Q^T. L-BFGS sees log |P|^2, whose gradient stays finite where C^-1
explodes, in coordinates scaled by sqrt((P P^T)_ii (X^-1)_jj), the diagonal of the Gauss-Newton
Hessian.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from quietgrad.noise.correlation.banded import (
    BandedLower,
    Floats,
    band_of_product,
    columns_of,
    inside,
    reversed_cholesky,
)

NEWTON_UNKNOWNS = 1000
ROUND = 80  # L-BFGS iterations between two scalings
TOO_BAD = 1e5  # stands for a log-objective that overflowed

Evaluation = tuple[float, Floats]


def unit_columns(columns: Floats) -> Floats:
    """Columns of norm 1, with a positive diagonal, entries outside the matrix zero. Signs change by
    whole rows, which leaves X as it is.
    """
    steps, bands = columns.shape
    kept = columns * inside(steps, bands)
    norms = np.linalg.norm(kept, axis=1, keepdims=True)
    rows = np.minimum(np.arange(steps)[:, None] + np.arange(bands)[None, :], steps - 1)
    return kept / norms * np.where(kept[:, 0] < 0, -1.0, 1.0)[rows]


def objective(columns: Floats, factor: Floats) -> float:
    """tr(W X^-1)."""
    left = BandedLower(columns).solve_transposed(factor)
    return float(np.vdot(left, left))


def gradient(columns: Floats, factor: Floats) -> Evaluation:
    """log tr(W X^-1) and its gradient along unit columns, [T, b]. Cost about 12 T b r
    multiplications.
    """
    mixing = BandedLower(columns)
    with np.errstate(all="ignore"):
        left = mixing.solve_transposed(factor)
        value = float(np.vdot(left, left))
        slope = -2 / value * band_of_product(left, mixing.solve(left), columns.shape[1])
    slope *= inside(*columns.shape)
    if not (np.isfinite(value) and np.isfinite(slope).all()):
        return TOO_BAD, np.zeros_like(columns)
    return float(np.log(value)), slope - columns * (columns * slope).sum(axis=1, keepdims=True)


def descend(columns: Floats, factor: Floats, deadline: float, tolerance: float) -> Floats:
    """L-BFGS from feasible ``columns`` until two rounds differ by less than ``tolerance``
    (relative) or ``time.monotonic()`` passes the deadline. Returns feasible columns.
    """
    mask = inside(*columns.shape)
    best = np.log(objective(columns, factor))
    while time.monotonic() < deadline:
        scale = _scales(columns, factor)

        def evaluate(flat: Floats, scale: Floats = scale) -> Evaluation:
            raw = flat.reshape(mask.shape) / scale * mask
            norms = np.linalg.norm(raw, axis=1, keepdims=True)
            value, slope = gradient(raw / norms, factor)
            return value, (slope / norms / scale).ravel()

        found = _lbfgs(evaluate, (columns * scale).ravel(), deadline)
        candidate = unit_columns(found.reshape(columns.shape) / scale)
        value = np.log(objective(candidate, factor))
        if not value < best:
            break
        columns, gained, best = candidate, best - value, value
        if gained < tolerance:
            break
    return columns


def descend_toeplitz(
    start: Floats, evaluate: Callable[[Floats], Evaluation], deadline: float
) -> Floats:
    """L-BFGS over b - 1 Toeplitz coefficients (the first is 1); ``evaluate`` maps [b] coefficients
    to a log-objective and its gradient [b].
    """

    def free(tail: Floats) -> Evaluation:
        value, slope = evaluate(np.concatenate([[1.0], tail]))
        return value, slope[1:]

    return np.concatenate([[1.0], _lbfgs(free, start[1:], deadline, iterations=500)])


def _lbfgs(
    evaluate: Callable[[Floats], Evaluation],
    start: Floats,
    deadline: float,
    iterations: int = ROUND,
) -> Floats:
    best: list[tuple[float, Floats]] = []

    class OutOfTime(Exception):
        pass

    def watched(x: Floats) -> Evaluation:
        value, slope = evaluate(x)
        if not best or value < best[0][0]:
            best[:] = [(value, x.copy())]
        if time.monotonic() > deadline:
            raise OutOfTime
        return value, slope

    if not start.size:
        return start
    with contextlib.suppress(OutOfTime):
        minimize(
            watched,
            start,
            jac=True,
            method="L-BFGS-B",
            options={
                "maxiter": iterations,
                "maxfun": 2 * iterations,
                "maxcor": 20,
                "ftol": 0,
                "gtol": 0,
            },
        )
    return best[0][1]


def _scales(columns: Floats, factor: Floats, probes: int = 64) -> Floats:
    """[T, b] sqrt of (P P^T)_ii (X^-1)_jj, the latter from random signs: a
    scaling needs no digits.
    """
    steps, bands = columns.shape
    mixing = BandedLower(columns)
    left = mixing.solve_transposed(factor)
    rows = np.einsum("ir,ir->i", left, left)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(steps, probes))
    inverse = (mixing.solve(signs) ** 2).mean(axis=1)
    index = np.minimum(np.arange(steps)[:, None] + np.arange(bands)[None, :], steps - 1)
    scale = np.sqrt(rows[index] * inverse[:, None])
    return np.maximum(scale / scale.max(), 1e-12)


def newton(columns: Floats, factor: Floats, tolerance: float) -> Floats:
    """Path following on tr(W X^-1) - tau log det X over the n off-diagonal entries of X in the
    band; the gap at tau is at most tau T. Cost n^2 memory, n^3 time a step.

    Stops once tau T is below ``tolerance`` times the objective, or where rounding ends the
    progress.
    """
    steps, bands = columns.shape
    workload = factor @ factor.T
    j, m = np.nonzero(inside(steps, bands))
    keep = m > 0
    i, j = (j + m)[keep], j[keep]
    dense = BandedLower(columns).dense()
    x = dense.T @ dense

    def value_at(gram: Floats, tau: float) -> float:
        try:
            lower = cho_factor(gram, lower=True)
        except np.linalg.LinAlgError:
            return np.inf
        return float(
            np.trace(cho_solve(lower, workload)) - 2 * tau * np.log(np.diagonal(lower[0])).sum()
        )

    start = value_at(x, 0.0)
    tau = start / steps
    while len(i) and tau * steps > 0.2 * tolerance * start:
        for _ in range(50):
            inverse = np.linalg.inv(x)
            inverse = (inverse + inverse.T) / 2
            g = inverse @ workload @ inverse
            slope = -2 * (g + tau * inverse)[i, j]
            mixed = g + tau / 2 * inverse
            hessian = np.zeros((len(i), len(i)))
            for a, b in ((i, j), (j, i)):
                for c, d in ((i, j), (j, i)):
                    product = inverse[b[:, None], c[None, :]] * mixed[d[None, :], a[:, None]]
                    hessian += product + product.T
            try:
                step = -cho_solve(cho_factor(hessian, lower=True), slope)
            except np.linalg.LinAlgError:
                return _from_gram(x, bands)
            decrement = float(-slope @ step)
            now, length = value_at(x, tau), 1.0
            while length > 1e-8:
                trial = x.copy()
                trial[i, j] += length * step
                trial[j, i] += length * step
                if value_at(trial, tau) <= now - 0.1 * length * decrement:
                    break
                length /= 2
            else:
                break
            x = trial
            if decrement < 1e-3 * tau:
                break
        tau *= 0.2
    return _from_gram(x, bands)


def _from_gram(gram: Floats, bands: int) -> Floats:
    return unit_columns(columns_of(reversed_cholesky(gram), bands))
