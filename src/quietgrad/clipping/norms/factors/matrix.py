"""What norm estimators and the weighted sum ask of a matrix parameter's per-example gradients,
whatever they are made of.

Every matrix-shaped parameter of every layer has per-example gradients M_i = left_i^T right_i,
summed over the uses of the parameter. Shape legend: b examples, g diagonal blocks (groups of a
convolution; 1 elsewhere), t positions, p rows, d columns, n entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.products import gram_products
from quietgrad.clipping.norms.factors.rows import (
    SpreadSums,
    at_least,
    norms_from_squares,
    sums_of_parts,
    sums_over_positions,
)
from quietgrad.clipping.norms.factors.sums.columns import Sums, sums_over_columns, thin_product
from quietgrad.clipping.norms.factors.sums.scratch import Scratch

# No temporary grows past this many entries (32 MiB in float32) if it can be cut.
BLOCK_ELEMENTS = 8 * 1024 * 1024


class Sizes(NamedTuple):
    """Sizes of one use: examples, blocks, positions, rows, columns; of a convolution, taps of its
    kernel.
    """

    b: int
    g: int
    t: int
    p: int
    d: int
    taps: int = 0

    @property
    def patch_entries(self) -> int:
        """Entries of one example's patches, where they have to be formed."""
        return self.g * self.t * self.d if self.taps else 0


class Grams(NamedTuple):
    """Gram matrices over all positions of some examples, n g of them.

    Attributes:
        right, left: [n g, t, t] inner products of columns factors and of rows factors.
        norms: [2, n g, t] norms of their rows, never too small; columns factors come first.
    """

    right: Tensor
    left: Tensor
    norms: Tensor


class Kept(Protocol):
    """What is kept of per-example gradients until their weights are known."""

    def examples(self, span: slice) -> Kept:
        """A slice of the examples (views)."""

    def without(self, dropped_b: Tensor) -> Kept:
        """Gradients of dropped examples are exactly zero, also where they are infinite or not a
        number.
        """

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """sum_i weights_i M_i in the parameter's shape, added to ``into`` in place where given."""


