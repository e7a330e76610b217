"""Questions about a model's parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that hold parameters of their own, by name."""
    for name, layer in module.named_modules():
        if any(True for _ in layer.parameters(recurse=False)):
            yield name, layer


def has_trainable_params(module: nn.Module) -> bool:
    """Whether the layer itself holds a parameter that learns."""
    return any(p.requires_grad for p in module.parameters(recurse=False))


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that hold parameters of their own that learn, by name."""
    yield from (pair for pair in parametrized_modules(module) if has_trainable_params(pair[1]))


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that learn, by name."""
    yield from ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Whether any parameter learns."""
    return any(p.requires_grad for p in module.parameters(recurse))


def clone_module(module: nn.Module) -> nn.Module:
    """A copy."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """The layer of that name.

    Raises:
        AttributeError: where there is none.
    """
    return module.get_submodule(target)


def are_state_dict_equal(sd1: dict[str, Tensor], sd2: dict[str, Tensor]) -> bool:
    """Whether both have the same names, and about the same values."""
    return sd1.keys() == sd2.keys() and all(torch.allclose(sd1[name], sd2[name]) for name in sd1)
