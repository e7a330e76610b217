"""Convolutions of one to three dimensions as products of matrices: patches, kernels' gradients and Gram matrices of patches.

Shape legend: b examples, g groups, c channels of a group, t output positions, u padded input positions, d = c * taps columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride, padding (zeros on both sides) and dilation per spatial dimension, and the number of groups."""

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
    return F.pad(x, [side for width in reversed(geometry.padding) for side in (width, width)])


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """[b, g, t, d] patches of an input [b, channels, *spatial]."""
    padded = _padded(x, geometry)
    dims = len(geometry.kernel)
    for axis in range(dims):
        span = (geometry.kernel[axis] - 1) * geometry.dilation[axis] + 1
        padded = padded.unfold(2 + axis, span, geometry.stride[axis])[..., :: geometry.dilation[axis]]
    b, channels = padded.shape[:2]
    grouped = padded.reshape(b, geometry.groups, channels // geometry.groups, *padded.shape[2:])
    spatial = list(range(3, 3 + dims))
    kernel = list(range(3 + dims, 3 + 2 * dims))
    return grouped.permute(0, 1, *spatial, 2, *kernel).flatten(2 + dims).flatten(2, 1 + dims)


def weight_gradient(x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The kernel's gradient summed over examples, by the same routine as autograd's."""
    weight = grad.new_empty(1).expand(shape)  # only its shape is read
    zeros = [0] * len(geometry.kernel)
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, zeros, geometry.groups,
        [False, True, False],
    )[1]  # fmt: skip


def weight_gradients_one_by_one(x: Tensor, grad: Tensor, shape: torch.Size, geometry: Geometry) -> Iterator[Tensor]:
    """Each example's gradient of the kernel, by one call of the native routine per example."""
    weight = grad.new_empty(1).expand(shape)
    zeros = [0] * len(geometry.kernel)
    settings = (
        geometry.stride, geometry.padding, geometry.dilation, False, zeros, geometry.groups, [False, True, False],
    )  # fmt: skip
    native = torch.ops.aten.convolution_backward.default
    pairs = zip(x.split(1), grad.split(1), strict=True)
    return (native(one_grad, one_x, weight, None, *settings)[1] for one_x, one_grad in pairs)


def patch_gram(x: Tensor, geometry: Geometry) -> Tensor:
    """[b, g, t, t] inner products of patches, from those of single input positions: no patch is formed.

    A patch is the concatenation of the positions under the kernel's taps, so its Gram matrix is the sum over taps of shifted copies of the
    positions' Gram matrix. Multiplications u^2 c against t^2 c taps with patches formed.
    """
    padded = _padded(x, geometry)
    b, channels, *size = padded.shape
    g = geometry.groups
    pixels = padded.reshape(b * g, channels // g, -1).transpose(1, 2).contiguous()
    gram = (pixels @ pixels.transpose(1, 2)).reshape(b * g, *size, *size)
    out = out_size(size, geometry)
    total: Tensor | None = None
    for tap in product(*(range(k) for k in geometry.kernel)):
        shifted = gram
        for axis, offset in enumerate(tap):
            start, step = offset * geometry.dilation[axis], geometry.stride[axis]
            stop = start + (out[axis] - 1) * step + 1
            for dim in (1 + axis, 1 + len(size) + axis):
                shifted = shifted[(slice(None),) * dim + (slice(start, stop, step),)]
        total = shifted.clone() if total is None else total.add_(shifted)
    assert total is not None
    return total.reshape(b, g, prod(out), prod(out))


def out_size(padded_size: list[int], geometry: Geometry) -> list[int]:
    """Output positions per dimension of an input that is padded already."""
    return [
        (n - dilation * (k - 1) - 1) // stride + 1
        for n, k, stride, dilation in zip(padded_size, geometry.kernel, geometry.stride, geometry.dilation, strict=True)
    ]


def padded_positions(x: Tensor, geometry: Geometry) -> int:
    """u: padded input positions of one example."""
    return prod(n + 2 * pad for n, pad in zip(x.shape[2:], geometry.padding, strict=True))
