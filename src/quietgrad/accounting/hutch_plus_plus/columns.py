"""What one column of the range's sketch takes off a bound, from below
(docs/hutchpp_envelope/moments.md, theorem 1).

Of an eigenvalue l the column takes the share q = l g^2 / (l g^2 + 1 - l + ridge), g standard
normal; of a sum of phi(l) over eigenvalues, in the exponent, at least -log E exp(-phi(l) q) each.
The mean is taken over a grid of shares, with the exact law of g^2, so that E exp(-phi q) is bounded
from above.

Rounding (u = 2^-53) is allowed for: of scipy's ``erf`` an error of 1e-12 of itself (a test compares
it with more digits), of a difference of two values of the law u of one.
Symbols: l eigenvalue, q share, c = (1 - l + ridge) / l.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

NODES = 600  # of eigenvalues
GRADING = 2.0  # nodes are finer near 0; a grid whose spacing jumps makes chords too steep
SMALLEST_SHARE = 1e-7
SHARES = 50  # below one half, in equal ratios; half as many above
PARTS = 32  # of a cell between two shares, for the law's mean on it

U = 2.0**-53
ERF_ERROR = 1e-12


@dataclass(frozen=True)
class Grid:
    """Eigenvalues on [0, 1], and the law of the share that a column takes of each.

    Attributes:
        nodes: [n + 1], from 0 to 1.
        shares: [m], rising from 0 to 1.
        masses: [n + 1, m], weights of the shares: E (1 - exp(-phi q)) is at least their mean of
            1 - exp(-phi share), for every phi >= 0.
    """

    nodes: Array
    shares: Array
    masses: Array

    @classmethod
    def of(cls, ridge: float, n: int = NODES, m: int = SHARES) -> Grid:
        """Cost: n m numbers, and n m ``PARTS`` of the law's values, some at a time."""
        nodes = np.linspace(0.0, 1.0, n + 1) ** GRADING
        rising = np.geomspace(SMALLEST_SHARE, 0.5, m)
        falling = 1.0 - np.geomspace(0.5, 1e-4, max(m // 2, 2))[1:]
        shares = np.concatenate([[0.0], rising, falling, [1.0]])
        return cls(nodes, shares, masses_from_below(nodes, shares, ridge))

    def least_taken(self, phi: Array) -> Array:
        """[n + 1] lower bounds of -log E exp(-phi(l) q) at the nodes, for phi >= 0 there."""
        taken = np.einsum("ij,ij->i", -np.expm1(phi[:, None] * -self.shares), self.masses)
        # Every mass is a sum of ``PARTS`` differences, and each of these errs by u of one.
        taken += 4 * PARTS * self.shares.size * U * np.expm1(-phi)
        return -np.log1p(-np.clip(taken, 0.0, 1.0 - U)) * (1 - 8 * U)


def masses_from_below(nodes: Array, shares: Array, ridge: float) -> Array:
    """[n + 1, m]: q is rounded down to ``PARTS`` places of its cell, by a law that has more of it
    at small shares; then, as 1 - exp(-phi q) is concave in q and so at least its chord, every place
    goes to both ends of its cell in the proportion that keeps its mean.
    """
    masses = np.zeros((nodes.size, shares.size))
    below = np.zeros(nodes.size)
    for i, (left, right) in enumerate(itertools.pairwise(shares.tolist())):
        places = left + (right - left) * np.arange(1, PARTS + 1) / PARTS
        if right == 1.0:  # all that is left, rounded down to the cell's left end
            places = np.ones(1)
        law = law_of_share(nodes[:, None], places, ridge)
        mass = np.maximum(np.diff(law, axis=1, prepend=below[:, None]), 0.0)
        toward_right = mass @ np.linspace(0.0, 1.0, places.size, endpoint=False)
        masses[:, i] += mass.sum(axis=1) - toward_right
        masses[:, i + 1] += toward_right
        below = law[:, -1]
    return masses


def law_of_share(eigenvalue: Array, share: Array, ridge: float) -> Array:
    """An upper bound of P(q <= share): P(g^2 <= c share / (1 - share)), the error function of the
    root of half of that; 1 for a share of 1 and for an eigenvalue of 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        c = (1.0 - eigenvalue + ridge) / eigenvalue
        half = c * share / (1.0 - share) / 2 * (1 + 16 * U)
    below = np.minimum(special.erf(np.sqrt(half)) * (1 + ERF_ERROR), 1.0)
    return np.where((share < 1.0) & (eigenvalue > 0.0), below, 1.0)
