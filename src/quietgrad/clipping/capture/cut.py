"""Layers that are cut over ranks by tensor parallel plans: what this rank has of their per-example
gradients.

All ranks run the same records. Of a weight that is cut by rows (``ColwiseParallel``) a rank has the
inputs whole and its columns of the output gradient; of one that is cut by columns
(``RowwiseParallel``) it is the other way round; of a table of tokens it has some rows, or some
columns. So it forms its part of the gradient from what it has. A parameter that every rank holds
whole is one rank's to measure and to add: it counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quietgrad.clipping.norms.factors import Given, OneHotFactors
from quietgrad.clipping.norms.rules.linear import embedding_rule, linear_rule
from quietgrad.clipping.norms.rules.registry import Rule
from quietgrad.tensors import axis_of, is_spread, local_of, received

REMEDY = (
    "cut nn.Linear and nn.Embedding by torch's ColwiseParallel and RowwiseParallel (or "
    "transformers' plans of these), keep what is between them whole, or freeze its parameters "
    "(requires_grad_(False)); docs/tensor_parallel.md"
)


class Piece(NamedTuple):
    """This rank's part of a parameter.

    Attributes:
        dim: that is cut: 0 for rows, 1 for columns.
        start, stop: which of them are here.
        whole: how many there are.
    """

    dim: int
    start: int
    stop: int
    whole: int

    def of(self, values: Tensor, layer: str) -> Tensor:
        """The part of the last dimension that belongs to it, of all of them or of it alone."""
        width = values.shape[-1]
        if width == self.whole:
            return values[..., self.start : self.stop]
        if width == self.stop - self.start:
            return values
        raise refused(layer, f"meets tensors of {width} features, of {self.whole} in all")


@dataclass(frozen=True)
class Cut:
    """How a model is cut, as one of its ranks has it.

    Attributes:
        ranks: of the process group, those that share records, in order.
        rank: which of them this process is.
        owner: name -> which of them counts it, of trainable parameters that all of them hold whole,
            or in the same shards.
        shapes: name -> shape of what is formed here of a trainable parameter's gradient.
    """

    ranks: tuple[int, ...]
    rank: int
    owner: dict[str, int]
    shapes: dict[str, torch.Size]

    def counts(self, name: str) -> bool:
        """Whether this rank measures and adds a parameter's gradients, or its part of them."""
        return self.owner.get(name, self.rank) == self.rank

    def stream(self, name: str) -> str:
        """What projections are drawn by that no two parts may share."""
        return name if name in self.owner else f"{name}\x00part {self.rank}"

    def rule(self, layer: str, module: nn.Module, rule: Rule | None) -> Rule:
        """Of a module with trainable parameters, whose own rule is given.

        Raises:
            ValueError: where its part of the gradient is not known here.
        """
        if rule is None:
            raise refused(layer, f"is a {type(module).__name__}, which has no rule of its own")
        own: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
        found = {name: piece_of(p, name, self.ranks) for name, p in own.items()}
        cut = {name: piece for name, piece in found.items() if piece is not None}
        if not cut:
            if rule is not linear_rule and any(
                is_spread(p) and axis_of(p, self.ranks) is not None for p in own.values()
            ):
                raise refused(layer, "lies on the ranks as copies (sequence parallel)")
            return functools.partial(_whole, rule, layer)
        weight = cut.get("weight")
        if rule is linear_rule and weight is not None:
            if ("bias" in own) and ("bias" in cut) != (weight.dim == 0):
                raise refused(layer, "has a bias that is cut otherwise than its weight")
            return functools.partial(_linear, weight, layer)
        if rule is embedding_rule and weight is not None:
            return functools.partial(_embedding, weight, layer)
        raise refused(layer, f"is a {type(module).__name__}, which is cut")


