"""Per-example gradients in factored form: what a layer's rule hands to the norm estimators and to the weighted sum.

Every matrix-shaped parameter of every layer has per-example gradients M_i = left_i^T right_i, summed over the uses of the parameter.
Shape legend: b examples, g diagonal blocks (groups of a convolution; 1 elsewhere), t positions, p rows, d columns, n entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.convolution import Geometry, patches, weight_gradient


@dataclass(frozen=True)
class Sizes:
    """Sizes of one use: examples, blocks, positions, rows, columns."""

    b: int
    g: int
    t: int
    p: int
    d: int


@dataclass(frozen=True)
class DenseFactors:
    """One use of a matrix parameter: M_i = left_i^T right_i per block.

    Attributes:
        left_bgtp: rows factor (for a Linear layer the output gradient).
        right_bgtd: columns factor (for a Linear layer the input).
    """

    left_bgtp: Tensor
    right_bgtd: Tensor

    @property
    def sizes(self) -> Sizes:
        b, g, t, d = self.right_bgtd.shape
        return Sizes(b, g, t, self.left_bgtp.shape[3], d)


@dataclass(frozen=True)
class OneHotFactors:
    """One use of an embedding table: left is the one-hot matrix of ``ids``, never formed.

    Attributes:
        ids_bt: row of the table that each position reads.
        right_bgtd: gradient at each position, zero at positions that read the padding row; g = 1.
        rows: number of rows of the table.
    """

    ids_bt: Tensor
    right_bgtd: Tensor
    rows: int

    @property
    def sizes(self) -> Sizes:
        b, g, t, d = self.right_bgtd.shape
        return Sizes(b, g, t, self.rows, d)


@dataclass(frozen=True)
class ConvolutionFactors:
    """One use of a convolution's kernel: positions are output pixels, columns are patches, which are formed only where needed.

    Attributes:
        x: [b, in_channels, *spatial] input, with any padding that is not symmetric zeros already applied.
        grad: [b, out_channels, *out_spatial] gradient at the output.
        geometry: kernel, stride, padding, dilation, groups.
    """

    x: Tensor
    grad: Tensor
    geometry: Geometry

    @property
    def sizes(self) -> Sizes:
        g = self.geometry.groups
        b, out = self.grad.shape[:2]
        return Sizes(b, g, self.grad.shape[2:].numel(), out // g, self.x.shape[1] // g * self.geometry.taps)

    @property
    def input_positions(self) -> int:
        """u: input positions of one example."""
        return self.x.shape[2:].numel()

    def unfolded(self) -> DenseFactors:
        """The same with patches formed: memory t x d per example."""
        s = self.sizes
        left = self.grad.reshape(s.b, s.g, s.p, s.t).transpose(2, 3)
        return DenseFactors(left, patches(self.x, self.geometry))


@dataclass(frozen=True)
class DirectGradients:
    """Per-example gradients themselves, for parameters that are small per example (biases, normalisation weights, fallback)."""

    values_bn: Tensor


@dataclass(frozen=True)
class ListedGradients:
    """Per-example gradients in pieces, [n, entries] for n examples each: as the routine that made them left them, without a copy."""

    values: tuple[Tensor, ...]

    def pieces_of(self, per_example_b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece with its part of a vector over examples."""
        yield from zip(self.values, per_example_b.split([len(v) for v in self.values]), strict=True)


MatrixFactors = DenseFactors | OneHotFactors | ConvolutionFactors
Contribution = MatrixFactors | DirectGradients
Kept = Contribution | ListedGradients


def examples_of(use: MatrixFactors, examples: slice) -> MatrixFactors:
    """A slice of the examples (views)."""
    if isinstance(use, OneHotFactors):
        return OneHotFactors(use.ids_bt[examples], use.right_bgtd[examples], use.rows)
    if isinstance(use, ConvolutionFactors):
        return ConvolutionFactors(use.x[examples], use.grad[examples], use.geometry)
    return DenseFactors(use.left_bgtp[examples], use.right_bgtd[examples])


def unfolded(use: MatrixFactors) -> DenseFactors | OneHotFactors:
    """Convolutions with their patches formed; the others as they are."""
    return use.unfolded() if isinstance(use, ConvolutionFactors) else use


