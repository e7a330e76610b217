"""Dense factors: the output gradients and inputs of a Linear layer, or patches of a convolution.

Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.extents import cropped, extents_of
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.matrix import Sizes, Unfolded
from quietgrad.clipping.norms.factors.products import (
    FEW_COLUMNS,
    gram_products,
    of_dtype,
    products_over_positions,
    wide_product,
    zeroed,
)
from quietgrad.clipping.norms.factors.rows import (
    not_zero,
    row_norms,
)
from quietgrad.clipping.norms.factors.sums.columns import thin_product
from quietgrad.clipping.norms.factors.sums.examples import (
    THIN,
    THIN_TOGETHER,
    TOGETHER,
    sum_of_products,
    sum_of_spans,
)
from quietgrad.clipping.norms.factors.sums.pairs import InPairs
from quietgrad.clipping.norms.factors.sums.positions import add_over_positions
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import LONGEST_CHAIN, LONGEST_RUN, blocks, chain


@dataclass(frozen=True)
class DenseFactors(Unfolded):
    """One use of a matrix parameter: M_i = left_i^T right_i per block.

    Attributes:
        left_bgtp: rows factor (for a Linear layer the output gradient).
        right_bgtd: columns factor (for a Linear layer the input).
        map_sizes: of positions that are a map, its sizes.
    """

    left_bgtp: Tensor
    right_bgtd: Tensor
    map_sizes: tuple[int, ...] = ()

    @cached_property  # asked for ten times a step
    def sizes(self) -> Sizes:
        b, g, t, d = self.right_bgtd.shape
        return Sizes(b, g, t, self.left_bgtp.shape[3], d)

    @property
    def one_hot(self) -> bool:
        return False

    @property
    def additions(self) -> int:
        return chain(self.right_bgtd.shape[2])

    def examples(self, span: slice) -> DenseFactors:
        return DenseFactors(self.left_bgtp[span], self.right_bgtd[span])

    def positions(self, examples: slice, positions: slice) -> DenseFactors:
        return DenseFactors(
            self.left_bgtp[examples, :, positions], self.right_bgtd[examples, :, positions]
        )

    def extents(self) -> list[tuple[int, ...]] | None:
        axes = range(2, 2 + len(self.map_sizes))
        return extents_of(self.left_bgtp.unflatten(2, self.map_sizes), axes) if axes else None

    def of_extent(self, numbers: Tensor, extent: tuple[int, ...]) -> DenseFactors:
        if not extent:
            return DenseFactors(self.left_bgtp[numbers], self.right_bgtd[numbers])
        axes, last = range(2, 2 + len(extent)), 1 + len(extent)
        left, right = (
            cropped(x.unflatten(2, self.map_sizes), numbers, axes, extent).flatten(2, last)
            for x in (self.left_bgtp, self.right_bgtd)
        )
        return DenseFactors(left, right)

    def merged(self, groups: RowGroups) -> DenseFactors:
        left, right = groups.positions(self.left_bgtp), groups.positions(self.right_bgtd)
        return DenseFactors(left, right)

    def without(self, dropped_b: Tensor) -> DenseFactors:
        return DenseFactors(zeroed(self.left_bgtp, dropped_b), zeroed(self.right_bgtd, dropped_b))

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """One product of the size of an ordinary weight gradient, a block of positions of up to
        ``TOGETHER`` examples at a time.
        """
        s = self.sizes
        left, right = self._weighted(weights_b, dtype)
        together = THIN_TOGETHER if min(s.p, s.d) <= THIN else TOGETHER
        if s.b <= together:
            return _product(left, right, shape, dtype, into)
        if s.g == 1 and s.t <= LONGEST_CHAIN:
            made = sum_of_products(
                left.reshape(-1, s.p), right.reshape(-1, s.d), dtype, together * s.t
            ).reshape(shape)
            return made if into is None else into.add_(made)
        total = sum_of_spans(
            s.b, lambda few: _product(left[few], right[few], shape, dtype), together
        )
        return total if into is None else into.add_(total)

    def _weighted(self, weights_b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The smaller factor times the weights, in the wide type.

        A weight rounded to half precision lets a record contribute 1.004 C.
        """
        left, right = self.left_bgtp, self.right_bgtd
        weights_b111 = of_dtype(weights_b, dtype).view(-1, 1, 1, 1)
        if left.shape[3] <= right.shape[3]:
            return of_dtype(left, dtype) * weights_b111, right
        return left, of_dtype(right, dtype) * weights_b111

    def gradient_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        total = InPairs()
        for run in _runs(self.right_bgtd.shape[2]):
            left, right = self.left_bgtp[:, :, run, start:stop], self.right_bgtd[:, :, run]
            made: Tensor | None = None
            for span in blocks(right.shape[2]):
                part = products_over_positions(left[:, :, span], right[:, :, span], dtype)
                made = part if made is None else made.add_(part)
            assert made is not None
            total.add(made)
        return total.total()

    def row_norms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return row_norms(self.right_bgtd, dtype), row_norms(self.left_bgtp, dtype)

    def alive(self) -> Tensor:
        return not_zero(self.left_bgtp) & not_zero(self.right_bgtd)

    def write_left_norms(self, out_bgt: Tensor) -> None:
        torch.linalg.vector_norm(self.left_bgtp, dim=3, dtype=out_bgt.dtype, out=out_bgt)

    def write_left_squares(self, left: Tensor, out_xt: Tensor) -> None:
        out_xt.copy_(left.diagonal(dim1=1, dim2=2))

    def left_gram(self, other: Unfolded, dtype: torch.dtype) -> Tensor:
        return other.gram_with_rows(self.left_bgtp, dtype)

    def gram_with_rows(self, left_bgtp: Tensor, dtype: torch.dtype) -> Tensor:
        return gram_products(left_bgtp, self.left_bgtp, dtype)

    def gram_with_ids(self, ids_bt: Tensor, dtype: torch.dtype) -> Tensor:
        index = ids_bt.unsqueeze(1).expand(-1, self.left_bgtp.shape[2], -1)
        return self.left_bgtp[:, 0].gather(2, index).to(dtype).unsqueeze(1).transpose(2, 3)

    def left_product(
        self, projection: Tensor, dtype: torch.dtype, scratch: Scratch | None = None
    ) -> Tensor:
        return thin_product(self.left_bgtp, projection, dtype, scratch, "left")

    def add_left(
        self,
        total: Tensor | None,
        small_bgtk: Tensor,
        rows: slice = slice(None),
        scratch: Scratch | None = None,
    ) -> Tensor:
        return add_over_positions(total, self.left_bgtp[..., rows], small_bgtk, scratch)


