"""Which module has which rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from quietgrad.clipping.norms.factors import Given
from quietgrad.clipping.norms.rules.convolutions import convolution_rule
from quietgrad.clipping.norms.rules.linear import (
    embedding_rule,
    linear_rule,
    transposed_linear_rule,
)
from quietgrad.clipping.norms.rules.normalisations import (
    group_norm_rule,
    instance_norm_rule,
    layer_norm_rule,
    rms_norm_rule,
    scaled_rms_norm_rule,
)
from quietgrad.clipping.norms.rules.rms_norms import behaves_like_rms_norm
from quietgrad.tensors import local_of, plain_type

# The module is of the rule's own type.
Rule = Callable[[Any, Tensor, Tensor, Collection[str]], Mapping[str, Given]]

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

    A parameter that is recomputed from others (``torch.nn.utils.parametrize``) has no rule either;
    of older ways (``weight_norm``, ``prune``) a plain tensor stands in its place.
    """
    if getattr(module, "parametrizations", None):
        return None
    if any(isinstance(vars(module).get(name), Tensor) for name in ("weight", "bias")):
        return None
    kind = plain_type(module)
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return linear_rule
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return transposed_linear_rule
    if (
        kind not in _RULES
        and kind.__module__.startswith("transformers.")
        and behaves_like_rms_norm(module)
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
