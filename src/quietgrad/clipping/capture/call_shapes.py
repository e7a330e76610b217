"""Where the examples are in what a captured module is called with, and returns; and how the
gradients at what it returns lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from quietgrad.clipping.capture.escapes import (
    nested,
    no_example_dimension,
    several_inputs,
    transformed,
)
from quietgrad.clipping.capture.layout import Site
from quietgrad.clipping.norms.rules.registry import batched_dims


def require_plain(site: Site, values: Iterable[Any]) -> None:
    """That no tensor among what a module is called with, or returns, is nested, and that what runs
    is no transform of torch.func, where tensors have fewer dimensions than they show, or more.
    """
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        raise transformed(site)
    for value in values:
        inside = pytree.tree_leaves(value) if isinstance(value, list | tuple | dict) else (value,)
        for leaf in inside:  # no generator: this runs twice a call
            if isinstance(leaf, Tensor) and leaf.is_nested:
                raise nested(site)


def give_outputs_examples(
    site: Site,
    outputs: list[Any],
    positions: tuple[int, ...],
    batch_size: int,
    expanded: set[str] | None,
) -> None:
    """Outputs of one value for all examples are expanded, so that every example gets its own, and
    the module's name is added to ``expanded``; None: they are not to be changed.
    """
    if batch_size == 1:
        first = outputs[positions[0]]
        if first.dim() == 0 or first.shape[0] != 1:
            raise no_example_dimension(site, "returns a tensor")
        return
    if site.unit.state_dim:
        return  # final states are [layers, examples, hidden]
    for i in positions:
        if outputs[i].dim() and outputs[i].shape[0] == 1:
            if expanded is None:
                raise no_example_dimension(site, "returns a tensor")
            outputs[i] = outputs[i].expand(batch_size, *outputs[i].shape[1:])
            expanded.add(site.name)


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that are tensors themselves."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def require_examples_first(
    site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int
) -> None:
    """Of a module that has a rule."""
    leaves = tensors_among(args, kwargs)
    if len(leaves) > 1:  # offsets or weights of bags, a gate: rules read one
        raise several_inputs(site)
    if (
        not leaves
        or leaves[0].dim() < (batched_dims(site.module) or 1)
        or leaves[0].shape[0] != batch_size
    ):
        raise no_example_dimension(site, "is called with an input")


def in_rows(gradient: Tensor | None) -> Tensor | None:
    """[b, positions, features] that a loss turned round (cross-entropy of ``logits.mT``) as a layer
    gave it: else the layer's backward pass and its weighted product copy it once each, the former
    beside what is kept.
    """
    turned = gradient is not None and gradient.dim() == 3 and gradient.stride(2) > 1
    return gradient.contiguous() if turned and gradient is not None else gradient
