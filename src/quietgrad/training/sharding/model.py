"""The model of a run with ``training.sharded``: a shard of every parameter on each process (torch's
``fully_shard``), and whole again, on the first one, to be saved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from quietgrad.distributed.together import Together
from quietgrad.tensors import whole_of
from quietgrad.training.prepare import Prepared


@dataclass(frozen=True)
class ShardedModel:
    """A model that was sharded in place.

    Attributes:
        model: with a shard of every parameter.
        outline: a copy from before, without the parameters' memory.
    """

    model: nn.Module
    outline: nn.Module

    def whole(self, here: bool) -> nn.Module:
        """The outline with all weights, in the machine's memory. All ranks come here: they gather
        one parameter at a time.

        Args:
            here: whether this process keeps them; elsewhere the outline stays empty.
        """
        places = dict(self.outline.named_parameters())
        for name, p in self.model.named_parameters():
            found = whole_of(p)
            if here:
                places[name].data = found.detach().cpu()
        return self.outline


def shards_of(prepared: Prepared, together: Together) -> ShardedModel | None:
    """The run's model, sharded in place over the processes where the configuration asks for it and
    there are several.
    """
    if not prepared.config.training.sharded or together.size == 1:
        return None
    return sharded(prepared.model.classifier, prepared.device.type)


def sharded(model: nn.Module, device: str) -> ShardedModel:
    """Shards a model in place, over all ranks of the process group: blocks of layers one by one,
    and together what is left (an embedding may be the output layer).

    Args:
        model: whole, alike on all ranks.
        device: kind of the ranks' devices.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    outline = _outline_of(model)
    # Parameters are put away after every pass, those of the outermost module too: after an
    # evaluation, which no backward pass follows, they would otherwise stay gathered, and old.
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (dist.get_world_size(),)),
        "reshard_after_forward": True,
    }
    outermost = _outermost(model)
    for block in _blocks_of(outermost):
        fully_shard(block, **options)
    fully_shard(outermost, **options)
    return ShardedModel(model, outline)


def _outermost(model: nn.Module) -> nn.Module:
    """A transformer that has all parameters, as it is called by itself, and not through what is
    around it, when it writes text; else the model. (fully_shard changes a module's class, by which
    transformers finds out whether to give a head the states of all layers.)
    """
    inner: Any = getattr(model, "encoder", model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    held = {id(p) for p in inner.parameters()}
    return inner if all(id(p) in held for p in model.parameters()) else model


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules that hold parameters."""
    for child in module.children():
        if not isinstance(module, nn.ModuleList) or isinstance(child, nn.ModuleList):
            yield from _blocks_of(child)
        elif any(True for _ in child.parameters()):
            yield child


def _outline_of(model: nn.Module) -> nn.Module:
    empty: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(0, dtype=p.dtype), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, empty)
