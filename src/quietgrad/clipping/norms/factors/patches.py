"""Convolutions of one to three dimensions as products of matrices: patches, kernels' gradients and
Gram matrices of patches.

Shape legend: b examples, g groups, c channels of a group, t output positions, u input positions, d
= c * taps columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.clipping.norms.factors.extents import cropped, laid_as

PADDED_ELEMENTS = 4 * 1024 * 1024  # of an input that are padded at once: padding copies


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride, padding (zeros on both sides) and dilation per spatial dimension, and the
    number of groups.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def taps(self) -> int:
        """Entries of the kernel for one pair of channels."""
        return prod(self.kernel)


def _padded(x: Tensor, geometry: Geometry) -> Tensor:
    if not any(geometry.padding):
        return x
    return F.pad(x, [side for width in reversed(geometry.padding) for side in (width, width)])


def _windows(x: Tensor, geometry: Geometry) -> Tensor:
    """[b, channels, *out, *kernel] what lies under the kernel at each output position: a view of
    the padded input.
    """
    windows = _padded(x, geometry)
    for axis, (kernel, stride, dilation) in enumerate(
        zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
    ):
        windows = windows.unfold(2 + axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    return windows


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """[b, g, t, d] patches of an input [b, channels, *spatial]."""
    windows = _windows(x, geometry)
    dims = len(geometry.kernel)
    b, channels = windows.shape[:2]
    grouped = windows.reshape(b, geometry.groups, channels // geometry.groups, *windows.shape[2:])
    spatial = list(range(3, 3 + dims))
    kernel = list(range(3 + dims, 3 + 2 * dims))
    return grouped.permute(0, 1, *spatial, 2, *kernel).flatten(2 + dims).flatten(2, 1 + dims)


def patch_columns(
    x: Tensor, geometry: Geometry, examples: int, dtype: torch.dtype
) -> Iterator[Tensor]:
    """[n g, d, t] transposed patches of ``examples`` examples at a time, all in one piece of
    memory: the next overwrites the last.

    Copied in runs of output positions, and into memory that is in the processor's cache already:
    fresh memory costs as much as the product.
    """
    dims = len(geometry.kernel)
    if geometry.taps == 1 and not any(geometry.padding) and set(geometry.stride) == {1}:
        for some in x.split(examples):  # each pixel is its patch
            yield some.to(dtype).reshape(len(some) * geometry.groups, -1, some.shape[2:].numel())
        return
    order = (0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    scratch: Tensor | None = None
    padded_at_once = examples * max(1, PADDED_ELEMENTS // (examples * x[0].numel()))
    for block in x.split(padded_at_once):
        for some in _windows(block, geometry).permute(order).split(examples):
            if scratch is None:
                scratch = x.new_empty(some.shape, dtype=dtype)
            columns = scratch[: len(some)].copy_(some)
            yield columns.view(len(some) * geometry.groups, -1, some.shape[2 + dims :].numel())


def weight_gradient(x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The kernel's gradient summed over examples, by the same routine as autograd's; contiguous
    whatever the layout of the images.
    """
    weight = grad.new_empty(1).expand(shape)  # only its shape is read
    zeros = [0] * len(geometry.kernel)
    product = torch.ops.aten.convolution_backward(
        grad, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, zeros,
        geometry.groups,
        [False, True, False],
    )[1]  # fmt: skip
    return product.contiguous()


