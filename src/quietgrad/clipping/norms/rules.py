"""Per-layer rules: from a module's input and the gradient at its output to per-example gradients in
factored form.

A rule is a function (module, input, output_gradient, parameter names wanted) -> {own parameter
name: contribution}. Inputs and output gradients have examples first. Without one: ``fallback``.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping.norms.factors import (
    ConvolutionFactors,
    DenseFactors,
    DirectGradients,
    Geometry,
    Given,
    OneHotFactors,
    SummedRows,
)
from quietgrad.clipping.norms.factors.extents import sum_by_extent
from quietgrad.clipping.norms.factors.sums.elementwise import norms_of_rows, spread_of_channels
from quietgrad.tensors import accumulation_dtype, is_spread, local_of, plain_type

# The module is of the rule's own type.
Rule = Callable[[Any, Tensor, Tensor, Collection[str]], Mapping[str, Given]]


def linear_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """y = x W^T + b: M_i = G_i^T A_i."""
    return _affine(x, grad, wanted, transposed=False)


def transposed_linear_rule(
    module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """Hugging Face ``Conv1D``, y = x W + b: M_i = A_i^T G_i."""
    return _affine(x, grad, wanted, transposed=True)


def _affine(x: Tensor, grad: Tensor, wanted: Collection[str], transposed: bool) -> dict[str, Given]:
    b = x.shape[0]
    a_bgtd = x.reshape(b, 1, -1, x.shape[-1])
    g_bgtp = grad.reshape(b, 1, -1, grad.shape[-1])
    sizes = tuple(x.shape[1:-1]) if x.dim() > 3 else ()
    out: dict[str, Given] = {}
    if "weight" in wanted:
        a_bgtd, g_bgtp = _of_some_position(a_bgtd), _of_some_position(g_bgtp)
        factors = (a_bgtd, g_bgtp) if transposed else (g_bgtp, a_bgtd)
        out["weight"] = DenseFactors(*factors, sizes)
    if "bias" in wanted:
        out["bias"] = SummedRows(grad.unsqueeze(1), "right" if transposed else "left")
    return out


def _of_some_position(factor_bgtn: Tensor) -> Tensor:
    """Where texts are all empty, one position of zeros: sums over none have no place to begin."""
    return factor_bgtn if factor_bgtn.shape[2] else F.pad(factor_bgtn, (0, 0, 0, 1))


def embedding_rule(
    module: nn.Embedding | nn.EmbeddingBag, ids: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    """y_t = W[id_t]: M_i = onehot(ids)^T G_i, positions that read ``padding_idx`` left out, as
    autograd does.
    """
    b = ids.shape[0]
    ids_bt = ids.reshape(b, -1)
    g_btd = grad.reshape(b, ids_bt.shape[1], grad.shape[-1])
    if not ids_bt.shape[1]:
        ids_bt, g_btd = F.pad(ids_bt, (0, 1)), F.pad(g_btd, (0, 0, 0, 1))
    if module.padding_idx is not None:
        g_btd = g_btd * (ids_bt != module.padding_idx).unsqueeze(-1)
    return {"weight": OneHotFactors(ids_bt, g_btd.unsqueeze(1), module.num_embeddings)}


def layer_norm_rule(
    module: nn.LayerNorm, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> dict[str, Given]:
    shape, wide = module.normalized_shape, x.to(accumulation_dtype(x.dtype))
    normalised, mean, scale = torch.native_layer_norm(wide, shape, None, None, module.eps)
    rows = grad.flatten(grad.dim() - len(shape))
    norms = norms_of_rows(rows, accumulation_dtype(grad.dtype))
    taken_off = norms * (mean * scale).view(norms.shape)
    taken_off = taken_off.reshape(len(grad), norms.shape[1:].numel())
    found = _scale_and_shift_last(normalised, grad, wanted, len(shape))
    if "bias" in found:
        found["bias"] = SummedRows(rows if rows.dim() > 2 else rows.unsqueeze(1), norms=norms)
    return _less_means(found, torch.linalg.vector_norm(taken_off, 1, 1, dtype=torch.float64))


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
    normalised = wide * torch.rsqrt(squares.div_(x.shape[-1]).add_(_epsilon_of(module)))
    return _scale_and_shift_last(normalised, grad, wanted, 1)


def _epsilon_of(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0.0)


# Class -> whether its forward pass is one of the two formulas; found out by running a copy once.
_is_scaled_rms_norm: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _behaves_like_rms_norm(module: nn.Module) -> bool:
    kind = plain_type(module)
    own = dict(module.named_parameters())
    if set(own) != {"weight"} or own["weight"].dim() != 1 or any(True for _ in module.children()):
        return False
    if "rmsnorm" not in kind.__name__.lower().replace("_", "") and not kind.__name__.endswith(
        "LayerNorm"
    ):
        return False
    if kind not in _is_scaled_rms_norm:
        probe = _probe_of(module)
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            weight = torch.randn(own["weight"].shape, generator=source)
            probe.weight.copy_(weight)  # type: ignore[operator]
            x = torch.randn(2, 3, len(weight), generator=source)
            normalised = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + _epsilon_of(module))
            try:
                y = probe(x)
            except Exception:  # a forward pass that takes more than x is simply not one of these
                y = None
        same = isinstance(y, Tensor) and y.shape == x.shape
        _is_scaled_rms_norm[kind] = same and any(
            torch.allclose(y, scale * normalised, rtol=1e-4, atol=1e-5)
            for scale in (weight, 1 + weight)
        )
    return _is_scaled_rms_norm[kind]


def _probe_of(module: nn.Module) -> nn.Module:
    """A copy in float32 on the processor; of a module whose weight is spread over ranks, one with a
    plain weight, and without the hooks that gather it.
    """
    weight = dict(module.named_parameters())["weight"]
    if not is_spread(weight):
        return copy.deepcopy(module).cpu().float()
    kind = plain_type(module)
    probe = kind.__new__(kind)
    hooks = {name: OrderedDict[int, Any]() for name in vars(module) if name.endswith("_hooks")}
    vars(probe).update(vars(module) | hooks)
    vars(probe)["_parameters"] = {"weight": nn.Parameter(torch.empty(weight.shape))}
    return probe


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
        out["weight"] = _of_channels(normalised * grad)
    if "bias" in wanted:
        out["bias"] = _of_channels(grad)
    return out


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
        out["bias"] = _of_channels(grad)
    return out


def _of_channels(x: Tensor) -> DirectGradients:
    """[b, channels, *positions] -> [b, channels]"""
    dtype = accumulation_dtype(x.dtype)
    summed = sum_by_extent(x, range(2, x.dim()), lambda some: some.flatten(2).sum(2, dtype=dtype))
    return DirectGradients(summed, spread_of_channels(x, dtype))


_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_rule,
    nn.Embedding: embedding_rule,
    nn.LayerNorm: layer_norm_rule,
    nn.RMSNorm: rms_norm_rule,
    nn.GroupNorm: group_norm_rule,
    nn.InstanceNorm1d: instance_norm_rule,
    nn.InstanceNorm2d: instance_norm_rule,
    nn.InstanceNorm3d: instance_norm_rule,
    nn.Conv1d: convolution_rule,
    nn.Conv2d: convolution_rule,
    nn.Conv3d: convolution_rule,
}


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a module's exact type; subclasses may change the forward pass and so go through
    the fallback.

    A parameter that is recomputed from others (``torch.nn.utils.parametrize``) has no rule either.
    """
    if getattr(module, "parametrizations", None):
        return None
    kind = plain_type(module)
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return linear_rule
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return transposed_linear_rule
    if (
        kind not in _RULES
        and kind.__module__.startswith("transformers.")
        and _behaves_like_rms_norm(module)
    ):
        return scaled_rms_norm_rule
    return _RULES.get(kind)


def rules_now() -> tuple[object, ...]:
    """All kinds that have a rule, with it: users may add to them."""
    return tuple(_RULES.items())


def kept_input(rule: Rule | None, wanted: Collection[str], x: Tensor) -> Tensor:
    """What is kept of an input until the backward pass; of what is spread over ranks, what is here.
    A bias alone needs its shape, as to autograd: where the weight is frozen it may be written into.
    """
    x = local_of(x)
    if "weight" in wanted or rule not in (linear_rule, transposed_linear_rule, convolution_rule):
        return x.detach()
    return x.new_zeros(()).expand(x.shape)


def batched_dims(module: nn.Module) -> int | None:
    """Dimensions that an input must have to carry examples first; None where any will do."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return len(module.kernel_size) + 2
    return 1 if isinstance(module, nn.Embedding) else 2
