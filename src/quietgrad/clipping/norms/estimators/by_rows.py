"""Exact norms of an embedding table's gradients: of the rows that an example reads, which are no
more than its positions. Neither sketched nor formed whole.

Shape legend: b examples, t positions, p rows of the table, d columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors import BLOCK_ELEMENTS, MatrixFactors, OneHotFactors
from quietgrad.clipping.norms.rounding import (
    MOST_COUNTED,
    Measured,
    least_of,
    norm_gamma,
    squared_norms,
)
from quietgrad.clipping.norms.spread import spread_of


def norms_by_rows(
    uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int = BLOCK_ELEMENTS
) -> Measured | None:
    """Norms of one parameter's per-example gradients where all its uses read rows of it; None where
    another use is a product. t d additions per example and as much memory, for some examples at a
    time.
    """
    some = _together([use for use in uses if isinstance(use, OneHotFactors)])
    if some is None or any(not isinstance(use, OneHotFactors) for use in uses):
        return None
    s = some.sizes
    examples = max(1, block_elements // max(1, s.t * s.d))
    squares, errors = [], []
    for start in range(0, s.b, examples):
        few = some.examples(slice(start, start + examples))
        sums = few.sums_by_rows(dtype)
        each = squared_norms(sums.flatten(0, 1)).view(sums.shape[:2])
        # One after the other: where rows of zeros stand, such as padding's, must change nothing.
        squares.append(each.cumsum(1)[:, -1] if s.t else each.sum(1))
        errors.append(few.errors_by_rows(dtype))
    squared, error = torch.cat(squares), torch.cat(errors)
    # What is measured and what the sum will hold are two roundings of the same additions.
    margin = error.mul_(1.0 + MOST_COUNTED)
    spread = spread_of([some], dtype)
    least, slack = least_of(spread.plain), norm_gamma(squared, dtype) * squared
    return Measured(squared, slack, margin, least, spread.terms)


def _together(uses: Sequence[OneHotFactors]) -> OneHotFactors | None:
    """All uses of a table as one, its positions one after the other."""
    if len(uses) <= 1:
        return uses[0] if uses else None
    ids = torch.cat([use.ids_bt for use in uses], dim=1)
    right: Tensor = torch.cat([use.right_bgtd for use in uses], dim=2)
    return OneHotFactors(ids, right, uses[0].rows)