def weight_gradients_one_by_one(
    x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Each example's gradient of the kernel, by one call of the native routine per example."""
    weight = grad.new_empty(1, dtype=dtype).expand(shape)
    zeros = [0] * len(geometry.kernel)
    settings = (
        geometry.stride, geometry.padding, geometry.dilation, False, zeros, geometry.groups, [False,
        True, False],
    )  # fmt: skip
    native = torch.ops.aten.convolution_backward.default
    pairs = zip(x.split(1), grad.split(1), strict=True)
    return (
        native(one_grad.to(dtype), one_x.to(dtype), weight, None, *settings)[1]
        for one_x, one_grad in pairs
    )


def patch_gram(x: Tensor, geometry: Geometry) -> Tensor:
    """[b g, t, t] inner products of patches, from those of single input positions: no patch is
    formed.

    A patch is the concatenation of the positions under the kernel's taps, so its Gram matrix is the
    sum over taps of shifted copies of the positions' Gram matrix. Multiplications u^2 c against t^2
    c taps with patches formed.
    """
    b, channels, *size = x.shape
    g, out = geometry.groups, out_size(size, geometry)
    pixels = x.reshape(b * g, channels // g, -1)
    gram = torch.bmm(pixels.transpose(1, 2), pixels).reshape(b * g, *size, *size)
    total = gram.new_zeros(b * g, *out, *out)
    for tap in product(*(range(k) for k in geometry.kernel)):
        # The padding's zeros add nothing: only outputs whose position under this tap lies inside
        # the input are touched.
        spans = [_inside(axis, offset, size, out, geometry) for axis, offset in enumerate(tap)]
        outputs, inputs = (tuple(side) for side in zip(*spans, strict=True))
        every = (slice(None),)
        total[every + outputs + outputs] += gram[every + inputs + inputs]
    return total.view(b * g, prod(out), prod(out))


def _inside(
    axis: int, offset: int, size: list[int], out: list[int], geometry: Geometry
) -> tuple[slice, slice]:
    """Outputs along an axis whose position under a tap lies inside the input,
    and those positions.
    """
    stride, shift = geometry.stride[axis], offset * geometry.dilation[axis] - geometry.padding[axis]
    first = max(0, -(shift // stride))
    last = min(out[axis] - 1, (size[axis] - 1 - shift) // stride)
    if last < first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last + 1), slice(first * stride + shift, last * stride + shift + 1, stride)


def input_of(
    x: Tensor, numbers: Tensor, geometry: Geometry, extent: tuple[int, ...]
) -> tuple[Tensor, Geometry]:
    """What the first ``extent`` output positions of these examples read, and the geometry with
    which it gives just these. Where nothing but zeros is cut off beside them, that is the geometry
    of smaller images; else the padding is written out.
    """
    inner, needed = [], []
    for n, kernel, stride, pad, dilation in zip(
        extent, geometry.kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True
    ):
        needed.append((n - 1) * stride + dilation * (kernel - 1) + 1)
        inner.append(max(1, needed[-1] - 2 * pad))
    axes = range(2, 2 + len(extent))
    seen = x[numbers]
    for axis, pad, most in zip(axes, geometry.padding, needed, strict=True):
        seen = seen.narrow(axis, 0, min(seen.shape[axis], most - pad))
    fits = all(size <= x.shape[axis] for axis, size in zip(axes, inner, strict=True))
    if fits and out_size(inner, geometry) == list(extent) and _only_zeros_after(seen, axes, inner):
        return cropped(x, numbers, axes, tuple(inner)), geometry
    sides = [
        side
        for axis, pad, most in reversed(list(zip(axes, geometry.padding, needed, strict=True)))
        for side in (pad, most - pad - seen.shape[axis])
    ]
    padded = laid_as(x, F.pad(seen, sides))
    return padded, replace(geometry, padding=tuple(0 for _ in extent))


def _only_zeros_after(x: Tensor, axes: Sequence[int], sizes: Sequence[int]) -> bool:
    beyond = [x.narrow(a, n, x.shape[a] - n) for a, n in zip(axes, sizes, strict=True)]
    return not any(bool((part != 0).any()) for part in beyond)


def out_size(size: list[int], geometry: Geometry) -> list[int]:
    """Output positions per dimension of an input of ``size``."""
    return [
        (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1
        for n, k, stride, pad, dilation in zip(
            size, geometry.kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True
        )
    ]