class MatrixFactors(Kept, Protocol):
    """One use of a matrix parameter, its per-example gradients in factored form."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def like(self) -> Tensor:
        """A tensor on the device where the factors are."""

    @property
    def one_hot(self) -> bool:
        """Whether the rows factor is a one-hot matrix, which is never formed."""

    @property
    def additions(self) -> int:
        """Longest path of additions through the sum over positions."""

    @property
    def gram_columns(self) -> float | None:
        """Multiplications of the right Gram matrix per pair of positions, where fewer than d."""

    @property
    def examples_a_call(self) -> int:
        """How many examples a piece of ``pieces`` holds; 0 where there are no pieces."""

    def examples(self, span: slice) -> MatrixFactors: ...

    def merged(self, groups: RowGroups) -> MatrixFactors:
        """From one gradient a row of the batch to one an example: the sum over its rows."""

    def unfolded(self) -> Unfolded:
        """The same with both factors formed, so far as they ever are."""

    def extents(self) -> list[tuple[int, ...]] | None:
        """Of maps, for each example the sizes that hold all of its gradient; None where all fill
        what they are padded to, and for positions that are no map (``extents``).
        """

    def of_extent(self, numbers: Tensor, extent: tuple[int, ...]) -> MatrixFactors:
        """Examples of these numbers, at that size; () for the size that they have."""

    def alive(self) -> Tensor:
        """[b, g, t] whether a position may add anything but exact zeros."""

    def column_sums(self, dtype: torch.dtype) -> Sums | None:
        """How ``right_product`` adds up; None where only the unfolded factors have one."""

    def right_product(
        self, projection: Tensor, dtype: torch.dtype, scratch: Scratch | None = None
    ) -> Tensor:
        """[b, g, t, k] right @ P, for P of shape [d, k]; in ``scratch``, where that is given."""

    def add_left(
        self,
        total: Tensor | None,
        small_bgtk: Tensor,
        rows: slice = slice(None),
        scratch: Scratch | None = None,
    ) -> Tensor:
        """total + small^T left, [b, g, k, p]; ``rows``: of them only these, for dense factors; in
        ``scratch``, where that is given.
        """

    def spread_sums(self, dtype: torch.dtype, known: Sequence[Tensor] = ()) -> SpreadSums:
        """Sums over positions for the spread; ``known``: parts of the [2, n g, t] norms of
        both factors' rows.
        """

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor] | None:
        """[n, g p d] per-example gradients, n examples at a time, each piece in its own memory.

        None where forming them in one product is as fast.
        """

    def grams(self, dtype: torch.dtype, block_elements: int) -> Iterator[Grams] | None:
        """Gram matrices of all positions, a block of examples at a time; None where they do not fit
        or pay.
        """


class Unfolded(MatrixFactors, Protocol):
    """One use whose columns factor is there position by position; what does not depend on its rows
    factor.
    """

    right_bgtd: Tensor

    @property
    def like(self) -> Tensor:
        return self.right_bgtd

    @property
    def gram_columns(self) -> float | None:
        return None

    @property
    def examples_a_call(self) -> int:
        return 0

    def unfolded(self) -> Unfolded:
        return self

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor] | None:
        return None

    def extents(self) -> list[tuple[int, ...]] | None:
        return None

    def column_sums(self, dtype: torch.dtype) -> Sums | None:
        return sums_over_columns(self.sizes.d)

    def right_product(
        self, projection: Tensor, dtype: torch.dtype, scratch: Scratch | None = None
    ) -> Tensor:
        return thin_product(self.right_bgtd, projection, dtype, scratch, "right")

    def spread_sums(self, dtype: torch.dtype, known: Sequence[Tensor] = ()) -> SpreadSums:
        s = self.sizes
        if known:
            return sums_of_parts(known, s.g)
        norms = self.right_bgtd.new_empty(2, s.b, s.g, s.t, dtype=dtype)
        torch.linalg.vector_norm(self.right_bgtd, dim=3, dtype=dtype, out=norms[0])
        self.write_left_norms(norms[1])
        return sums_over_positions(at_least(norms, max(s.p, s.d)))

    def grams(self, dtype: torch.dtype, block_elements: int) -> Iterator[Grams] | None:
        s = self.sizes
        return (
            self._grams(dtype, block_elements)
            if s.t > 1 and s.g * s.t * s.t <= block_elements
            else None
        )

    def _grams(self, dtype: torch.dtype, block_elements: int) -> Iterator[Grams]:
        s = self.sizes
        examples = max(1, min(s.b, block_elements // (s.g * s.t * s.t)))
        for i in range(0, s.b, examples):
            some = self if examples == s.b else self.positions(slice(i, i + examples), slice(None))
            right = gram_products(some.right_bgtd, some.right_bgtd, dtype).flatten(0, 1)
            left = some.left_gram(some, dtype).expand(-1, s.g, -1, -1).flatten(0, 1)
            norms = right.new_empty(2, right.shape[0], s.t)
            norms[0].copy_(right.diagonal(dim1=1, dim2=2))
            self.write_left_squares(left, norms[1])
            yield Grams(right, left, norms_from_squares(norms, max(s.p, s.d)))

    def examples(self, span: slice) -> Unfolded: ...

    def positions(self, examples: slice, positions: slice) -> Unfolded:
        """A slice of the examples and positions (views)."""

    def gradient_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """[b, g, rows, d] of the per-example gradients."""

    def row_norms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[b, g, t] norms of the positions' right and left factors, as they come."""

    def write_left_norms(self, out_bgt: Tensor) -> None:
        """Norms of the positions' rows factors, as they come."""

    def write_left_squares(self, left: Tensor, out_xt: Tensor) -> None:
        """Squared norms of rows factors from their Gram matrices [x, t, t], as they come."""

    def left_gram(self, other: Unfolded, dtype: torch.dtype) -> Tensor:
        """[b, g, t, t'] inner products of rows factors; g may be 1 for all blocks."""

    def gram_with_rows(self, left_bgtp: Tensor, dtype: torch.dtype) -> Tensor:
        """[b, g, t, t'] inner products of dense rows with this use's rows factors."""

    def gram_with_ids(self, ids_bt: Tensor, dtype: torch.dtype) -> Tensor:
        """[b, 1, t, t'] inner products of one-hot rows with this use's rows factors."""

    def errors_by_rows(self, dtype: torch.dtype) -> Tensor:
        """[b] float64, what adding up row by row can be off by: of one-hot factors alone."""
        raise AssertionError("dense factors are not added up row by row")

    def left_product(
        self, projection: Tensor, dtype: torch.dtype, scratch: Scratch | None = None
    ) -> Tensor:
        """[b, g, t, k] left @ P, for P of shape [p, k] or, per example, [b, g, p, k]."""
