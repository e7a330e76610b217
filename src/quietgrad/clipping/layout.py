"""Which modules are captured, and how: by a rule, or as a unit through the generic fallback."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quietgrad.clipping.rules import Rule, rule_for
from quietgrad.tensors import trainable_parameters

# Modules that use the parameters of their children without calling them.
_UNITS: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.RNNBase)

# Children that are called with inputs common to all examples (T5's table of relative positions): their parents are captured in their place.
_TABLES_OF_THEIR_PARENT = ("relative_attention_bias",)


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
    """All capture sites of a model, its trainable parameters (tied ones once), and the modules whose own parameters are all frozen."""

    sites: tuple[Site, ...]
    parameters: dict[str, nn.Parameter]
    frozen: tuple[nn.Module, ...] = ()


def layout_of(model: nn.Module) -> Layout:
    """Walks the model once; cheap enough to be done at every step, so freezing and unfreezing mid-run just works.

    Raises:
        ValueError: if the model has no trainable parameter.
    """
    parameters = trainable_parameters(model)
    name_of = {id(p): name for name, p in parameters.items()}
    sites: list[Site] = []
    frozen: list[nn.Module] = []
    inside_unit: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside_unit:
            continue
        tables = {local: child for local, child in module.named_children() if local in _TABLES_OF_THEIR_PARENT}
        inside_unit.update(id(table) for table in tables.values())
        unit = isinstance(module, _UNITS) or bool(getattr(module, "parametrizations", None))
        if unit:
            inside_unit.update(id(child) for child in module.modules())
        own = {
            local: name_of[id(p)]
            for local, p in module.named_parameters(recurse=unit, remove_duplicate=False)
            if id(p) in name_of
        }
        for table_name, table in tables.items():
            own |= {f"{table_name}.{n}": name_of[id(p)] for n, p in table.named_parameters() if id(p) in name_of}
        if own:
            sites.append(Site(name, module, own, None if unit else rule_for(module)))
        elif any(True for _ in module.parameters(recurse=False)):
            frozen.append(module)
    return Layout(tuple(sites), parameters, tuple(frozen))
