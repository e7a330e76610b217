"""Maps (images, what layers make of them, texts under a convolution) that were padded to the
largest of their micro-batch.

A library adds up the positions of a wider map in another order. A record whose positions cancel
until rounding alone is left would then have another gradient beside a larger one. So every record
is taken at the size that it has itself: up to the last line and the last column that have a
gradient. Records of one size go together, as in a micro-batch of images of one size. On a GPU maps
are taken as they come: whether all are of one size would have to be waited for.

Shape legend: b examples, n of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.matrix import Kept, MatrixFactors
from quietgrad.clipping.norms.factors.sums.pairs import InPairs

# Looked at first: as a rule they hold some gradient of every example, and the last column of all
# channels is spread over all of the memory.
CHANNELS = 4

Extent = tuple[int, ...]
Size = TypeVar("Size", bound=Hashable)


def extents_of(grad: Tensor, axes: Sequence[int]) -> list[Extent] | None:
    """For each example the sizes along ``axes`` that hold all of its gradient; None where each has
    some in every last line, which is all that is looked at then.
    """
    if grad.is_cuda or not len(axes) or not grad.numel():
        return None
    few = grad
    for axis in set(range(1, grad.dim())) - set(axes):
        few = few.narrow(axis, 0, min(CHANNELS, few.shape[axis]))
    if _reaches_all_edges(few, axes) or (
        few.shape != grad.shape and _reaches_all_edges(grad, axes)
    ):
        return None
    beside = [axis for axis in range(1, grad.dim()) if axis not in axes]
    # The largest first: one fast pass, what is looked at once an axis is small then. Not a number
    # is larger than all.
    alive = grad.abs().amax(beside, keepdim=True) != 0 if beside else grad != 0
    sizes = [_last_of(alive.movedim(axis, 1).flatten(2).any(2)) for axis in axes]
    found: list[Extent] = list(zip(*sizes, strict=True))
    return None if set(found) == {tuple(grad.shape[axis] for axis in axes)} else found


def _reaches_all_edges(grad: Tensor, axes: Sequence[int]) -> bool:
    """Whether each example has something that is not zero, if no number, in every last line."""
    for axis in axes:
        line = grad.select(axis, -1)
        if not bool(line.abs().flatten(1).amax(1).all()):
            return False
    return True


def _last_of(alive_bn: Tensor) -> list[int]:
    """One more than the place of the last that is true, and at least 1."""
    places = torch.arange(1, alive_bn.shape[1] + 1, device=alive_bn.device)
    numbers: list[int] = (alive_bn * places).amax(1).clamp_min(1).tolist()
    return numbers


def cropped(x: Tensor, numbers: Tensor, axes: Sequence[int], extent: Extent) -> Tensor:
    """Examples of these numbers, the first entries along ``axes``."""
    some = x
    for axis, size in zip(axes, extent, strict=True):
        some = some.narrow(axis, 0, size)
    return laid_as(x, some[numbers])


def laid_as(x: Tensor, some: Tensor) -> Tensor:
    """``some`` with its dimensions in memory in the order in which those of ``x`` are: libraries
    take other ways for other orders.
    """
    strides = x.stride()
    if 0 in strides:
        return some.contiguous()
    order = sorted(range(x.dim()), key=lambda axis: (-strides[axis], axis))
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return some.permute(order).contiguous().permute(inverse)


def sum_by_extent(grad: Tensor, axes: Sequence[int], summed: Callable[[Tensor], Tensor]) -> Tensor:
    """[b, n] of ``summed``, which adds up positions, of examples of one size at a time."""
    extents = extents_of(grad, axes)
    if extents is None:
        return summed(grad)
    total: Tensor | None = None
    for extent, numbers in _alike(extents).items():
        index = torch.tensor(numbers, device=grad.device)
        part = summed(cropped(grad, index, axes, extent))
        total = part.new_zeros(len(grad), part.shape[1]) if total is None else total
        total[index] = part
    assert total is not None
    return total


Part = tuple[Tensor, list[MatrixFactors]]


def by_extent(uses: Sequence[MatrixFactors]) -> list[Part] | None:
    """The uses of one parameter, of examples of one size at a time, with the examples' numbers;
    None where they may stay together.
    """
    found = [use.extents() for use in uses]
    if all(extents is None for extents in found):
        return None
    examples = uses[0].sizes.b
    each = [extents or [()] * examples for extents in found]
    parts = []
    for extents, numbers in _alike(list(zip(*each, strict=True))).items():
        index = torch.tensor(numbers, device=uses[0].like.device)
        some = [use.of_extent(index, size) for use, size in zip(uses, extents, strict=True)]
        parts.append((index, some))
    return parts


def _alike(sizes: Sequence[Size]) -> dict[Size, list[int]]:
    found: dict[Size, list[int]] = {}
    for number, size in enumerate(sizes):
        found.setdefault(size, []).append(number)
    return found


@dataclass(frozen=True)
class ByExtent:
    """What is kept of examples of one size each, with the examples' numbers."""

    parts: tuple[tuple[Tensor, tuple[Kept, ...]], ...]

    def examples(self, span: slice) -> ByExtent:
        """One example's part; longer slices are not needed."""
        assert span.stop == span.start + 1
        for numbers, kept in self.parts:
            place = torch.nonzero(numbers == span.start).flatten().tolist()
            if place:
                one = slice(place[0], place[0] + 1)
                first = torch.zeros_like(numbers[:1])
                return ByExtent(((first, tuple(use.examples(one) for use in kept)),))
        raise AssertionError(span)

    def without(self, dropped_b: Tensor) -> ByExtent:
        return ByExtent(
            tuple(
                (numbers, tuple(use.without(dropped_b[numbers]) for use in kept))
                for numbers, kept in self.parts
            )
        )

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        total = InPairs()
        for numbers, kept in self.parts:
            made: Tensor | None = None
            for use in kept:
                made = use.weighted_sum(weights_b[numbers], shape, dtype, made)
            assert made is not None
            total.add(made)
        return total.total() if into is None else into.add_(total.total())
