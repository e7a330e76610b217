"""Models that cannot be clipped per example are refused by name, with the remedy, before any work
starts.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy


def refuse_cross_example_layers(model: nn.Module) -> None:
    """Raises for layers whose output for one example depends on other examples, or that change the
    gradient's bound.

    Raises:
        ValueError: naming the layer, its type and the remedy.
    """
    for name, module in model.named_modules():
        if any(is_lazy(p) for p in module._parameters.values()):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) has no weights yet: it makes them when "
                "the first record comes; call the model once on a made-up record before the run"
            )
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


def replace_batch_norm(model: nn.Module, groups: int = 16) -> nn.Module:
    """Replaces every BatchNorm layer of ``model``, in place, by a GroupNorm of the same width.

    Args:
        model: changed in place.
        groups: number of groups wanted; the largest divisor of the channel count not above it is
            used.

    Returns:
        The model, or a new GroupNorm where the model itself is a BatchNorm layer.
    """
    if isinstance(model, nn.modules.batchnorm._BatchNorm):
        channels = model.num_features
        fitting = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
        norm = nn.GroupNorm(fitting, channels, eps=model.eps, affine=model.affine)
        if model.affine:
            norm.load_state_dict({"weight": model.weight.detach(), "bias": model.bias.detach()})
        return norm.to(next(model.parameters()).device) if model.affine else norm
    for name, child in model.named_children():
        setattr(model, name, replace_batch_norm(child, groups))
    return model
