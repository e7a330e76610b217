"""Shifts and scales of channels, whose gradients are sums over the positions of maps."""

from __future__ import annotations

from torch import Tensor

from quietgrad.clipping.norms.factors import DirectGradients
from quietgrad.clipping.norms.factors.extents import sum_by_extent
from quietgrad.clipping.norms.factors.sums.elementwise import spread_of_channels
from quietgrad.tensors import accumulation_dtype


def of_channels(x: Tensor) -> DirectGradients:
    """[b, channels, *positions] -> [b, channels]"""
    dtype = accumulation_dtype(x.dtype)
    summed = sum_by_extent(x, range(2, x.dim()), lambda some: some.flatten(2).sum(2, dtype=dtype))
    return DirectGradients(summed, spread_of_channels(x, dtype))
