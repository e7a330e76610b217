"""Factors of a convolution's kernel: positions are output pixels, columns are patches, formed only
where needed.

Shape legend: b examples, g groups, t output positions, p rows, d columns = channels of a group
times taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.dense import DenseFactors
from quietgrad.clipping.norms.factors.extents import cropped, extents_of
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.matrix import BLOCK_ELEMENTS, Grams, Sizes
from quietgrad.clipping.norms.factors.patch_products import patch_product, sums_over_patches
from quietgrad.clipping.norms.factors.patches import (
    Geometry,
    input_of,
    patch_columns,
    patch_gram,
    patches,
    weight_gradient,
    weight_gradients_one_by_one,
)
from quietgrad.clipping.norms.factors.products import zeroed
from quietgrad.clipping.norms.factors.rows import SpreadSums, norms_from_squares, not_zero
from quietgrad.clipping.norms.factors.sums.columns import Sums
from quietgrad.clipping.norms.factors.sums.examples import sum_of_spans
from quietgrad.clipping.norms.factors.sums.positions import add_over_positions
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import soaring

CACHED_ELEMENTS = 1280 * 1024  # of patches that are formed at once on a processor: 5 MiB in float32


@dataclass(frozen=True)
class ConvolutionFactors:
    """One use of a convolution's kernel.

    Attributes:
        x: [b, in_channels, *spatial] input, with any padding that is not symmetric zeros already
            applied.
        grad: [b, out_channels, *out_spatial] gradient at the output.
        geometry: kernel, stride, padding, dilation, groups.
    """

    x: Tensor
    grad: Tensor
    geometry: Geometry

    @property
    def sizes(self) -> Sizes:
        g, taps = self.geometry.groups, self.geometry.taps
        b, out = self.grad.shape[:2]
        return Sizes(b, g, self.grad.shape[2:].numel(), out // g, self.x.shape[1] // g * taps, taps)

    @property
    def like(self) -> Tensor:
        return self.grad

    @property
    def one_hot(self) -> bool:
        return False

    @property
    def additions(self) -> int:
        return self.sizes.t  # in the native routine's order

    @property
    def input_positions(self) -> int:
        """u: input positions of one example."""
        return self.x.shape[2:].numel()

    @property
    def gram_columns(self) -> float | None:
        if not pixel_gram_pays(self):
            return None
        s, taps = self.sizes, self.geometry.taps
        return (self.input_positions / s.t) ** 2 * s.d / taps + 2 * taps

    @property
    def examples_a_call(self) -> int:
        return 0 if self.x.is_cuda else self.examples_in_cache

    @property
    def examples_in_cache(self) -> int:
        """How many examples' patches are formed at once on a processor.

        1 where not even two fit: there the native routine is faster.
        """
        s = self.sizes
        return max(
            1,
            min(
                CACHED_ELEMENTS // max(1, s.g * s.t * s.d),
                BLOCK_ELEMENTS // max(1, s.g * s.p * s.d),
            ),
        )

    def examples(self, span: slice) -> ConvolutionFactors:
        return ConvolutionFactors(self.x[span], self.grad[span], self.geometry)

    def extents(self) -> list[tuple[int, ...]] | None:
        return extents_of(self.grad, range(2, self.grad.dim()))

    def of_extent(self, numbers: Tensor, extent: tuple[int, ...]) -> ConvolutionFactors:
        if not extent:
            return ConvolutionFactors(self.x[numbers], self.grad[numbers], self.geometry)
        x, geometry = input_of(self.x, numbers, self.geometry, extent)
        grad = cropped(self.grad, numbers, range(2, 2 + len(extent)), extent)
        return ConvolutionFactors(x, grad, geometry)

    def merged(self, groups: RowGroups) -> DenseFactors:
        return self.unfolded().merged(groups)

    def without(self, dropped_b: Tensor) -> ConvolutionFactors:
        return ConvolutionFactors(
            zeroed(self.x, dropped_b), zeroed(self.grad, dropped_b), self.geometry
        )

    def unfolded(self) -> DenseFactors:
        """The same with patches formed: memory t x d per example."""
        return DenseFactors(self._rows(), patches(self.x, self.geometry))

    def _rows(self) -> Tensor:
        """[b, g, t, p]"""
        s = self.sizes
        return self.grad.reshape(s.b, s.g, s.p, s.t).transpose(2, 3)

    def alive(self) -> Tensor:
        return not_zero(self._rows())

    def column_sums(self, dtype: torch.dtype) -> Sums | None:
        channels = self.x.shape[1] // self.geometry.groups
        return sums_over_patches(self.geometry, channels, self.x, dtype)

    def right_product(
        self, projection: Tensor, dtype: torch.dtype, scratch: Scratch | None = None
    ) -> Tensor:
        sums = self.column_sums(dtype)
        assert sums is not None
        return patch_product(self.x, self.geometry, sums, projection)

    def add_left(
        self,
        total: Tensor | None,
        small_bgtk: Tensor,
        rows: slice = slice(None),
        scratch: Scratch | None = None,
    ) -> Tensor:
        assert rows == slice(None)
        return add_over_positions(total, self._rows(), small_bgtk, scratch)

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        weights = weights_b.to(dtype).view(-1, *([1] * (self.grad.dim() - 1)))

        def product(few: slice) -> Tensor:
            scaled = self.grad[few].to(dtype) * weights[few]
            return weight_gradient(self.x[few].to(dtype), scaled, shape, self.geometry)

        total = sum_of_spans(len(weights), product)
        return total if into is None else into.add_(total)

    def spread_sums(self, dtype: torch.dtype, known: Sequence[Tensor] = ()) -> SpreadSums:
        """Every input entry lies under at most ``taps`` output positions.

        So by Cauchy and Schwarz the sum of products is at most the product of whole norms; norms of
        single patches are not needed.
        """
        s = self.sizes
        squares = [
            torch.linalg.vector_norm(x.reshape(s.b, s.g, -1), dim=2, dtype=dtype).square()
            for x in (self.x, self.grad)
        ]
        squares[0] *= self.geometry.taps
        norms = norms_from_squares(torch.stack(squares), s.t * max(s.p, s.d))
        norms = soaring(norms).double()
        return norms[0] * norms[1], norms, torch.zeros_like(norms[0])

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor] | None:
        """On a processor: from patches where those of a few examples fit its cache.

        Else by the native routine, one example a call: it forms no patches, but each call costs
        tens of microseconds beside the work.
        """
        return None if self.x.is_cuda else self._pieces(dtype)

    def _pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        s, examples = self.sizes, self.examples_in_cache
        if examples == 1:
            shape = torch.Size((s.g * s.p, s.d // self.geometry.taps, *self.geometry.kernel))
            for gradient in weight_gradients_one_by_one(
                self.x, self.grad, shape, self.geometry, dtype
            ):
                yield gradient.reshape(1, -1)
            return
        left = self.grad.reshape(s.b, s.g, s.p, s.t)
        columns = patch_columns(self.x, self.geometry, examples, dtype)
        for some, right in zip(left.split(examples), columns, strict=True):
            yield torch.bmm(some.flatten(0, 1).to(dtype), right.transpose(1, 2)).view(len(some), -1)

    def grams(self, dtype: torch.dtype, block_elements: int) -> Iterator[Grams] | None:
        s = self.sizes
        in_one_piece = not self.x.is_cuda and s.g * s.t * max(s.t, s.d) <= block_elements
        pixels = pixel_gram_pays(self, block_elements)
        return self._grams(dtype, block_elements, pixels) if in_one_piece or pixels else None

    def _grams(self, dtype: torch.dtype, block_elements: int, pixels: bool) -> Iterator[Grams]:
        s = self.sizes
        if pixels:
            examples = max(1, block_elements // (s.g * max(self.input_positions, s.t) ** 2))
            grams = (patch_gram(some.to(dtype), self.geometry) for some in self.x.split(examples))
        else:
            examples = max(1, min(block_elements, CACHED_ELEMENTS) // (s.g * s.t * max(s.t, s.d)))
            columns = patch_columns(self.x, self.geometry, examples, dtype)
            grams = (c.transpose(1, 2) @ c for c in columns)
        for some, right in zip(
            self.grad.reshape(s.b, s.g, s.p, s.t).split(examples), grams, strict=True
        ):
            rows = some.flatten(0, 1).to(dtype)
            left = torch.bmm(rows.transpose(1, 2), rows)
            squares = torch.stack([x.diagonal(dim1=1, dim2=2) for x in (right, left)])
            yield Grams(right, left, norms_from_squares(squares, max(s.p, s.d)))


def pixel_gram_pays(use: ConvolutionFactors, block_elements: int = BLOCK_ELEMENTS) -> bool:
    """Whether the Gram matrix of patches is cheaper from single positions than from patches."""
    s, u = use.sizes, use.input_positions
    channels = s.d // use.geometry.taps
    fits = s.g * max(u, s.t) ** 2 <= block_elements
    return fits and u * u * channels + 2 * s.t * s.t * use.geometry.taps < s.t * s.t * s.d
