"""Models that cannot be clipped per example are refused by name, with the remedy, before any work
starts.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from quietgrad.clipping.capture.layout.modules import named_modules_of, named_parameters_of
from quietgrad.clipping.soundness.company.quantized import refuse_quantized


def refuse_cross_example_layers(model: nn.Module) -> None:
    """Raises for layers whose output for one example depends on other examples, or that change the
    gradient's bound.

    Raises:
        ValueError: naming the layer, its type and the remedy.
    """
    for name, module in named_modules_of(model):
        if any(p is not None and is_lazy(p) for p in module._parameters.values()):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) has no weights yet: it makes them when "
                "the first record comes; call the model once on a made-up record before the run"
            )
        refuse_quantized(name, module)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            frozen = (
                not module.training
                and module.track_running_stats
                and not any(p.requires_grad for p in module.parameters())
            )
            if not frozen:
                raise ValueError(
                    f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so "
                    "no per-example gradient exists; "
                    "replace it by nn.GroupNorm (quietgrad.clipping.replace_batch_norm(model) "
                    "does), "
                    "or freeze it: eval() and requires_grad_(False)"
                )
        if (
            isinstance(module, nn.modules.instancenorm._InstanceNorm)
            and module.track_running_stats
            and module.training
        ):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) keeps running statistics of private "
                "data without noise; "
                "build it with track_running_stats=False"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.requires_grad:
            if module.max_norm is not None:
                raise ValueError(
                    f"layer {name!r} ({type(module).__name__}) has max_norm={module.max_norm}: it "
                    "rewrites its weights during the forward "
                    "pass, outside the privacy mechanism; build it with max_norm=None"
                )
            if module.scale_grad_by_freq:
                raise ValueError(
                    f"layer {name!r} ({type(module).__name__}) has scale_grad_by_freq=True, which "
                    "mixes the examples of a batch; "
                    "build it with scale_grad_by_freq=False"
                )
            if module.sparse:
                raise ValueError(
                    f"layer {name!r} ({type(module).__name__}) has sparse=True; noise is dense: "
                    "build it with sparse=False"
                )


def refuse_model(model: nn.Module) -> None:
    """Raises for layers that mix examples, hooks that see gradients before their noise, and
    parameters that the noise is not made for.
    """
    refuse_cross_example_layers(model)
    refuse_hooked_parameters(model)
    refuse_numbers_without_noise(model)


def refuse_numbers_without_noise(model: nn.Module) -> None:
    """Raises where a trained parameter is complex or no plain tensor: norms and noise are of real
    numbers, one by one.

    Raises:
        ValueError: naming the parameter, with the remedy.
    """
    for name, parameter in named_parameters_of(model):
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} is of the dtype {parameter.dtype}, and noise is of real "
                "numbers; keep real and imaginary parts as real numbers in a last dimension of "
                "two, and use torch.view_as_complex(parameter) in forward (or freeze it)"
            )
        if parameter.requires_grad and parameter.layout is not torch.strided:
            raise ValueError(
                f"parameter {name!r} has the layout {parameter.layout}, and noise is dense; use "
                "its to_dense() as the parameter (or freeze it)"
            )


GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OWN = "quietgrad."  # modules whose hooks read no gradient: a run's loop has one (plan.session)


def hooks_on(parameter: torch.Tensor) -> list[Any]:
    """Hooks on a parameter's gradient, but for the library's own."""
    found = [getattr(parameter, name, None) for name in GRADIENT_HOOKS]
    if not any(found):  # nearly always, and for every parameter of every step
        return []
    hooks = [hook for hooks in found if hooks for hook in hooks.values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(OWN)]


def refuse_hooked_parameters(model: nn.Module) -> None:
    """Raises where a trained parameter has hooks on its gradient. Loggers hang there
    (``wandb.watch``), and so do optimisers that step within the backward pass: both would meet
    gradients before their noise, and what was released passes them by.

    Raises:
        ValueError: naming the parameter, with the remedy.
    """
    for name, parameter in named_parameters_of(model):
        if parameter.requires_grad and hooks_on(parameter):
            raise ValueError(
                f"parameter {name!r} has a hook on its gradient, which would see gradients before "
                "their noise, and not what is released; remove it (a logger's "
                "watch(log='gradients'), or an optimizer that steps in the backward pass), and "
                "read or change .grad after run.backward"
            )


def require_model(model: Any) -> None:
    """Refuses what is no model, such as the loss in its place.

    Raises:
        TypeError: saying in which order they are given.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is of type {type(model).__name__}, and no torch.nn.Module; the order is "
            "(model, per_example_loss, batch)"
        )


def require_loss(per_example_loss: Any) -> None:
    """Refuses what is no function in a loss's place.

    Raises:
        TypeError: saying what a loss is.
    """
    if not callable(per_example_loss):
        raise TypeError(
            f"per_example_loss is of type {type(per_example_loss).__name__}, and no function; give "
            "one of (model, batch) that returns a loss for each example"
        )


