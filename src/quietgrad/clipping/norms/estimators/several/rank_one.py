"""Norms of several rank-one gradients at once: of inputs without positions (tables, embeddings of
whole texts) a layer's gradient is one product of two rows, and its norm that of their norms.

A norm takes some forty operations on a few numbers, which are made for all that wait. Biases are
measured with other small gradients: a user of one record is measured as that record, to the bit.
Memory: two numbers a parameter and example.
Shape legend: m parameters that wait, b examples, x = m b.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.rounding import (
    Measured,
    NormSums,
    norm_gamma,
    smallest_normal,
    squared_norms,
)
from quietgrad.clipping.norms.spread import margin_and_least, spread_from_norms
from quietgrad.sending import numbers_beside


class Waiting(NamedTuple):
    """One parameter whose rows' norms are taken; of the input first, of the output gradient then.

    Attributes:
        group: of the parameter's norms.
        entries: of the parameter.
        squares: [b] squared norms of either row.
        widths: entries of either row.
    """

    group: int
    entries: int
    squares: tuple[Tensor, Tensor]
    widths: tuple[int, int]


@dataclass
class RankOne:
    """Parameters of one micro-batch that wait. Private.

    Attributes:
        sums: what norms are added to.
    """

    sums: NormSums
    _waiting: dict[torch.dtype, list[Waiting]] = field(default_factory=dict, repr=False)

    def takes(self, use: DenseFactors) -> bool:
        """Whether a parameter's one use makes gradients of rank one."""
        return use.sizes.g == 1 and use.sizes.t == 1

    def add(self, group: int, entries: int, use: DenseFactors, dtype: torch.dtype) -> None:
        """Takes the norms of one parameter's rows. Arguments: ``Together.add``."""
        s = use.sizes
        right, left = (x.flatten(1).to(dtype) for x in (use.right_bgtd, use.left_bgtp))
        squares = (squared_norms(right), squared_norms(left))
        self._waiting.setdefault(dtype, []).append(Waiting(group, entries, squares, (s.d, s.p)))

    def measure(self) -> None:
        """Adds the norms of all that wait, which then wait no more."""
        for dtype in list(self._waiting):
            waiting = self._waiting.pop(dtype)
            entries = [one.entries for one in waiting]
            self.sums.add_several(
                [one.group for one in waiting], _measured(waiting, dtype), entries
            )


def _measured(waiting: list[Waiting], dtype: torch.dtype) -> Measured:
    """[x] each."""
    sides = zip(*(one.squares for one in waiting), strict=True)
    squares_2x = torch.stack([torch.cat(side) for side in sides])
    widths = numbers_beside([n for one in waiting for n in one.widths], squares_2x).view(-1, 2)
    widths_2x = widths.T.repeat_interleave(squares_2x.shape[1] // len(waiting), dim=1)
    norms_2x = squares_2x.sqrt().to(dtype)
    spread = spread_from_norms(norms_2x.unsqueeze(2), widths_2x.amax(0), dtype)
    bounds = margin_and_least(spread, 1, squares_2x, dtype)
    squared = squares_2x.prod(0)
    # Either sum of squares is off by e of itself, and by its entries' squares that were flushed.
    e, flushed = norm_gamma(squares_2x, dtype), smallest_normal(dtype)
    lost = (squares_2x * widths_2x.flip(0)).sum(0).mul_(1.01 * flushed)
    slack = squared * (e * (2.0 + e)) + lost + widths_2x.prod(0) * flushed**2
    return Measured(squared, slack, *bounds)