def keep_examples(contribution: Kept, keep_b: Tensor) -> Kept:
    """Sets the gradients of dropped examples to exactly zero, also where they are infinite or not a number."""

    def zero(x: Tensor) -> Tensor:
        mask = keep_b.view(-1, *([1] * (x.dim() - 1)))
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    if isinstance(contribution, DenseFactors):
        return DenseFactors(zero(contribution.left_bgtp), zero(contribution.right_bgtd))
    if isinstance(contribution, OneHotFactors):
        return OneHotFactors(contribution.ids_bt, zero(contribution.right_bgtd), contribution.rows)
    if isinstance(contribution, ConvolutionFactors):
        return ConvolutionFactors(zero(contribution.x), zero(contribution.grad), contribution.geometry)
    if isinstance(contribution, ListedGradients):
        pieces = contribution.pieces_of(keep_b)
        return ListedGradients(tuple(torch.where(keep.unsqueeze(1), values, 0.0) for values, keep in pieces))
    return DirectGradients(zero(contribution.values_bn))


def weighted_sum(
    contribution: Kept,
    weights_b: Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    into: Tensor | None = None,
) -> Tensor:
    """sum_i weights_i M_i in the parameter's shape, added to ``into`` in place where given.

    One product of the size of an ordinary weight gradient; no temporary of the parameter's size where ``into`` is given, but for
    convolutions and half precision.
    """
    if isinstance(contribution, ListedGradients):
        into = torch.zeros(shape, dtype=dtype, device=weights_b.device) if into is None else into
        for values, weights in contribution.pieces_of(weights_b.to(dtype)):
            into.view(-1).addmv_(values.T, weights)
        return into
    if isinstance(contribution, DirectGradients):
        values = contribution.values_bn.to(dtype)
        weights = weights_b.to(dtype)
        if into is None:
            return (weights @ values).reshape(shape)
        into.view(-1).addmv_(values.T, weights)
        return into
    if isinstance(contribution, OneHotFactors):
        right = contribution.right_bgtd.to(dtype) * weights_b.to(dtype).view(-1, 1, 1, 1)
        into = torch.zeros(shape, dtype=dtype, device=right.device) if into is None else into
        into.view(contribution.rows, -1).index_add_(0, contribution.ids_bt.reshape(-1), right.flatten(0, 2))
        return into
    if isinstance(contribution, ConvolutionFactors):
        scaled = contribution.grad.to(dtype) * weights_b.to(dtype).view(-1, *([1] * (contribution.grad.dim() - 1)))
        product = weight_gradient(contribution.x.to(dtype), scaled, shape, contribution.geometry)
    else:
        s = contribution.sizes
        left, right = _weights_on_the_smaller(contribution, weights_b)
        if s.g > 1:
            product = torch.einsum("bgtp,bgtd->gpd", left.to(dtype), right.to(dtype)).reshape(shape)
        elif into is not None and left.dtype == right.dtype == dtype:
            into.view(s.p, s.d).addmm_(left.reshape(-1, s.p).T, right.reshape(-1, s.d))
            return into
        else:
            product = wide_product(left.reshape(-1, s.p).T, right.reshape(-1, s.d), dtype).reshape(shape)
    return product if into is None else into.add_(product)


def _weights_on_the_smaller(use: DenseFactors, weights_b: Tensor) -> tuple[Tensor, Tensor]:
    left, right = use.left_bgtp, use.right_bgtd
    weights_b111 = weights_b.view(-1, 1, 1, 1)
    if left.shape[3] <= right.shape[3]:
        return left * weights_b111.to(left.dtype), right
    return left, right * weights_b111.to(right.dtype)


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right with sums accumulated and returned in ``dtype``, whatever the factors' own precision.

    On a GPU half-precision factors stay as they are (tensor cores accumulate in float32); where one factor is float32 under autocast, it
    is rounded as autocast rounds it in the forward pass. Elsewhere the factors are widened first.
    """
    if left.dtype == right.dtype == dtype:
        return left @ right
    half = next((x.dtype for x in (left, right) if x.dtype in (torch.float16, torch.bfloat16)), None)
    if half is not None and left.is_cuda and dtype == torch.float32 and left.dim() in (2, 3):
        product = torch.mm if left.dim() == 2 else torch.bmm
        return product(left.to(half), right.to(half), out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)
