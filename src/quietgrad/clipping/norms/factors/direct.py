"""Per-example gradients themselves: of parameters that are small per example, or kept after their
norm was taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.products import of_dtype, zeroed
from quietgrad.clipping.norms.factors.sums.elementwise import norms_of_rows, sum_of_rows
from quietgrad.clipping.norms.factors.sums.examples import TOGETHER, sum_of_products
from quietgrad.clipping.norms.factors.sums.pairs import InPairs
from quietgrad.tensors import accumulation_dtype

Side = Literal["left", "right"]


@dataclass(frozen=True)
class DirectGradients:
    """[b, n] per-example gradients (biases, normalisation weights, fallback).

    ``spread_b``: [b] float64 sums of the norms of what they are sums of, where that is known: no
    exact norm divides that rounding in those could have made.
    """

    values_bn: Tensor
    spread_b: Tensor | None = None

    def examples(self, span: slice) -> DirectGradients:
        return DirectGradients(self.values_bn[span])

    def merged(self, groups: RowGroups) -> DirectGradients:
        """From one gradient a row of the batch to one an example: the sum over its rows."""
        spread = self.spread_b
        if spread is not None:
            spread = groups.totals(spread.unsqueeze(1))[:, 0]
        return DirectGradients(groups.totals(self.values_bn), spread)

    def without(self, dropped_b: Tensor) -> DirectGradients:
        return DirectGradients(zeroed(self.values_bn, dropped_b))

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        weights_b1 = of_dtype(weights_b, dtype).unsqueeze(1)
        total = sum_of_products(weights_b1, self.values_bn, dtype, TOGETHER).reshape(shape)
        return total if into is None else into.add_(total)


@dataclass(frozen=True)
class SummedRows:
    """Per-example gradients that are sums of rows (biases and scales), before they are added up.

    Attributes:
        rows: [b, ..., n]; gradients are sums over all dimensions between.
        factor_of_weight: which factor of its layer's weight the rows are, where they are one.
        more_b: [b] float64, spread of the rows themselves, where they are differences already.
        norms: [b, ...] of the rows, where they are known.
    """

    rows: Tensor
    factor_of_weight: Side | None = None
    more_b: Tensor | None = None
    norms: Tensor | None = None

    def formed(self) -> DirectGradients:
        """The gradients, with their spread."""
        dtype = accumulation_dtype(self.rows.dtype)
        return DirectGradients(sum_of_rows(self.rows, dtype), self.spread())

    def spread(self) -> Tensor:
        """[b] float64: no sum is formed for it."""
        norms = self.norms
        if norms is None:
            norms = norms_of_rows(self.rows, accumulation_dtype(self.rows.dtype))
        spread = norms.reshape(len(norms), -1).sum(1, dtype=torch.float64)
        return spread if self.more_b is None else spread + self.more_b

    def examples(self, span: slice) -> SummedRows:
        return SummedRows(self.rows[span])

    def without(self, dropped_b: Tensor) -> SummedRows:
        return SummedRows(zeroed(self.rows, dropped_b))

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """One example is added up as ``formed`` does, whatever its padding: it may be one of which
        rounding is all that is left. Several are where none is in doubt: the library's order will
        do.
        """
        if len(weights_b) == 1:
            summed = sum_of_rows(self.rows, dtype)
        else:
            summed = self.rows.flatten(1, -2).sum(1, dtype=dtype)
        return DirectGradients(summed).weighted_sum(weights_b, shape, dtype, into)


@dataclass(frozen=True)
class ListedGradients:
    """Per-example gradients in pieces, [n, entries] for n examples each.

    As the routine that made them left them, without a copy.
    """

    values: tuple[Tensor, ...]

    def examples(self, span: slice) -> DirectGradients:
        """One example's part; longer slices are not needed."""
        start = span.start
        assert span.stop == start + 1
        for values in self.values:
            if start < len(values):
                return DirectGradients(values[start : start + 1])
            start -= len(values)
        raise AssertionError(span)

    def without(self, dropped_b: Tensor) -> ListedGradients:
        pieces = self._with_parts_of(dropped_b)
        return ListedGradients(
            tuple(torch.where(dropped.unsqueeze(1), 0.0, values) for values, dropped in pieces)
        )

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        total, held = InPairs(), 0
        product = torch.zeros(shape, dtype=dtype, device=weights_b.device)
        for values, weights in self._with_parts_of(weights_b.to(dtype)):
            if held >= TOGETHER:
                free, held = total.add(product), 0
                product = torch.zeros_like(product) if free is None else free.zero_()
            product.view(-1).addmv_(values.T, weights)
            held += len(weights)
        total.add(product)
        return total.total() if into is None else into.add_(total.total())

    def _with_parts_of(self, per_example_b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.values, per_example_b.split([len(v) for v in self.values]), strict=True)
