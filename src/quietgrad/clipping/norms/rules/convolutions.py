"""Convolutions, of one dimension to three."""

from __future__ import annotations

from collections.abc import Collection

import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping.norms.factors import ConvolutionFactors, Geometry, Given
from quietgrad.clipping.norms.rules.channels import of_channels


def convolution_rule(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """Conv1d, Conv2d, Conv3d with stride, padding, dilation and groups: positions are output
    pixels, columns are patches.
    """
    out: dict[str, Given] = {}
    if "weight" in wanted:
        sides = module._reversed_padding_repeated_twice
        before, after = tuple(sides[-2::-2]), tuple(sides[::-2])
        if module.padding_mode != "zeros" or before != after:
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x, before = F.pad(x, sides, mode=mode), tuple(0 for _ in before)
        geometry = Geometry(
            tuple(module.kernel_size),
            tuple(module.stride),
            before,
            tuple(module.dilation),
            module.groups,
        )
        out["weight"] = ConvolutionFactors(x, grad, geometry)
    if "bias" in wanted:
        out["bias"] = of_channels(grad)
    return out
