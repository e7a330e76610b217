"""Capture of layer inputs and of gradients at layer outputs, by forward hooks that are gone when the block ends.

The gradient at an output is asked for by its edge in the autograd graph, taken the moment the output exists: later in-place operations on
the output do not disturb it, nothing is inserted into the graph, and weight gradients are never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from quietgrad.clipping.layout import Layout, Site
from quietgrad.clipping.rules import batched_dims
from quietgrad.tensors import map_tensors


@dataclass(frozen=True)
class Use:
    """One call of a captured module.

    Attributes:
        site: the module.
        args, kwargs: its inputs, detached.
        edges: (position among the flattened outputs, graph edge) of every output that can receive a gradient.
    """

    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    edges: tuple[tuple[int, GradientEdge], ...]


@dataclass
class Recording:
    """The uses seen while capture was on, in order."""

    uses: list[Use] = field(default_factory=list)


@contextmanager
def captured(layout: Layout, batch_size: int) -> Iterator[Recording]:
    """Records every call of the layout's modules inside the block; on exit, also by an exception, no hook is left.

    Inputs of size 1 along the example dimension (BERT's default ``position_ids``) are expanded to the batch size on the way in, which
    changes nothing in the forward pass but gives every example a gradient of its own.

    Raises:
        ValueError: from the forward pass, if a captured module gets inputs without an example dimension.
    """
    recording = Recording()
    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        for site in layout.sites:
            handles.append(site.module.register_forward_pre_hook(_expander(site, batch_size), with_kwargs=True))
            handles.append(site.module.register_forward_hook(_recorder(site, recording, batch_size), with_kwargs=True))
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def _expander(site: Site, batch_size: int) -> Callable[..., Any]:
    def expand(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if batch_size == 1 or not torch.is_grad_enabled():
            return None
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.dim() and x.shape[0] == batch_size for x in leaves):
            return None

        def widen(x: Tensor) -> Tensor:
            return x.expand(batch_size, *x.shape[1:]) if x.dim() and x.shape[0] == 1 else x

        return map_tensors(args, widen), map_tensors(kwargs, widen)

    return expand


def _recorder(site: Site, recording: Recording, batch_size: int) -> Callable[..., Any]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        # An in-place operation on a view (ReLU(inplace=True) after an InstanceNorm) rewrites the history of the view's base and would leave
        # the edge taken here dead, with a gradient of zero and no error. So views are handed on as tensors of their own.
        leaves, spec = pytree.tree_flatten(output)
        # So are several outputs of one module: where one feeds another, its own edge would count that path twice.
        graded = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        several = sum(graded) > 1
        own = [
            leaf.clone() if has_grad and (several or leaf._is_view()) else leaf
            for leaf, has_grad in zip(leaves, graded, strict=True)
        ]
        edges = tuple(
            (position, get_gradient_edge(leaf))
            for position, leaf in enumerate(own)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        )
        if not edges:
            return None
        if site.rule is not None:
            _require_examples_first(site, args, kwargs, batch_size)
        elif batch_size == 1:
            _require_one_row(site, own)
        recording.uses.append(Use(site, map_tensors(args, Tensor.detach), map_tensors(kwargs, Tensor.detach), edges))
        return None if all(a is b for a, b in zip(own, leaves, strict=True)) else pytree.tree_unflatten(own, spec)

    return record


def input_of(use: Use) -> Tensor:
    """The one tensor input of a module that has a rule."""
    leaves = [x for x in (*use.args, *use.kwargs.values()) if isinstance(x, Tensor)]
    assert leaves, use.site.name
    return leaves[0]


def _require_examples_first(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int) -> None:
    leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if not leaves or leaves[0].dim() < (batched_dims(site.module) or 1) or leaves[0].shape[0] != batch_size:
        raise ValueError(_no_example_dimension(site, "is called with an input"))


def _require_one_row(site: Site, outputs: list[Any]) -> None:
    first = next((x for x in outputs if isinstance(x, Tensor)), None)
    if first is not None and (first.dim() == 0 or first.shape[0] != 1):
        raise ValueError(_no_example_dimension(site, "returns a tensor"))


def _no_example_dimension(site: Site, what: str) -> str:
    return (
        f"layer {site.name!r} ({type(site.module).__name__}) {what} whose first dimension is not the example, so per-example gradients "
        "cannot be told apart; freeze its parameters (requires_grad_(False)) or give its input an example dimension"
    )
