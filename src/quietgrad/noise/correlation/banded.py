"""Banded lower-triangular matrices: storage by columns, solves in blocks, and the reversed Cholesky
factor.

Symbols: T steps, b bands, C lower triangular with C[i, j] = 0 for i - j >= b, X = C^T C (also
b-banded), s rows of a block, r columns of a right-hand side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SMALLEST_BLOCK = 32


def inside(steps: int, bands: int) -> NDArray[np.bool_]:
    """[T, b] whether row j + m of column j exists."""
    return np.arange(steps)[:, None] + np.arange(bands)[None, :] < steps


@dataclass(frozen=True)
class BandedLower:
    """C by columns.

    Attributes:
        columns: [T, b] float64; ``columns[j, m]`` is C[j + m, j], zero where that row does not
            exist.
    """

    columns: Floats

    def __repr__(self) -> str:
        return f"BandedLower(steps={self.steps}, bands={self.bands})"

    @property
    def steps(self) -> int:
        return int(self.columns.shape[0])

    @property
    def bands(self) -> int:
        return int(self.columns.shape[1])

    def dense(self) -> Floats:
        """[T, T]. Memory grows as T^2."""
        steps, bands = self.columns.shape
        out = np.zeros((steps, steps))
        for m in range(bands):
            j = np.arange(steps - m)
            out[j + m, j] = self.columns[: steps - m, m]
        return out

    def row(self, t: int) -> Floats:
        """[min(b, t + 1)] C[t, t - m] for m = 0, 1, ..."""
        m = np.arange(min(self.bands, t + 1))
        return self.columns[t - m, m]

    def gram_band(self) -> Floats:
        """[T, b] the band of X = C^T C, by columns like ``columns``. Cost T b^2."""
        c = self.columns
        steps, bands = c.shape
        out = np.zeros_like(c)
        for m in range(bands):
            n = steps - m
            out[:n, m] = np.einsum("jl,jl->j", c[:n, m:], c[m:, : bands - m])
        return out

    def largest_inverse_row(self, chunk: int = 512) -> float:
        """Largest norm of a row of C^-1: the noise of one step in units of an independent draw.
        Cost T^2 b, memory T ``chunk``.
        """
        squares = np.zeros(self.steps)
        for start in range(0, self.steps, chunk):
            width = min(chunk, self.steps - start)
            identity = np.zeros((self.steps - start, width))
            identity[np.arange(width), np.arange(width)] = 1.0
            with np.errstate(over="ignore", invalid="ignore"):
                squares[start:] += (BandedLower(self.columns[start:]).solve(identity) ** 2).sum(
                    axis=1
                )
        return float(np.sqrt(squares.max()))

    def solve(self, right: Floats) -> Floats:
        """C^-1 right, [T, r]. Cost about 4 T b r multiplications, in blocks."""
        out = np.empty_like(right, dtype=np.float64)
        before: tuple[slice, Floats] | None = None
        for rows, inverse, below in self._blocks:
            part = right[rows] if before is None else right[rows] - before[1] @ out[before[0]]
            np.matmul(inverse, part, out=out[rows])
            before = rows, below
        return out

    def solve_transposed(self, right: Floats) -> Floats:
        """C^-T right, [T, r]. Cost as ``solve``."""
        out = np.empty_like(right, dtype=np.float64)
        after: slice | None = None
        for rows, inverse, below in reversed(self._blocks):
            part = right[rows] if after is None else right[rows] - below.T @ out[after]
            np.matmul(inverse.T, part, out=out[rows])
            after = rows
        return out

    @cached_property
    def _blocks(self) -> list[tuple[slice, Floats, Floats]]:
        """Rows, inverse of the diagonal block [s, s], and the block below it, for every block of s
        >= b - 1 rows.
        """
        steps, bands = self.columns.shape
        size = min(max(bands, SMALLEST_BLOCK), steps)
        count = -(-steps // size)
        padded = np.zeros((count * size, bands))
        padded[:steps] = self.columns
        # Two blocks high, one wide: local column j holds its b entries from row j on.
        tall = np.zeros((count, 2 * size + bands, size))
        j = np.arange(size)
        for m in range(bands):
            tall[:, j + m, j] = padded.reshape(count, size, bands)[:, :, m]
        diagonals = tall[:, :size].copy()
        rest = steps - (count - 1) * size
        diagonals[-1, range(rest, size), range(rest, size)] = 1.0  # beyond the matrix
        inverses = np.tril(np.linalg.inv(diagonals))
        blocks = []
        for k in range(count):
            start, stop = k * size, min((k + 1) * size, steps)
            n, below = stop - start, min(stop + size, steps) - stop
            blocks.append(
                (slice(start, stop), inverses[k, :n, :n], tall[k, size : size + below, :n])
            )
        return blocks


def band_of_product(left: Floats, right: Floats, bands: int) -> Floats:
    """[T, b] out[j, m] = left[j + m] . right[j]: the band of left right^T without the rest of it.
    Cost about 2 T b r multiplications, memory T b.
    """
    steps = left.shape[0]
    out = np.zeros((steps, bands))
    size = max(bands, SMALLEST_BLOCK)
    for start in range(0, steps, size):
        stop = min(steps, start + size)
        product = left[start : stop + bands - 1] @ right[start:stop].T
        for m in range(bands):
            n = min(stop, steps - m) - start
            if n > 0:
                out[start : start + n, m] = np.diagonal(product, -m)[:n]
    return out


def reversed_cholesky(gram: Floats) -> Floats:
    """The lower-triangular C with C^T C = X (flip, factor, flip); plain Cholesky gives X = L L^T,
    which is not what is wanted (erratum E7).

    Args:
        gram: X, [T, T], symmetric positive definite; a banded X gives a banded C.

    Raises:
        ValueError: if X is not positive definite.
    """
    try:
        flipped = np.linalg.cholesky(gram[::-1, ::-1])
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the Gram matrix is not positive definite, so it has no factor; pass a symmetric "
            "positive definite matrix"
        ) from error
    return np.ascontiguousarray(flipped[::-1, ::-1].T)


def columns_of(matrix: Floats, bands: int) -> Floats:
    """[T, b] the band of a lower-triangular matrix, by columns."""
    steps = matrix.shape[0]
    out = np.zeros((steps, bands))
    for m in range(min(bands, steps)):
        out[: steps - m, m] = np.diagonal(matrix, -m)
    return out
