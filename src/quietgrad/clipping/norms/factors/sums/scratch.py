"""Memory that passing results lie in, one after the other: fresh memory costs more than the work
that is done in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from weakref import ref

import torch
from torch import Tensor

# Entries of a buffer that is kept (16 MiB in float32); what needs more is made anew each time.
MOST_KEPT = 4 * 1024 * 1024


@dataclass
class Scratch:
    """One buffer a name, device and type, as long as the longest that was asked for. Private: what
    was written last stays in it.
    """

    _kept: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, repr=False
    )
    _made: dict[str, _Product] = field(default_factory=dict, repr=False)

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of that shape on the device and of the type of ``like``, filled with anything;
        it is good until the name is taken again.
        """
        self._made.pop(name, None)
        entries = math.prod(shape)
        if entries > MOST_KEPT:
            return like.new_empty(shape)
        key = (name, like.device, like.dtype)
        kept = self._kept.get(key)
        if kept is None or len(kept) < entries:
            kept = self._kept[key] = like.new_empty(entries)
        return kept[:entries].view(shape)

    def recall(self, name: str, factor: Tensor, other: Tensor) -> Tensor | None:
        """What ``remember`` was told last of that name, if it was made of the same two tensors."""
        made = self._made.get(name)
        return made.result if made is not None and made.is_of(factor, other) else None

    def norms_of(self, name: str, factor: Tensor) -> Tensor | None:
        """Norms of a factor's rows, if the last product of that name was made of it."""
        made = self._made.get(name)
        return made.norms if made is not None and made.is_of(factor) else None

    def remember(
        self, name: str, factor: Tensor, other: Tensor, result: Tensor, norms: Tensor | None = None
    ) -> None:
        """That a result was made of two tensors; until the memory of that name is taken again.
        ``norms``: of the factor's rows, in memory that is taken with it.
        """
        self._made[name] = _Product(ref(factor), factor._version, other, result, norms)

    def let_go(self) -> None:
        """Of all memory but that of norms."""
        self._kept.clear()
        self._made = {name: replace(made, result=None) for name, made in self._made.items()}


@dataclass(frozen=True)
class _Product:
    """A result, and what it was made of. The factor is not kept alive: a new one may lie where it
    was.
    """

    factor: ref[Tensor]
    version: int
    other: Tensor
    result: Tensor | None
    norms: Tensor | None

    def is_of(self, factor: Tensor, other: Tensor | None = None) -> bool:
        mine = self.factor()
        return (
            mine is not None
            and (other is None or other is self.other)
            and factor._version == self.version
            and factor.data_ptr() == mine.data_ptr()
            and (factor.shape, factor.stride(), factor.dtype, factor.device)
            == (mine.shape, mine.stride(), mine.dtype, mine.device)
        )