def refuse_calling_loop(model: nn.Module) -> None:
    """Refuses loops that would step otherwise than once a release, or scale what was released, by
    what the functions that called the library name. For the message: both are stopped later too, by
    errors of torch's own, when a release was made in vain. No guarantee rests on it.

    Args:
        model: the one that is to be clipped.

    Raises:
        ValueError: naming what was met, and the remedy.
    """
    own = {id(p) for p in model.parameters()}
    for thing in named_by_callers(sys._getframe(1)):
        kind = type(thing)  # isinstance asks a proxy for what it stands for, which may be gone
        if issubclass(kind, torch.optim.LBFGS) and any(
            id(p) in own for group in thing.param_groups for p in group["params"]
        ):
            raise ValueError(
                "optimizer is LBFGS, which asks for the gradient of a batch several times a step, "
                "and every one would be a release; use an optimiser that steps once a gradient "
                "(torch.optim.AdamW, SGD)"
            )
        if issubclass(kind, torch.amp.GradScaler) and thing.is_enabled():
            raise ValueError(
                "the training loop has a GradScaler, which would divide what was released by a "
                "scale that it never had: gradients are clipped to max_grad_norm, and do not "
                "vanish; leave it out, call optimizer.step(), and use torch.autocast with bfloat16 "
                "inside the loss (a GradScaler of another model: put that loop into a function of "
                "its own)"
            )


def named_by_callers(frame: FrameType | None) -> Iterator[Any]:
    """Values of the names in the code of functions that are running, but for the library's own."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("quietgrad."):
            code, held = frame.f_code, frame.f_locals
            for name in {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}:
                thing = held.get(name, frame.f_globals.get(name))
                yield thing
                if not issubclass(type(thing), ModuleType):  # self.scaler, where that is named
                    named = _held_by(thing)
                    yield from (named[other] for other in code.co_names if other in named)
                if type(thing).__module__.startswith("accelerate."):  # holds both, where asked to
                    yield from (getattr(thing, "scaler", None), getattr(thing, "optimizer", None))
        frame = frame.f_back


def _held_by(thing: Any) -> dict[str, Any]:
    """Attributes of an object; none of one that raises instead (a proxy, a lazy object)."""
    try:
        inside = getattr(thing, "__dict__", None)
        return inside if isinstance(inside, dict) else {}
    except Exception:
        return {}


_BatchNorm = nn.modules.batchnorm._BatchNorm


def replace_batch_norm(model: nn.Module, groups: int = 16) -> nn.Module:
    """Replaces every BatchNorm layer of ``model``, in place, by a GroupNorm of the same width, with
    its scale and shift. What a layer of another library does after it has normalised, by modules of
    its own one after the other (an activation inside it), follows the GroupNorm.

    Args:
        model: changed in place.
        groups: number of groups wanted; the largest divisor of the channel count that is not above
            it is used, and not above half of them: of a vector, or a map of one pixel, a group of
            one channel is a number that is normalized by itself.

    Returns:
        The model, or what stands for it where the model itself is a BatchNorm layer.

    Raises:
        ValueError: naming a layer that does something else beside normalising, or has no width yet;
            nothing is replaced then.
    """
    return with_group_norms(model, lambda channels: min(groups, channels // 2))


def with_group_norms(model: nn.Module, groups_of: Callable[[int], int]) -> nn.Module:
    """``replace_batch_norm``; ``groups_of``: channels to the number of groups wanted."""
    layers = {id(m): (name, m) for name, m in named_modules_of(model) if isinstance(m, _BatchNorm)}
    made = {
        known: _group_norm(name, layer, groups_of(layer.num_features))
        for known, (name, layer) in layers.items()
    }
    for module in list(model.modules()):
        for local, child in module._modules.items():  # a layer may stand in several places
            if id(child) in made and id(module) not in made:
                setattr(module, local, made[id(child)])
    return made.get(id(model), model)


def _group_norm(name: str, layer: _BatchNorm, groups: int) -> nn.Module:
    channels, after = layer.num_features, list(layer.children())
    if not channels or not _normalises_first(layer, after):
        kind = type(layer).__name__
        raise ValueError(
            f"layer {name!r} ({kind}) "
            + (
                "does more than normalise, and what that is cannot be told: put a module in its "
                f"place that has an nn.GroupNorm and then does what {kind}.forward does"
                if channels
                else "has no width yet: call the model once on a made-up record before"
            )
        )
    most = channels // 2 if isinstance(layer, nn.BatchNorm1d) else channels
    wanted = range(1, max(1, min(groups, most)) + 1)
    fitting = max(g for g in wanted if channels % g == 0)
    norm = nn.GroupNorm(fitting, channels, eps=layer.eps, affine=layer.affine)
    norm.train(layer.training)
    if layer.affine:
        norm.to(layer.weight)
        norm.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
        for local, p in norm.named_parameters():
            p.requires_grad_(getattr(layer, local).requires_grad)
    return nn.Sequential(norm, *after) if after else norm


def _normalises_first(layer: _BatchNorm, after: list[nn.Module]) -> bool:
    """Whether a layer normalises and then calls its own modules one after the other, as a copy of
    it does with statistics and records that are made up.
    """
    if not after and type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return True
    copied, source = copy.deepcopy(layer).cpu().float().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("running_mean", "running_var", "weight", "bias"):
            if (known := getattr(copied, name)) is not None:
                known.copy_(torch.rand(known.shape, generator=source, device="cpu") + 0.5)
        for sizes in ((3, 2), (3,), (2, 3, 2)):  # of images, vectors and volumes
            x = torch.randn(2, layer.num_features, *sizes, generator=source, device="cpu")
            try:
                found = copied(x.clone())
            except Exception:  # of other dimensions
                continue
            expected = nn.functional.batch_norm(
                x, copied.running_mean, copied.running_var, copied.weight, copied.bias,
                copied.running_mean is None, 0.0, copied.eps,
            )  # fmt: skip
            for module in copied.children():
                expected = module(expected)
            return isinstance(found, torch.Tensor) and torch.allclose(found, expected, atol=1e-5)
    return False