def _product(
    left: Tensor, right: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """left^T right over examples and positions, added to ``into`` in place where given."""
    t = left.shape[2]
    if t <= LONGEST_RUN:
        return _run_product(left, right, shape, dtype, into)
    total = InPairs()
    for run in _runs(t):
        total.add(_run_product(left[:, :, run], right[:, :, run], shape, dtype))
    return total.total() if into is None else into.add_(total.total())


def _runs(positions: int) -> list[slice]:
    """Blocks are added one after the other in runs, and runs in pairs: so many positions have to be
    there before one addition more is made that padding, in rows of images too, changes no bound.
    """
    starts = range(0, max(positions, 1), LONGEST_RUN)
    return [slice(start, start + LONGEST_RUN) for start in starts]


def _run_product(
    left: Tensor, right: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
) -> Tensor:
    (_, g, t, p), d = left.shape, right.shape[3]
    product: Tensor | None = None
    for span in blocks(t):
        whole = t <= LONGEST_CHAIN
        some, others = (left, right) if whole else (left[:, :, span], right[:, :, span])
        if len(left) == 1 and d < FEW_COLUMNS:  # bits of a record formed alone must be its own
            product = products_over_positions(some, others, dtype)[0].contiguous()
        elif g > 1:
            product = torch.einsum("bgtp,bgtd->gpd", some.to(dtype), others.to(dtype))
        else:
            # Formed apart: a product that is added in one call begins with what it is added to,
            # so that its rounding would be that of the whole sum at each of its additions.
            product = wide_product(
                some.reshape(-1, p).T, others.reshape(-1, d), dtype, reuse=product
            )
        if into is None:
            into, product = product.reshape(shape), None
        else:
            into.add_(product.reshape(shape))
    assert into is not None
    return into
