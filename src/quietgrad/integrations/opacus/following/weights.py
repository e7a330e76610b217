"""Which weights a loss would give a gradient: those of private models get theirs with noise; no
others may learn from records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from quietgrad.integrations.opacus.following.nodes import CALL, LEAF, Const, Node, Ref, leaves


def require_private_weights(nodes: Sequence[Node], loss: Ref) -> None:
    """A weight may be met itself or through what was made of it before (``log_scale.exp()``, a
    slice, another model's output). Through a private model's output alone another model may learn,
    as a generator does: that model's weights are released. What was written into may be part of the
    loss by a view of it.

    Raises:
        ValueError: where weights of something else would learn from records without noise.
    """
    written = [Ref(place, 0) for place, node in enumerate(nodes) if node.in_place]
    of_records = any(nodes[ref.node].what == LEAF for ref in reachable(nodes, loss, *written))
    for place in {ref.node for ref in reachable(nodes, loss, *written, by_gradient=True)}:
        node = nodes[place]
        if not node.flows:
            continue  # a teacher under no_grad, or detached
        if any(_learns(c, of_records) for c in leaves((node.args, node.kwargs), Const)):
            raise ValueError(
                "backward() would give weights outside the private model's own call a gradient "
                "that has no noise (a head, a loss with weights, a second model, a submodule that "
                "is called alone, a weight penalty); put them into the module that make_private is "
                "given, and call that, or detach() them; for a penalty use weight_decay"
            )


def _learns(const: Const, of_records: bool) -> bool:
    tensor = const.tensor
    weight = const.learns or (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
    return weight or (const.learned_from and of_records)


def reachable(nodes: Sequence[Node], *refs: Ref, by_gradient: bool = False) -> set[Ref]:
    """All that tensors were made of, they too; or what their gradient meets."""
    found: set[Ref] = set()
    open_ends = list(refs)
    while open_ends:
        one = open_ends.pop()
        if one not in found:
            found.add(one)
            node = nodes[one.node]
            if node.flows or not by_gradient:
                open_ends += leaves((node.args, node.kwargs), Ref)
    return found


def modules_below(nodes: Sequence[Node], ref: Ref) -> list[Any]:
    """Wrapped models whose outputs a tensor was made of, each once."""
    found = (nodes[one.node] for one in reachable(nodes, ref))
    return list({id(n.module): n.module for n in found if n.what == CALL}.values())
