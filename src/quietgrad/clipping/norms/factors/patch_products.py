"""Patches of images times a projection, without forming a patch: a convolution with the projection
as its kernel.

Shape legend: b examples, g groups, c channels of a group, s channels of a sum, m sums, t output
positions, d = c * taps columns, k projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.patches import Geometry
from quietgrad.clipping.norms.factors.products import AT_ONCE
from quietgrad.clipping.norms.factors.sums.columns import Sums
from quietgrad.clipping.norms.factors.sums.pairs import add_in_pairs

# Not part of torch's public interface: used where it is there.
HAS_GROUPED = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_convolution_pointwise"
)

# Columns of one sum: fewer would take longer than forming the patches, more would round too much.
FEWEST, MOST = 24, 80


def sums_over_patches(
    geometry: Geometry, channels: int, like: Tensor, dtype: torch.dtype
) -> Sums | None:
    """How ``patch_product`` adds up rows of ``channels`` * taps columns. None where patches have to
    be formed: a matter of the kernel's shape, the device and the type alone.
    """
    if len(geometry.kernel) != 2 or like.is_cuda or not HAS_GROUPED or dtype != torch.float32:
        return None
    together = [
        s for s in range(1, channels + 1) if channels % s == 0 and s * geometry.taps <= MOST
    ]
    if not together or together[-1] * geometry.taps < FEWEST:
        return None
    s = together[-1]
    return Sums(channels * geometry.taps, s * geometry.taps, channels // s, paired=True)


def patch_product(x: Tensor, geometry: Geometry, sums: Sums, projection_dk: Tensor) -> Tensor:
    """[b, g, t, k] float32 patches @ P, of an input [b, channels, *spatial].

    By oneDNN's direct convolution, one group for each sum, so that images are the same bits however
    many there are; sums over fewer than all channels keep rounding small. Work b g t d k, memory
    b g t k for the result and m times that for some examples at a time.
    """
    g, k, m = geometry.groups, projection_dk.shape[1], sums.stretches
    kernels = projection_dk.view(m, sums.within, k).transpose(1, 2)
    kernels = kernels.reshape(m * k, sums.within // geometry.taps, *geometry.kernel)
    kernels = kernels.repeat(g, 1, 1, 1)
    found = []
    for some in x.split(_examples(x, geometry, g * m * k)):
        out = torch.ops.mkldnn._convolution_pointwise(
            some.float().contiguous(), kernels, None, geometry.padding, geometry.stride,
            geometry.dilation, g * m, "none", [], "",
        )  # fmt: skip
        found.append(add_in_pairs(out.contiguous().view(len(some) * g, m, k, -1)))
    product = found[0] if len(found) == 1 else torch.cat(found)
    return product.view(len(x), g, k, -1).transpose(2, 3)


def _examples(x: Tensor, geometry: Geometry, channels: int) -> int:
    """As many as give ``AT_ONCE`` entries."""
    strides = geometry.stride[0] * geometry.stride[1]
    return max(1, AT_ONCE * strides // (channels * x.shape[2:].numel()))
