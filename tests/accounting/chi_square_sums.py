"""Distribution functions of R = sum_j weight_j chi2_j(k)/k by numerical inversion of the
characteristic function (Imhof 1961; Davies 1973).
"""

import numpy as np

SPAN = {2: 40.0, 4: 24.0}  # the inversion's period: R exceeds it with probability below 1e-17
MOST_TERMS = 12_288
BLOCK = 512
INVERSION_ERROR = 1e-7


def law_of_ratio(x, weights, k, multiplicities=None, exact_share=0.0):
    """P(R <= x) for x [m]; weights [n] with multiplicities sum to 1; of R, a share is computed
    exactly: the constant 1.

    Davies' formula: 1/2 - sum_n Im(phi(t_n) exp(-i t_n x)) / (pi (n + 1/2)), t_n = (n + 1/2) 2 pi /
    span. What lies a whole span off is folded in.
    """
    weights = np.asarray(weights, dtype=float)
    degrees = k * (
        np.ones_like(weights) if multiplicities is None else np.asarray(multiplicities, dtype=float)
    )
    assert abs(np.dot(weights, degrees) / k - 1) < 1e-9
    wanted = (np.asarray(x, dtype=float) - exact_share) / (1 - exact_share)
    y = wanted[wanted > 0]
    step = 2 * np.pi / SPAN.get(k, 10.0)
    total = np.full(y.shape, 0.5)
    for start in range(0, MOST_TERMS, BLOCK):
        n = np.arange(start, start + BLOCK) + 0.5
        logarithm = -0.5 * np.log1p(np.multiply.outer(n * step, -2j * weights / k)) @ degrees
        terms = np.exp(logarithm[:, None] - 1j * np.multiply.outer(n * step, y)) / (
            np.pi * n[:, None]
        )
        total -= terms.imag.sum(0)
        if logarithm[-1].real - np.log(np.pi * n[-1]) < -32:
            break
    else:
        # Few degrees of freedom: the terms fall like a power, and turn by exp(-i step y) each; the
        # rest is nearly a geometric series.
        turn = np.exp(-1j * step * y)
        total -= (terms[-1] * turn / (1 - turn)).imag
    result = np.zeros(wanted.shape)
    result[wanted > 0] = total
    return result
