"""Which rows of the model's batch make up one example: one each, the views of a record, or the
records of a user.

Groups may differ in size. Where they do, factors are filled up with rows of exact zeros, which add
nothing to a norm or a sum. Shape legend: R rows, b examples, g blocks, t positions, n entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.products import as_positions
from quietgrad.clipping.norms.factors.sums.elementwise import sum_of_few
from quietgrad.sending import numbers_beside, sent


@dataclass(frozen=True)
class RowGroups:
    """Rows of the batch, group after group.

    Attributes:
        sizes: [b] rows of each example, at least one. Private where examples are users.
        single: whether every example of the whole run is one row. A matter of the plan, never of
            the batch: it decides what is measured how.
    """

    sizes: tuple[int, ...] = field(repr=False)
    single: bool = False

    @cached_property
    def rows(self) -> int:
        """R."""
        return sum(self.sizes)

    @cached_property
    def largest(self) -> int:
        """Rows of the largest group."""
        return max(self.sizes, default=1)

    def positions(self, factor_rgtn: Tensor) -> Tensor:
        """[R, g, t, n] to [b, g, largest t, n]: an example's rows are further positions of it."""
        return as_positions(self._filled_up(factor_rgtn), self.largest)

    def indices(self, ids_rt: Tensor) -> Tensor:
        """[R, t] to [b, largest t]; zero where nothing is."""
        return self._filled_up(ids_rt).unflatten(0, (-1, self.largest)).flatten(1)

    def totals(self, values_rn: Tensor) -> Tensor:
        """[R, n] to [b, n]: sums over each example's rows."""
        return sum_of_few(self._filled_up(values_rn).unflatten(0, (-1, self.largest)))

    def means(self, values_r: Tensor) -> Tensor:
        """[R] to [b]: the mean over each example's own rows."""
        sizes = numbers_beside(self.sizes, values_r)
        return self.totals(values_r.reshape(-1, 1))[:, 0] / sizes

    def _filled_up(self, rows: Tensor) -> Tensor:
        """[R, ...] to [b largest, ...], zero where a group has fewer rows."""
        if self.rows == len(self.sizes) * self.largest:
            return rows
        filled = rows.new_zeros(len(self.sizes) * self.largest, *rows.shape[1:])
        filled[sent(self._places, rows.device)] = rows
        return filled

    @cached_property
    def _places(self) -> Tensor:
        """[R] where each row goes."""
        places = [i * self.largest + j for i, size in enumerate(self.sizes) for j in range(size)]
        return torch.tensor(places, dtype=torch.long, device="cpu")
