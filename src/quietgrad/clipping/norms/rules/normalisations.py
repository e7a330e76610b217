"""Layers that normalise, with a scale and a shift after it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping.norms.factors import DirectGradients, Given, SummedRows
from quietgrad.clipping.norms.factors.sums.elementwise import norms_of_rows, spread_of_channels
from quietgrad.clipping.norms.rules.channels import of_channels
from quietgrad.clipping.norms.rules.rms_norms import epsilon_of
from quietgrad.tensors import accumulation_dtype


def layer_norm_rule(
    module: nn.LayerNorm, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """Means and lengths are those of autograd, bit for bit: of inputs far from zero others would
    leave another gradient.
    """
    shape, wide = module.normalized_shape, x.to(accumulation_dtype(x.dtype))
    normalised, mean, scale = _normalised(wide, shape, module.eps)
    rows = grad.flatten(grad.dim() - len(shape))
    norms = norms_of_rows(rows, accumulation_dtype(grad.dtype))
    taken_off = norms * (mean * scale).view(norms.shape)
    taken_off = taken_off.reshape(len(grad), norms.shape[1:].numel())
    found = _scale_and_shift_last(normalised, grad, wanted, len(shape))
    if "bias" in found:
        found["bias"] = SummedRows(rows if rows.dim() > 2 else rows.unsqueeze(1), norms=norms)
    return _less_means(found, torch.linalg.vector_norm(taken_off, 1, 1, dtype=torch.float64))


def _normalised(x: Tensor, shape: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """With their means, and what they were scaled by. Ones and zeros change no bit: without them a
    processor takes one entry after the other, which lasts almost twice as long.
    """
    ones, zeros = x.new_ones(shape), x.new_zeros(shape)
    found: tuple[Tensor, Tensor, Tensor] = torch.native_layer_norm(x, shape, ones, zeros, eps)
    return found


def _less_means(found: dict[str, Given], taken_off_b: Tensor) -> dict[str, Given]:
    """Inputs less far larger means are rounded as those are, and by autograd otherwise."""
    weight = found.get("weight")
    if isinstance(weight, SummedRows):
        found["weight"] = replace(weight, more_b=taken_off_b)
    elif isinstance(weight, DirectGradients) and weight.spread_b is not None:
        found["weight"] = replace(weight, spread_b=weight.spread_b + taken_off_b)
    return found


def rms_norm_rule(
    module: nn.RMSNorm, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    normalised = F.rms_norm(x, module.normalized_shape, eps=module.eps)
    return _scale_and_shift_last(normalised, grad, wanted, len(module.normalized_shape))


def scaled_rms_norm_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """The RMSNorms of Hugging Face models, y = w n(x) or (1 + w) n(x): the derivative by w is n(x)
    in both.
    """
    wide = x.to(accumulation_dtype(x.dtype))
    squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    normalised = wide * torch.rsqrt(squares.div_(x.shape[-1]).add_(epsilon_of(module)))
    return _scale_and_shift_last(normalised, grad, wanted, 1)


def _scale_and_shift_last(
    normalised: Tensor, grad: Tensor, wanted: Collection[str], dims: int
) -> dict[str, Given]:
    """``normalised`` is written over."""
    positions = grad.shape[1 : grad.dim() - dims]
    shape = (len(grad), *(positions or (1,)), grad.shape[grad.dim() - dims :].numel())
    out: dict[str, Given] = {}
    if "weight" in wanted:
        kind = torch.promote_types(normalised.dtype, grad.dtype)
        out["weight"] = SummedRows(normalised.to(kind).mul_(grad).reshape(shape))
    if "bias" in wanted:
        out["bias"] = SummedRows(grad.reshape(shape))
    return out


def group_norm_rule(
    module: nn.GroupNorm, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    if x.dtype == grad.dtype and x.dtype in (torch.float32, torch.float64):
        return _native_group_norm(module, x.contiguous(), grad.contiguous(), wanted)
    return _scale_and_shift_channels(
        F.group_norm(x, module.num_groups, eps=module.eps), grad, wanted
    )


def _native_group_norm(
    module: nn.GroupNorm, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """Autograd's routine, with the examples presented as further groups of one example: it sums
    over examples, not over groups.
    """
    b, channels = x.shape[:2]
    positions, groups = x.shape[2:].numel(), module.num_groups
    _, mean, scale = torch.native_group_norm(
        x, None, None, b, channels, positions, groups, module.eps
    )
    together = (1, b * channels, positions)
    # The routine insists on a weight, which only the input's gradient depends on.
    ones = x.new_ones(b * channels)
    _, weight, bias = torch.ops.aten.native_group_norm_backward(
        grad.view(together), x.view(together), mean.view(1, -1), scale.view(1, -1), ones,
        1, b * channels, positions, b * groups, [False, "weight" in wanted, "bias" in wanted],
    )  # fmt: skip
    found = {"weight": weight, "bias": bias}
    # The length of a channel's normalised values is at most that of its group's, all of length 1.
    spread = torch.linalg.vector_norm(grad.view(b, -1), dim=1).double()
    spread *= math.sqrt(positions * channels / groups)
    return {
        name: DirectGradients(found[name].view(b, channels), spread)
        for name in found
        if name in wanted
    }


def instance_norm_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    eps, wide = float(module.eps), accumulation_dtype(x.dtype)  # type: ignore[arg-type]
    scale, mean = torch.var_mean(x.flatten(2).to(wide), 2, correction=0)
    taken_off = grad.flatten(2) * mean.mul_(scale.add_(eps).rsqrt_()).unsqueeze(2)
    found = _scale_and_shift_channels(F.instance_norm(x, eps=eps), grad, wanted)
    return _less_means(found, spread_of_channels(taken_off, wide))


def _scale_and_shift_channels(
    normalised: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    out: dict[str, Given] = {}
    if "weight" in wanted:
        out["weight"] = of_channels(normalised * grad)
    if "bias" in wanted:
        out["bias"] = of_channels(grad)
    return out
