"""The largest eigenvalues of a symmetric operator, by implicitly restarted Lanczos (ARPACK, through
scipy), each with its residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from quietgrad.checks import require_at_least, require_int, require_positive
from quietgrad.randomness import RandomKey

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TopEigenvalues:
    """The k largest eigenvalues, algebraically.

    Attributes:
        values: [k], descending.
        residuals: [k] norms of H u - mu u for the unit vectors u found; |mu - an eigenvalue| is at
            most that.
        products: number of products with H.
    """

    values: Floats
    residuals: Floats
    products: int


def top_eigenvalues(
    operator: LinearOperator,
    count: int,
    tolerance: float = 1e-5,
    max_restarts: int = 50,
    seed: int = 0,
) -> TopEigenvalues:
    """The ``count`` largest eigenvalues.

    Args:
        operator: symmetric, [p, p], such as ``CurvatureOperator``.
        count: k, below p (a few hundreds to 2000).
        tolerance: relative accuracy asked of every eigenvalue.
        max_restarts: of ARPACK, each of about k products.
        seed: of the start vector.

    Returns:
        Values, residuals and the number of products. Memory: 2 k + 1 vectors of p float64; time
        beside the products: about 8 k^2 p multiplications.

    Raises:
        ValueError: if count is not in 1 .. p - 1.
        RuntimeError: if it has not converged; says how many have, and the remedy.
    """
    size = int(operator.shape[0])
    require_int("count", count)
    require_at_least("count", count, 1, "ask for at least one eigenvalue")
    require_positive("tolerance", tolerance)
    if count >= size:
        raise ValueError(
            f"count={count} is not below the number of parameters, {size}; ask for at most "
            f"{size - 1}"
        )
    products = 0

    def counted(vector: Floats) -> Floats:
        nonlocal products
        products += 1
        return np.asarray(operator.matvec(vector), dtype=np.float64).reshape(-1)

    counting = LinearOperator(operator.shape, matvec=counted, dtype=np.float64)
    start = (
        RandomKey.from_seed(seed).generator("initialisation", 0, "lanczos").standard_normal(size)
    )
    kept = min(size, max(2 * count + 1, 20))
    try:
        values, vectors = eigsh(
            counting, count, which="LA", v0=start, ncv=kept, tol=tolerance, maxiter=max_restarts
        )
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f"{len(error.eigenvalues)} of {count} eigenvalues converged to {tolerance:g} in "
            f"{products} products; ask for fewer, raise tolerance (products in single "
            "precision are good to about 1e-6) or raise max_restarts"
        ) from error
    order = np.argsort(values)[::-1]
    residuals = np.array(
        [np.linalg.norm(counted(vectors[:, i]) - values[i] * vectors[:, i]) for i in order]
    )
    return TopEigenvalues(values[order], residuals, products)