def piece_of(parameter: Tensor, name: str, ranks: tuple[int, ...]) -> Piece | None:
    """This rank's part; None of what all of these ranks hold alike.

    Args:
        parameter: at rest. Beside the cut its rows may be sharded over other ranks.
        name: of the parameter.
        ranks: those that share records.

    Raises:
        ValueError: for placements other than one shard, by rows or columns, over these ranks.
    """
    axis = axis_of(parameter, ranks) if is_spread(parameter) else None
    if axis is None:
        return None
    p: Any = parameter
    placement, mesh = p.placements[axis], p.device_mesh
    if placement.is_replicate():
        return None
    how = f"parameter {name!r} is spread over ranks as {tuple(p.placements)}"
    if type(placement).__name__ != "Shard":
        raise ValueError(f"{how}, which is not supported; {REMEDY}")
    dim, size = placement.dim % p.dim(), len(ranks)
    whole = p.shape[dim]
    each = -(-whole // size)  # as torch.chunk cuts
    start = min(mesh.get_local_rank(axis) * each, whole)
    stop = min(start + each, whole)
    held = local_of(p).shape[dim]
    sharded = mesh.ndim > 1 and dim == 0  # whose rows are cut once more
    if dim > 1 or (held != stop - start and not sharded) or whole <= each * (size - 1):
        raise ValueError(
            f"{how}, shape {tuple(p.shape)}: only matrices of which every rank has some rows or "
            f"some columns are supported; {REMEDY}"
        )
    return Piece(dim, start, stop, whole)


def shape_here(parameter: Tensor, piece: Piece | None) -> torch.Size:
    """Of what is formed here of a parameter's gradient."""
    shape = list(parameter.shape)
    if piece is not None:
        shape[piece.dim] = piece.stop - piece.start
    return torch.Size(shape)


def refused(layer: str, why: str) -> ValueError:
    """Of a layer in a model that is cut."""
    return ValueError(
        f"layer {layer!r} {why}: that is not supported in a model whose layers are cut over ranks "
        f"(tensor parallel); {REMEDY}"
    )


Found = Mapping[str, Given]


def _whole(
    rule: Rule, layer: str, module: nn.Module, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> Found:
    return rule(module, *_received(layer, x, grad), wanted)


def _linear(
    piece: Piece, layer: str, module: Any, x: Tensor, grad: Tensor, wanted: Collection[str]
) -> Found:
    x, grad = _received(layer, x, grad)
    if x.shape[:-1] != grad.shape[:-1]:
        raise refused(layer, "has other positions at its input than at its output (sequence)")
    p, d = module.weight.shape
    if piece.dim == 0:
        grad, met, needed = piece.of(grad, layer), x.shape[-1], d
    else:
        x, met, needed = piece.of(x, layer), grad.shape[-1], p
    if met != needed:
        raise refused(layer, "meets parts of the features that it needs whole")
    return linear_rule(module, x, grad, wanted)


def _embedding(
    piece: Piece, layer: str, module: Any, ids: Tensor, grad: Tensor, wanted: Collection[str]
) -> Found:
    ids, grad = _received(layer, ids, grad)
    if ids.shape != grad.shape[:-1]:
        raise refused(layer, "has other positions at its input than at its output (sequence)")
    (found,) = embedding_rule(
        module, ids, piece.of(grad, layer) if piece.dim else grad, wanted
    ).values()
    assert isinstance(found, OneHotFactors)
    if piece.dim:
        return {"weight": found}
    if grad.shape[-1] != module.weight.shape[1]:
        raise refused(layer, "meets parts of the features that it needs whole")
    here = (found.ids_bt >= piece.start) & (found.ids_bt < piece.stop)
    rows = torch.where(here, found.ids_bt - piece.start, 0)
    # Whatever it holds, infinite numbers too: it is another rank's.
    right = torch.where(here[:, None, :, None], found.right_bgtd, 0.0)
    return {"weight": OneHotFactors(rows, right, piece.stop - piece.start)}


def _received(layer: str, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if is_spread(grad):
        raise refused(layer, "returns a DTensor (use_local_output=False)")
    return received(local_of(x)), received(grad)
