"""The filter that tells spikes from noise: a matrix scaled so that the noise's singular values lie
in [-1, 1], and Chebyshev polynomials of it.

With m <= n rows and columns, X = (G G^T - (m + n) s^2) / (2 sqrt(mn) s^2) maps the bulk to [-1, 1]
and a singular value y to x(y) > 1. X is formed where that is cheaper than applying G and G^T in
turn to thin blocks, unless what stands out is so strong that its squares would drown the bulk in
float32 (``FORMED_STRENGTH``).

Vectors are rows of their blocks: on a processor a thin product from the left is three times as fast
as one from the right.

Shape legend: l matrices of one shape, m <= n their sides, p vectors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quietgrad.denoising.formulas import bulk_edge

DENSE_SIDE = 64  # up to this side the eigenvalues of G G^T are cheaper than the search
FORMED_SIDE = 1024  # X is formed for the search up to this m,
FORMED_SIDE_TEST = 400  # for the test, too, up to this,
FORMED_RATIO = 2  # from this n / m,
FORMED_STRENGTH = 100.0  # and up to so many edges: squares are rounded at 1e4 * 6e-8 of the edge's


class Operator:
    """X of a stack, applied to blocks of row vectors [l, p, m]; from ``x_lmm``
    where that is given.
    """

    def __init__(self, stack_lmn: Tensor, noise_std: float, x_lmm: Tensor | None = None) -> None:
        m, n = stack_lmn.shape[1:]
        s2 = noise_std**2
        self.stack = stack_lmn
        self.noise_std = noise_std
        self.centre = (m + n) * s2
        self.half_width = 2 * math.sqrt(m * n) * s2
        self.x_lmm = x_lmm

    @classmethod
    def of(cls, stack_lmn: Tensor, noise_std: float, largest_side: int = FORMED_SIDE) -> Operator:
        """With X formed where that pays and is exact enough."""
        _, m, n = stack_lmn.shape
        pays = DENSE_SIDE < m <= largest_side and n >= FORMED_RATIO * m
        thin = cls(stack_lmn, noise_std)
        return thin.formed() if pays and not bool(_are_strong(stack_lmn, noise_std).any()) else thin

    def formed(self) -> Operator:
        """With X as matrices."""
        x = torch.bmm(self.stack, self.stack.transpose(1, 2))
        x.diagonal(dim1=1, dim2=2).sub_(self.centre)
        return Operator(self.stack, self.noise_std, x.div_(self.half_width))

    def some(self, which: Tensor) -> Operator:
        """Of some of the matrices."""
        return Operator(
            self.stack[which], self.noise_std, None if self.x_lmm is None else self.x_lmm[which]
        )

    def position(self, values: Tensor) -> Tensor:
        """X's eigenvalues for singular values; those of noise are in [-1, 1]."""
        return (values.square() - self.centre) / self.half_width

    def apply(self, w: Tensor, scale: float = 1.0) -> Tensor:
        """scale X w."""
        if self.x_lmm is not None:
            return torch.bmm(w, self.x_lmm).mul_(scale)
        g = self.stack
        y = torch.bmm(torch.bmm(w, g), g.transpose(1, 2))
        return y.sub_(w, alpha=self.centre).mul_(scale / self.half_width)

    def chebyshev(self, w: Tensor, degree: int, outside: Tensor | None = None) -> Tensor:
        """T_degree(X) w by the three-term recursion; ``outside`` [l, q, m] (orthonormal or zero
        rows) is projected out at every step.
        """
        before, now = w, _without(self.apply(w), outside)
        for _ in range(degree - 1):
            before, now = now, _without(self.apply(now, 2.0).sub_(before), outside)
        return now


def _without(w: Tensor, outside: Tensor | None) -> Tensor:
    return (
        w if outside is None else w.sub_(torch.bmm(torch.bmm(w, outside.transpose(1, 2)), outside))
    )


def _are_strong(stack_lmn: Tensor, noise_std: float) -> Tensor:
    """[l] False only where no singular value is above about ``FORMED_STRENGTH`` edges: of the sum
    of squares, m n s^2 is noise.
    """
    m, n = stack_lmn.shape[1:]
    squared = torch.linalg.vector_norm(stack_lmn, dim=(1, 2)).double().square()
    return ~(
        squared <= m * n * noise_std**2 + (FORMED_STRENGTH * bulk_edge((m, n), noise_std)) ** 2
    )
