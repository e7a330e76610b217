"""Adding up in pairs of neighbours, pairs of pairs and so on.

Each addition is an elementwise one, so no bit depends on threads or on what stands beside; zeros at
the end change nothing; rounding grows with the logarithm of how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def add_in_pairs(parts_xr: Tensor, out: Tensor | None = None) -> Tensor:
    """[x, r, ...] -> [x, ...], into ``out`` where given. ``parts_xr`` is written over."""
    while parts_xr.shape[1] > 2:
        r = parts_xr.shape[1]
        parts_xr[:, 0 : r - 1 : 2].add_(parts_xr[:, 1:r:2])
        parts_xr = parts_xr[:, ::2]
    if parts_xr.shape[1] == 2:
        return torch.add(parts_xr[:, 0], parts_xr[:, 1], out=out)
    return parts_xr[:, 0] if out is None else out.copy_(parts_xr[:, 0])


def levels(parts: int) -> int:
    """Additions on the longest path through a sum of so many, in pairs."""
    return max(0, parts - 1).bit_length()


@dataclass
class InPairs:
    """What comes one after the other, added up in pairs as it comes: memory of one part for each
    level. Parts are written over.
    """

    _held: list[tuple[int, Tensor]] = field(default_factory=list, repr=False)

    def add(self, part: Tensor) -> Tensor | None:
        """Returns memory that is free again, where there is any."""
        parts, free = 1, None
        while self._held and self._held[-1][0] == parts:
            free = part
            part, parts = self._held.pop()[1].add_(part), 2 * parts
        self._held.append((parts, part))
        return free

    def total(self) -> Tensor:
        """Of at least one part."""
        last = self._held.pop()[1]
        while self._held:
            last = self._held.pop()[1].add_(last)
        return last
