"""Which modules are captured, and how: by a rule, or as a unit through the generic fallback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.cut import Cut
from quietgrad.clipping.capture.layout.modules import named_modules_of
from quietgrad.clipping.capture.spread import Spread
from quietgrad.clipping.capture.units import PLAIN, Unit, first_dimension, unit_of
from quietgrad.clipping.norms.rules.registry import Rule, rule_for, rules_now
from quietgrad.tensors import is_spread, local_of, received, trainable_parameters

# Children that are called with inputs common to all examples (T5's table of relative positions):
# their parents are captured in their place.
_TABLES_OF_THEIR_PARENT = ("relative_attention_bias",)


@dataclass(frozen=True)
class Site:
    """One module whose uses are captured.

    Attributes:
        name: the module's dotted name.
        module: the module.
        parameters: local parameter name -> name in the model, trainable ones only.
        rule: how to factor its per-example gradients; None means the generic fallback.
        unit: where its inputs and outputs carry examples, without a rule.
    """

    name: str
    module: nn.Module
    parameters: dict[str, str]
    rule: Rule | None
    unit: Unit = PLAIN


@dataclass
class SharedInputs:
    """Tensor arguments of modules without a rule that were ever seen without the example as first
    dimension: all examples share them.

    A table of [positions, features] has the batch size as its first dimension when there happen to
    be as many examples as positions. It must not
    be taken apart then: what is shared in one pass is shared in every pass. The guard's passes over
    one example come before anything is clipped.

    Attributes:
        known: (site, structure of its arguments, place among them).
        ways: parameter name -> in how many blocks its modules use it, 0 for gradients that are
            formed (``engines/ways.py``).
    """

    known: set[tuple[str, str, int]] = field(default_factory=set)
    ways: dict[str, int] = field(default_factory=dict)

    def places(
        self, site: str, leaves: Sequence[object], spec: object, examples: int
    ) -> frozenset[int]:
        """Places of the shared arguments of a call, after this call is noted; a first dimension of
        1 says nothing.
        """
        structure = f"{len(leaves)} in order" if spec is None else repr(spec)
        for place, leaf in enumerate(leaves):
            if first_dimension(leaf) not in (-1, 1, examples):
                self.known.add((site, structure, place))
        return frozenset(
            place for place in range(len(leaves)) if (site, structure, place) in self.known
        )


@dataclass(frozen=True)
class Layout:
    """All capture sites of a model, its trainable parameters (tied ones once), and the modules
    whose own parameters are all frozen.

    Attributes:
        shared: what was found out about the arguments of modules without a rule.
        spread: where parameters are spread over ranks.
        cut: where layers are cut over ranks, which all run the same records.
    """

    sites: tuple[Site, ...]
    parameters: dict[str, nn.Parameter]
    frozen: tuple[nn.Module, ...] = ()
    shared: SharedInputs = field(default_factory=SharedInputs)
    spread: Spread | None = None
    cut: Cut | None = None

    @cached_property
    def owners(self) -> dict[str, list[Site]]:
        """Parameter name -> the modules that use it."""
        owners: dict[str, list[Site]] = {}
        for site in self.sites:
            for name in site.parameters.values():
                owners.setdefault(name, []).append(site)
        return owners

    def shape_of(self, name: str) -> torch.Size:
        """Of what is formed here of a parameter's gradient."""
        return self.parameters[name].shape if self.cut is None else self.cut.shapes[name]

    def here(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """What is here of a gradient of autograd's; where layers are cut, all ranks ask alike."""
        if gradient is None or self.cut is None or not is_spread(gradient):
            return gradient
        like: Any = self.in_graph(name)
        spread: Any = gradient
        with torch.no_grad():
            return received(local_of(spread.redistribute(placements=like.placements)))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A pass of the model, with its backward pass where there is one."""
        return contextlib.nullcontext() if self.spread is None else self.spread.running()

    def in_graph(self, name: str) -> Tensor | None:
        """What stands for a parameter in the graph of a pass; None where it was never gathered, so
        that no loss depends on it.
        """
        parameter = self.parameters[name]
        if self.spread is None or not is_spread(parameter):
            return parameter
        return self.spread.whole.get(name)


def layout_of(
    model: nn.Module,
    shared: SharedInputs | None = None,
    spread: Spread | None = None,
    cut: Cut | None = None,
) -> Layout:
    """Walks the model once; cheap enough to be done at every step, so freezing and unfreezing
    mid-run just works.

    Args:
        model: the user's.
        shared: what was found out earlier; None: nothing.
        spread: where parameters are spread over ranks.
        cut: where layers are cut over ranks.

    Raises:
        ValueError: if the model has no trainable parameter, or a layer that is cut has no rule.
    """
    parameters = trainable_parameters(model)
    name_of = {id(p): name for name, p in parameters.items()}
    sites: list[Site] = []
    frozen: list[nn.Module] = []
    inside_unit: set[int] = set()
    for name, module in named_modules_of(model):
        if id(module) in inside_unit:
            continue
        tables = {
            local: child
            for local, child in module._modules.items()
            if local in _TABLES_OF_THEIR_PARENT and child is not None
        }
        inside_unit.update(id(table) for table in tables.values())
        unit = unit_of(module)
        whole = unit.whole or bool(getattr(module, "parametrizations", None))
        if whole:
            inside_unit.update(id(child) for child in module.modules())
        own = {
            local: name_of[id(p)] for local, p in _parameters_of(module, whole) if id(p) in name_of
        }
        for table_name, table in tables.items():
            own |= {
                f"{table_name}.{n}": name_of[id(p)]
                for n, p in table.named_parameters()
                if id(p) in name_of
            }
        if own:
            rule = None if whole else rule_for(module)
            if cut is not None:
                rule = cut.rule(name, module, rule)
            sites.append(Site(name, module, own, rule, unit))
        elif any(p is not None for p in module._parameters.values()):
            frozen.append(module)
    return Layout(
        tuple(sites),
        parameters,
        tuple(frozen),
        SharedInputs() if shared is None else shared,
        spread,
        cut,
    )


@dataclass
class Layouts:
    """The last layout of a model, for as long as there are the same modules, of the same classes,
    with the same parameters by the same names, of which the same are trained.
    """

    _marks: list[object] = field(default_factory=list, repr=False)
    _of: tuple[object, Layout] | None = field(default=None, repr=False)

    def of(self, model: nn.Module, shared: SharedInputs) -> Layout:
        """As ``layout_of``."""
        modules = named_modules_of(model)
        marks: list[object] = [*rules_now(), id(shared)]
        parameters: list[Tensor] = []
        for path, module in modules:
            marks += (path, id(module), type(module))
            if module._parameters:
                own = [(local, p) for local, p in module._parameters.items() if p is not None]
                marks += [(local, id(p), p.requires_grad) for local, p in own]
                parameters += [p for _, p in own]
        if self._of is None or marks != self._marks:
            # What is marked by its number lives on, so that nothing else can have it.
            self._of = (shared, modules, parameters), layout_of(model, shared)
            self._marks = marks
        return self._of[1]


def _parameters_of(module: nn.Module, whole: bool) -> Iterable[tuple[str, Tensor | None]]:
    """A module's own, and those below it where it is captured ``whole``; shared ones each time."""
    if whole:
        return module.named_parameters(remove_duplicate=False)
    return module._parameters.items()


def in_graph(layout: Layout) -> dict[str, Tensor]:
    """Parameter name -> what stands for it in the graph of a pass, where anything does."""
    found = {name: layout.in_graph(name) for name in layout.parameters}
    return {name: p for name, p in found.items() if p is not None}
