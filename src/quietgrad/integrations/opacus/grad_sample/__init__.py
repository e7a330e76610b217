"""The private model under Opacus' name for its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import BY_AUTOGRAD, ONE_PROCESS
from quietgrad.integrations.opacus.grad_sample.attached import AttachedModule
from quietgrad.integrations.opacus.grad_sample.grad_sample_module import GradSampleModule

AbstractGradSampleModule = GradSampleModule
GradSampleModuleFastGradientClipping = GradSampleModule
GradSampleModuleExpandedWeights = GradSampleModule
GradSampleHooks = AttachedModule

__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "AbstractGradSampleHooks",
            "GradSampleHooksFastGradientClipping",
            "GradSampleHooksNoOp",
            "GradSampleModuleNoOp",
            "create_or_accumulate_grad_sample",
            "get_gsm_class",
            "prepare_module",
            "wrap_model",
            *(
                f"compute_{layer}_grad_sample"
                for layer in (
                    "conv",
                    "embedding",
                    "group_norm",
                    "instance_norm",
                    "layer_norm",
                    "linear",
                    "rms_norm",
                    "rnn_linear",
                    "sequence_bias",
                )
            ),
        ),
        BY_AUTOGRAD,
    )
    | dict.fromkeys(
        (
            f"GradSample{kind}FastGradientClipping{spread}"
            for kind in ("Hooks", "Module")
            for spread in ("FSDP", "TP")
        ),
        ONE_PROCESS,
    ),
)
_F = TypeVar("_F", bound=Callable[..., Any])


def register_grad_sampler(target: Any) -> Callable[[_F], _F]:
    """For scripts that say how a layer's gradients by records are made: here every layer's are made
    by autograd, whatever the function would return, so a wrong one does no harm.

    Args:
        target: a layer's class, or several.

    Returns:
        A decorator that changes nothing.
    """
    return lambda function: function


register_norm_sampler = register_grad_sampler

__all__ = [
    "AbstractGradSampleModule",
    "GradSampleHooks",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleFastGradientClipping",
    "register_grad_sampler",
    "register_norm_sampler",
]
