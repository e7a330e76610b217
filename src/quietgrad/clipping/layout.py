"""Which modules are captured, and how: by a rule, or as a unit through the generic fallback."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quietgrad.clipping.rules import Rule, rule_for
from quietgrad.tensors import trainable_parameters

# Modules that use the parameters of their children without calling them.
_UNITS: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.RNNBase)


@dataclass(frozen=True)
class Site:
    """One module whose uses are captured.

    Attributes:
        name: the module's dotted name.
        module: the module.
        parameters: local parameter name -> name in the model, trainable ones only.
        rule: how to factor its per-example gradients; None means the generic fallback.
    """

    name: str
    module: nn.Module
    parameters: dict[str, str]
    rule: Rule | None


@dataclass(frozen=True)
class Layout:
    """All capture sites of a model and its trainable parameters (tied ones once)."""

    sites: tuple[Site, ...]
    parameters: dict[str, nn.Parameter]


def layout_of(model: nn.Module) -> Layout:
    """Walks the model once; cheap enough to be done at every step, so freezing and unfreezing mid-run just works.

    Raises:
        ValueError: if the model has no trainable parameter.
    """
    parameters = trainable_parameters(model)
    name_of = {id(p): name for name, p in parameters.items()}
    sites: list[Site] = []
    inside_unit: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside_unit:
            continue
        unit = isinstance(module, _UNITS) or bool(getattr(module, "parametrizations", None))
        if unit:
            inside_unit.update(id(child) for child in module.modules())
        own = {
            local: name_of[id(p)]
            for local, p in module.named_parameters(recurse=unit, remove_duplicate=False)
            if id(p) in name_of
        }
        if own:
            sites.append(Site(name, module, own, None if unit else rule_for(module)))
    return Layout(tuple(sites), parameters)
