"""A causal language model as one of several devices has it that share each record (tensor
parallel): every layer cut by transformers' own plan. What such a device holds is counted as for
any other model; what it sends for every position is added up here.

Layers cut by their outputs (q, k, v, gate, up) need whole inputs, so the gradients of these are
added up over the devices, for each layer by itself. Of layers cut by their inputs (o, down), and of
a table cut by words, outputs are added up. A head's outputs are gathered.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 0, 1  # dimensions of a weight


@dataclass(frozen=True)
class Style:
    """How a layer is cut, and what its devices send each other.

    Attributes:
        dim: of the weight.
        outputs: "added", "gathered" or "" (they stay in parts).
        inputs: whether gradients of the inputs are added up.
    """

    dim: int
    outputs: str = ""
    inputs: bool = False


STYLES: Mapping[str, Style] = {
    "colwise": Style(ROWS, inputs=True),
    "rowwise": Style(COLUMNS, "added"),
    "colwise_gather_output": Style(ROWS, "gathered", inputs=True),
    "embedding_rowwise": Style(ROWS, "added"),
}


def plan_of(model: nn.Module) -> dict[str, Style]:
    """Layer -> how transformers cuts it; empty where it has no plan, or one with other styles."""
    told: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if any(style not in STYLES for style in told.values()):
        return {}
    known = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), STYLES[style])
        for name, style in told.items()
    ]
    return {
        name: style
        for name, module in model.named_modules()
        for pattern, style in known
        if pattern.fullmatch(name) and isinstance(module, (nn.Linear, nn.Embedding))
    }


@dataclass(frozen=True)
class Exchange:
    """What a device sends of a layer: entries for every position, where sums go by rings.

    Attributes:
        layer: its name.
        forward, backward: of a pass.
        gathered: whether its outputs are.
        drawn: entries whose noise a device draws for each of the weight that it keeps.
        module: the layer.
    """

    layer: str
    forward: float
    backward: float
    gathered: bool
    drawn: int
    module: nn.Module


def cut(model: nn.Module, parts: int) -> list[Exchange]:
    """Cuts every layer of the plan, of shapes alone, to what one of ``parts`` devices has; what is
    gathered is left to ``gather``.

    Raises:
        ValueError: where there is no plan, or a layer does not divide.
    """
    plan = plan_of(model)
    if not plan:
        raise ValueError(
            f"transformers cuts no {type(model).__name__} by a plan that is known here"
        )
    made: dict[int, nn.Parameter] = {}
    found = []
    for name, style in plan.items():
        layer: Any = model.get_submodule(name)
        whole: Tensor = layer.weight
        outputs, inputs = whole.shape if isinstance(layer, nn.Linear) else whole.shape[::-1]
        ring = (parts - 1) / parts
        found.append(
            Exchange(
                name,
                ring * outputs * {"added": 2, "gathered": 1, "": 0}[style.outputs],
                ring * inputs * 2 * style.inputs,
                style.outputs == "gathered",
                parts if style.dim == COLUMNS else 1,
                layer,
            )
        )
        for kind, p in list(layer._parameters.items()):
            if p is not None and (kind == "weight" or style.dim == ROWS):  # tied ones stay one
                layer._parameters[kind] = made.setdefault(id(p), _part(name, p, style.dim, parts))
        if isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = layer.weight.shape
        else:
            layer.num_embeddings = layer.weight.shape[0]
    return found


def of_adapters(model: nn.Module, exchanges: Collection[Exchange], parts: int) -> list[Exchange]:
    """Of LoRA on layers that are cut: the factor that meets whole features is whole on every
    device, and the other one is cut as its layer is.
    """
    drawn = {id(e.module): e.drawn for e in exchanges}
    ring = 2 * (parts - 1) / parts
    found = []
    for name, module in model.named_modules():
        base: Any = getattr(module, "base_layer", None)
        if id(base) not in drawn:
            continue
        by_columns = drawn[id(base)] > 1
        factors = "lora_A" if by_columns else "lora_B"
        for adapter, layer in model.get_submodule(f"{name}.{factors}").named_children():
            kept: Any = layer
            rank = kept.out_features if by_columns else kept.in_features
            forward, backward = (ring * rank, 0.0) if by_columns else (0.0, ring * rank)
            place = f"{name}.{factors}.{adapter}"
            found.append(Exchange(place, forward, backward, False, drawn[id(base)], layer))
    return found


@contextlib.contextmanager
def asking(exchanges: Collection[Exchange]) -> Iterator[set[str]]:
    """Inside, finds the layers whose inputs ask for a gradient. Before the first trained layer none
    does, and nothing is added up there.
    """
    found: set[str] = set()

    def noting(name: str) -> Any:
        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            if isinstance(given[0], Tensor) and given[0].requires_grad:
                found.add(name)

        return note

    hooks = [e.module.register_forward_pre_hook(noting(e.layer)) for e in exchanges]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def gather(model: nn.Module, layers: Collection[nn.Module], parts: int) -> None:
    """Has layers that were cut return what all devices have. Once adapters are there, which know a
    head by its place.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if any(child is layer for layer in layers):
                setattr(module, name, Gathered(child, parts))


class Gathered(nn.Module):
    """A layer whose outputs come from all devices, of which it makes its own."""

    def __init__(self, layer: nn.Module, parts: int) -> None:
        super().__init__()
        self.layer, self.parts = layer, parts

    def forward(self, x: Tensor) -> Tensor:
        arrived = torch.cat([self.layer(x)] * self.parts)
        return torch.cat(arrived.chunk(self.parts), dim=-1)


def _part(name: str, p: nn.Parameter, dim: int, parts: int) -> nn.Parameter:
    if p.shape[dim] % parts:
        raise ValueError(f"{name} has {p.shape[dim]} features, which {parts} devices cannot share")
    shape = list(p.shape)
    shape[dim] //= parts
    return nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad)
