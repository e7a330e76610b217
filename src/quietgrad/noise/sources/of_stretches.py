"""A source for a process that holds parts of parameters: of every one it draws its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.noise.sources.source import NoiseSource
from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.randomness import RandomKey

# Of whole rows, entries that are drawn at a time: many blocks of a stream, at either end of which
# one is drawn that other rows need too.
AT_ONCE = 2**20


@dataclass(frozen=True)
class OfStretches:
    """The numbers of another source, at the places that this process holds.

    Attributes:
        source: of the numbers.
        places: parameter name -> its part; parameters without one are held whole. Columns cost the
            draws of whole rows.
    """

    source: NoiseSource
    places: Mapping[str, Stretch | Columns]

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
        if isinstance(place, Columns):
            return self._columns(like, key, step, name, place, scale)
        return self.source.stretch(like, key, step, name, place, scale)

    def _columns(
        self, like: Tensor, key: RandomKey, step: int, name: str, place: Columns, scale: float
    ) -> Tensor:
        """What the whole matrix has there: whole rows are drawn, some at a time, and cut."""
        rows = max(1, AT_ONCE // place.width)
        parts = []
        for start in range(0, max(like.shape[0], 1), rows):
            some = like.new_empty(min(rows, like.shape[0] - start), place.width)
            at = Stretch((place.first + start) * place.width, place.whole)
            drawn = self.source.stretch(some, key, step, name, at, scale)
            parts.append(drawn[:, place.start : place.stop])
        return torch.cat(parts)

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
