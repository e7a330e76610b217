"""Norms of factors' rows, never too small: squares that may have been flushed to zero are made up
for.

Shape legend: b examples, g blocks, t positions, n entries of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quietgrad.clipping.norms.rounding import gamma, smallest_normal, soaring

# float64 sums over positions: [b, g] of |a| |g|, [2, b, g] of |a| and |g|, and [b, g] of squares of
# |a| |g|, or zeros where those are not known position by position.
SpreadSums = tuple[Tensor, Tensor, Tensor]

# |a| or |g| of no more may be what stands for squares that were flushed (``at_least``).
NEXT_TO_NOTHING = 2.0**-50


def row_norms(factor_bgtn: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, g, t] norms over the last dimension, as they come. In ``dtype``."""
    return torch.linalg.vector_norm(factor_bgtn, dim=3, dtype=dtype)


def not_zero(factor_bgtn: Tensor) -> Tensor:
    """[b, g, t] whether a row has an entry that is not zero, however small: squares of small ones
    are flushed to zero, and their products with large ones are not.
    """
    # The largest and the smallest: an infinity norm takes ten times as long.
    return (factor_bgtn.amax(3) != 0) | (factor_bgtn.amin(3) != 0)


def at_least(norms: Tensor, entries: float | Tensor) -> Tensor:
    """``row_norms`` of rows of so many entries, enlarged so that none is too small, at any width;
    ``entries``: one number, or a tensor beside the norms.

    A head over a vocabulary is a sum of 10^5 squares. In place.
    """
    larger = 1.0 + gamma(entries, norms, norms.dtype)
    return norms.mul_(larger).add_((entries * smallest_normal(norms.dtype)) ** 0.5)


def is_same(one: Tensor, version: int, two: Tensor) -> bool:
    """Whether two factors are one, and not written into since it had that version."""
    return (
        one.data_ptr() == two.data_ptr()
        and two._version == one._version == version
        and (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
    )


def norms_from_squares(squares: Tensor, entries: float | Tensor) -> Tensor:
    """Norms from sums of so many squares, in any order of summation; never too small. ``entries``:
    one number, or a tensor of the squares' dtype beside them.

    Each square may have been flushed to zero. What makes up for that is added to the norm, as
    ``at_least`` does: added to the square it would hide rows of 1e-18, and their spread with them.
    In the squares' own dtype.
    """
    dtype = squares.dtype
    larger = 1.0 + 2.0 * gamma(entries, squares, dtype)
    return (squares * larger).sqrt_().add_((entries * smallest_normal(dtype)) ** 0.5)


def sums_over_positions(norms_2bgt: Tensor) -> SpreadSums:
    """From the norms |a_t| and |g_t|, ``soaring``."""
    norms_2bgt = soaring(norms_2bgt)
    products, sums = norms_2bgt[0] * norms_2bgt[1], norms_2bgt.sum(3, dtype=torch.float64)
    total = products.sum(2, dtype=torch.float64)
    products.masked_fill_(norms_2bgt.amin(0) <= NEXT_TO_NOTHING, 0.0)
    squares = torch.linalg.vector_norm(products, dim=2, dtype=torch.float64).square_()
    return total, sums, squares


def sums_of_parts(known: Sequence[Tensor], blocks: int) -> SpreadSums:
    """From parts of the [2, n g, t] norms |a_t| and |g_t|, some examples each."""
    norms = [part.unflatten(1, (-1, blocks)) for part in known]
    return sums_over_positions(norms[0] if len(norms) == 1 else torch.cat(norms, dim=1))
