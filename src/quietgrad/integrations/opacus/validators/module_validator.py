"""Models are examined, and mended, under Opacus' name for it."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import nn

from quietgrad.checks import require_at_least, require_int
from quietgrad.clipping.soundness.refusals import refuse_cross_example_layers, with_group_norms
from quietgrad.integrations.opacus.validators.errors import (
    IllegalModuleConfigurationError,
    ShouldReplaceModuleError,
    UnsupportedModuleError,
)
from quietgrad.integrations.opacus.validators.utils import FIXERS, VALIDATORS

GROUPS = 32


class ModuleValidator:
    """Says what keeps a model from being trained, and replaces what can be replaced."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """What is wrong, layer by layer.

        Args:
            module: the model.
            strict: raise instead of returning.

        Raises:
            UnsupportedModuleError: with ``strict``, naming the layers and the remedy.
        """
        errors: list[UnsupportedModuleError] = []
        if not module.training:
            errors.append(
                IllegalModuleConfigurationError(
                    "the model is in evaluation mode; call model.train() first"
                )
            )
        trainable = any(p.requires_grad for p in module.parameters())
        if not trainable:
            errors.append(
                IllegalModuleConfigurationError(
                    "the model has no trainable parameter; set requires_grad=True on some"
                )
            )
        for name, layer in module.named_modules():
            errors += VALIDATORS.get(type(layer), _nothing)(layer)
            if any(True for _ in layer.children()):
                continue
            try:
                refuse_cross_example_layers(layer)
            except ValueError as error:
                said = str(error).replace("layer ''", f"layer {name!r}")
                errors.append(ShouldReplaceModuleError(said))
        if errors and strict:
            raise UnsupportedModuleError(
                "; ".join(map(str, errors)) + " (ModuleValidator.fix replaces BatchNorm)"
            )
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether ``validate`` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(
        cls,
        module: nn.Module,
        replace_bn_with_in: bool = False,
        num_groups: int | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        """A copy with GroupNorm for BatchNorm, and InstanceNorm without running statistics. Weights
        of the norms are kept. Recurrent and attention layers stay: they are clipped as they are.

        Args:
            module: the model.
            replace_bn_with_in: InstanceNorm in place of GroupNorm.
            num_groups: of GroupNorm, as far as it divides the channels; None: what 32 and the
                channels have in common, as Opacus. BatchNorm1d gets at most half as many as it has
                channels: of a vector, one channel is one number.

        Raises:
            TypeError: for other options.
            ValueError: for both at once, and for a BatchNorm that does something else beside
                normalising (``replace_batch_norm``).
        """
        if kwargs:
            raise TypeError(f"fix has no option {sorted(kwargs)[0]!r}; leave it out")
        if num_groups is not None:
            require_int("num_groups", num_groups)
            require_at_least("num_groups", num_groups, 1, "leave it out")
            if replace_bn_with_in:
                raise ValueError(
                    "num_groups is of GroupNorm, and replace_bn_with_in=True asks for "
                    "InstanceNorm; give one of the two"
                )
        fixed = _fixed_by_the_script(copy.deepcopy(module))
        if replace_bn_with_in:
            fixed = _with_instance_norm(fixed)
        fixed = with_group_norms(fixed, lambda channels: num_groups or math.gcd(GROUPS, channels))
        for layer in fixed.modules():
            if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
                layer.track_running_stats = False
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    setattr(layer, name, None)
        return fixed

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """``fix``, then ``validate`` with ``strict``.

        Raises:
            UnsupportedModuleError: where replacing is not enough.
        """
        fixed = cls.fix(module, **kwargs)
        cls.validate(fixed, strict=True)
        return fixed


INSTANCE_NORMS: dict[type[Any], type[Any]] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}


def _with_instance_norm(module: Any) -> Any:
    kind = INSTANCE_NORMS.get(type(module))
    if kind is not None:
        norm = kind(module.num_features, eps=module.eps, affine=module.affine)
        norm.train(module.training)
        for name, p in module.named_parameters(recurse=False):
            setattr(norm, name, p)
        return norm
    for name, layer in module.named_children():
        setattr(module, name, _with_instance_norm(layer))
    return module


def _nothing(layer: nn.Module) -> list[UnsupportedModuleError]:
    return []


def _fixed_by_the_script(module: nn.Module) -> nn.Module:
    if type(module) in FIXERS:
        return FIXERS[type(module)](module)
    for name, layer in module.named_children():
        setattr(module, name, _fixed_by_the_script(layer))
    return module
