"""Weighted sums over examples: of few at a time, so that a crowd's rounding does not add up."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quietgrad.clipping.norms.factors.sums.pairs import InPairs

# Examples that one product adds up. Its additions follow one another, so copies of one record
# round alike: by 0.14 clipping norms with 4096 of them at once, by 0.002 in sums of so many.
TOGETHER = 64

# The same of thin products, of few rows or columns: libraries add up all of such a product in one
# sum (seen with MKL up to 10 columns), of others some hundred positions.
THIN, THIN_TOGETHER = 16, 4


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
