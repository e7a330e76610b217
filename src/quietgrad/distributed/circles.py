"""Ranks that hold copies of the same tensors. In every such circle each tensor has one owner, who
adds up what the circle's ranks have of it, draws its noise, and gives the others what was released.

Where every rank holds the whole model, all ranks are one circle. What a rank holds alone (its
shard) is in none: the rank owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quietgrad.distributed.exchange import gathered, owners_of, sums_of_owner
from quietgrad.tensors import is_spread, local_of, spread_like

Placed = dict[str, tuple[str | None, int]]


@dataclass(frozen=True)
class Circle:
    """Ranks with the same tensors, as one of them knows them.

    Attributes:
        rank, size: of this process in it.
        group: for tensors, which all of the circle hold, a group whose backend moves them.
    """

    rank: int
    size: int
    group: Callable[[Mapping[str, Tensor]], Any]


@dataclass
class Circles:
    """All circles that this process is in.

    Attributes:
        known: by name, in the same order on all ranks.
        circle_of: the name of a tensor's circle; None where this process alone holds it.
    """

    known: Mapping[str, Circle]
    circle_of: Callable[[Tensor], str | None]
    _placed: Placed = field(default_factory=dict)
    _owner: dict[str, int] = field(default_factory=dict)

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that this process owns."""
        placed = {n: (self.circle_of(t), local_of(t).numel()) for n, t in tensors.items()}
        if placed != self._placed:
            self._placed, self._owner = placed, {}
            for name, circle in self.known.items():
                entries = {n: count for n, (of, count) in placed.items() if of == name}
                self._owner |= owners_of(entries, circle.size)
        return {n: t for n, t in tensors.items() if self._is_mine(n)}

    def _is_mine(self, name: str) -> bool:
        circle = self._placed[name][0]
        return circle is None or self._owner[name] == self.known[circle].rank

    def held(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of one circle."""
        return {n: t for n, t in tensors.items() if self._placed[n][0] == name}

    def summed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process owns, added up over each circle. Private."""
        found = self.owned(sums)
        for name, circle in self.known.items():
            held = self.held(name, sums)
            if held:
                here = {n: local_of(t) for n, t in held.items()}
                owner, group = self._owner, circle.group(here)
                whole = sums_of_owner(here, owner, circle.rank, circle.size, group)
                found |= _spread_as(whole, held)
        return {n: found[n] for n in sums if n in found}

    def gathered(
        self, made: Mapping[str, Tensor], like: Mapping[str, Tensor], only: str | None = None
    ) -> dict[str, Tensor]:
        """What owners made of their tensors, of all that are held here.

        Args:
            made: of what this process owns at least.
            like: all tensors.
            only: of one circle alone; then the rest is taken as it was made here.
        """
        found = dict(made)
        for name, circle in self.known.items():
            held = self.held(name, like)
            if held and only in (None, name):
                here = {n: local_of(t) for n, t in held.items()}
                mine = {n: local_of(made[n]) for n in held if self._is_mine(n)}
                owner, group = self._owner, circle.group(here)
                found |= _spread_as(
                    gathered(mine, here, owner, circle.rank, circle.size, group), held
                )
        return {n: found[n] for n in like}


def _spread_as(found: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: spread_like(t, like[n]) if is_spread(like[n]) else t for n, t in found.items()}
