"""Validators and fixers of a script's own layers. What they let through is looked at by the
clipper's guard all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

_F = TypeVar("_F", bound=Callable[..., Any])

VALIDATORS: dict[type[nn.Module], Callable[[Any], list[Any]]] = {}
FIXERS: dict[type[nn.Module], Callable[..., nn.Module]] = {}


def _classes(target: Any) -> Sequence[type[nn.Module]]:
    return target if isinstance(target, list | tuple) else [target]


def register_module_validator(target: Any) -> Callable[[_F], _F]:
    """A decorator for a function from a layer to a list of errors.

    Args:
        target: the layer's class, or several.
    """

    def keep(function: _F) -> _F:
        VALIDATORS.update(dict.fromkeys(_classes(target), function))
        return function

    return keep


def register_module_fixer(target: Any) -> Callable[[_F], _F]:
    """A decorator for a function from a layer to one that stands for it.

    Args:
        target: the layer's class, or several.
    """

    def keep(function: _F) -> _F:
        FIXERS.update(dict.fromkeys(_classes(target), function))
        return function

    return keep
