"""Which released gradients are matrices, and stacks of equal shape to treat in one call.

A weight of two dimensions is its own matrix (Linear layers, LoRA factors, attention projections,
classification heads); a convolution's is out x (in * taps); a weight of three dimensions that
belongs to no convolution (experts of a mixture) is a stack of matrices. Everything else passes
through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# On a processor a stack is cut so that its matrices stay in the cache between passes; on a GPU one
# call a shape is best.
CPU_STACK_BYTES = 1 << 24


@dataclass(frozen=True)
class MatrixShape:
    """How a gradient is seen: ``count`` matrices of rows x columns, one after
    the other in memory.
    """

    count: int
    rows: int
    columns: int


def matrix_shapes(
    gradients: Mapping[str, Tensor], model: nn.Module | None, embeddings: bool
) -> dict[str, MatrixShape]:
    """Name -> shape of every gradient that is seen as a matrix.

    Args:
        gradients: parameter name -> gradient.
        model: tells embeddings and experts apart from other weights; without it every weight of two
            or more dimensions counts, seen as rows x the rest.
        embeddings: whether embedding tables count (with a model).

    Raises:
        ValueError: if the model lacks one of the parameters.
    """
    owners = {} if model is None else _owners(model)
    strange = next((name for name in gradients if model is not None and name not in owners), None)
    if strange is not None:  # its embeddings could not be told
        raise ValueError(
            f"the model has no parameter named {strange!r}; pass the model that was clipped, not a "
            "part or a wrapper of it"
        )
    found = {}
    for name, gradient in gradients.items():
        owner = owners.get(name)
        if gradient.dim() < 2 or (
            isinstance(owner, nn.Embedding | nn.EmbeddingBag) and not embeddings
        ):
            continue
        stacked = (
            gradient.dim() == 3
            and owner is not None
            and not isinstance(owner, nn.modules.conv._ConvNd)
        )
        shape = (
            MatrixShape(gradient.shape[0], gradient.shape[1], gradient.shape[2])
            if stacked
            else MatrixShape(1, gradient.shape[0], gradient.shape[1:].numel())
        )
        if min(shape.rows, shape.columns) > 1:
            found[name] = shape
    return found


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Parameter name -> the module that holds it; of a tied one, an embedding if there is one."""
    tied: dict[int, nn.Module] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in tied or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                tied[id(parameter)] = module
    return {name: tied[id(parameter)] for name, parameter in model.named_parameters()}


def stacks(
    gradients: Mapping[str, Tensor], shapes: Mapping[str, MatrixShape]
) -> Iterator[tuple[list[str], Tensor]]:
    """(names, [l, rows, columns]) groups of equal shape, dtype and device, in float32 or float64.
    Memory: one group's copy at a time; none for a group of one.
    """
    groups: dict[tuple[MatrixShape, torch.dtype, torch.device], list[str]] = {}
    for name, shape in shapes.items():
        g = gradients[name]
        groups.setdefault((shape, g.dtype, g.device), []).append(name)
    for (shape, dtype, device), names in groups.items():
        size = shape.count * shape.rows * shape.columns * dtype.itemsize
        together = max(1, CPU_STACK_BYTES // size) if device.type == "cpu" else len(names)
        for i in range(0, len(names), together):
            part = names[i : i + together]
            matrices = [
                gradients[name].reshape(shape.count, shape.rows, shape.columns) for name in part
            ]
            stack = matrices[0] if len(part) == 1 else torch.cat(matrices)
            # Decompositions are made in float32 at least.
            yield part, stack if dtype == torch.float64 else stack.float()


def changed_matrices(
    values: Mapping[str, Tensor],
    model: nn.Module | None,
    embeddings: bool,
    change: Callable[[Tensor], Tensor | None],
) -> dict[str, Tensor]:
    """What ``change`` makes of every matrix; the given tensors where it gives none, and elsewhere.

    Args:
        values: parameter name -> tensor in the parameter's shape.
        model, embeddings: as for ``matrix_shapes``.
        change: a stack [l, m, n] to a new one, or None where nothing in it changes.
    """
    result = dict(values)
    for names, stack in stacks(values, matrix_shapes(values, model, embeddings)):
        changed = change(stack)
        if changed is None:
            continue
        for name, value in zip(names, changed.chunk(len(names)), strict=True):
            result[name] = value.reshape(values[name].shape).to(values[name].dtype)
    return result
