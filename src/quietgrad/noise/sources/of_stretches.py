"""A source for a process that holds stretches of parameters: of every one it draws its stretch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quietgrad.noise.sources.source import NoiseSource
from quietgrad.noise.sources.stretch import Stretch
from quietgrad.randomness import RandomKey


@dataclass(frozen=True)
class OfStretches:
    """The numbers of another source, at the places that this process holds.

    Attributes:
        source: of the numbers.
        places: parameter name -> its stretch; parameters without one are held whole.
    """

    source: NoiseSource
    places: Mapping[str, Stretch]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def grid(self) -> float:
        return self.source.grid

    def normal(
        self, like: Tensor, key: RandomKey, step: int, name: str, scale: float = 1.0
    ) -> Tensor:
        place = self.places.get(name)
        if place is None:
            return self.source.normal(like, key, step, name, scale)
        return self.source.stretch(like, key, step, name, place, scale)

    def stretch(
        self,
        like: Tensor,
        key: RandomKey,
        step: int,
        name: str,
        place: Stretch,
        scale: float = 1.0,
    ) -> Tensor:
        return self.source.stretch(like, key, step, name, place, scale)

    def how_drawn(self, like: Mapping[str, Tensor]) -> str:
        return self.source.how_drawn(like)
