"""Weighted sums over examples: of few at a time, so that a crowd's rounding does not add up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.products import wide_product
from quietgrad.clipping.norms.factors.sums.pairs import InPairs, add_in_pairs

# Examples that one product adds up. Its additions follow one another, so copies of one record
# round alike: by 0.14 clipping norms with 4096 of them at once, by 0.002 in sums of so many.
TOGETHER = 64

# The same of thin products, of few rows or columns: libraries add up all of such a product in one
# sum (seen with MKL up to 10 columns), of others some hundred positions.
THIN, THIN_TOGETHER = 16, 4

# Entries of results that lie side by side before they are added up, formed by one call: of small
# ones calls are what takes time.
SIDE_BY_SIDE = 2**18


def spans_of_examples(examples: int, together: int = TOGETHER) -> list[slice]:
    """At most ``together`` each; one where there is none."""
    starts = range(0, max(examples, 1), together)
    return [slice(start, min(start + together, examples)) for start in starts]


def sum_of_spans(
    examples: int, product: Callable[[slice], Tensor], together: int = TOGETHER
) -> Tensor:
    """Sum over examples of what ``product`` forms for some, added up in pairs. ``product`` gives
    each result away.
    """
    total = InPairs()
    for span in spans_of_examples(examples, together):
        total.add(product(span))
    return total.total()


def sum_of_products(left_bm: Tensor, right_bn: Tensor, dtype: torch.dtype, together: int) -> Tensor:
    """[m, n] left^T right: of ``together`` rows at a time, and those in pairs (``sum_of_spans``),
    as many side by side as is worth it.

    Args:
        left_bm, right_bn: rows of examples, one after the other.
        dtype: of the sums.
        together: rows that one product adds up.
    """
    if len(left_bm) <= together:
        return wide_product(left_bm.T, right_bn, dtype)
    m, n = left_bm.shape[1], right_bn.shape[1]
    # A power of two: which parts are added to which is the same, however many lie side by side.
    most = 1 << max(0, (SIDE_BY_SIDE // max(1, m * n)).bit_length() - 1)

    def product(few: slice) -> Tensor:
        left, right = left_bm[few], right_bn[few]
        whole = len(left) - len(left) % together
        if whole <= together:
            return wide_product(left.T, right, dtype)
        parts = wide_product(
            left[:whole].reshape(-1, together, m).mT, right[:whole].reshape(-1, together, n), dtype
        )
        if whole < len(left):
            last = wide_product(left[whole:].T, right[whole:], dtype)
            parts = torch.cat([parts, last.unsqueeze(0)])
        return add_in_pairs(parts.unsqueeze(0))[0]

    return sum_of_spans(len(left_bm), product, together * most)
