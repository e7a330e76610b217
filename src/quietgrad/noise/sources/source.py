"""Where noise comes from: one small interface, and its two implementations by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, get_args

from torch import Tensor

from quietgrad.checks import require_word
from quietgrad.noise.sources.stretch import Stretch
from quietgrad.randomness import RandomKey

Source = Literal["keyed", "secure"]
NOISE_SOURCES: tuple[Source, ...] = get_args(Source)


class NoiseSource(Protocol):
    """Standard normal numbers, a function of (key, step, name) alone: no micro-batch, no rank and
    no earlier draw changes them.
    """

    @property
    def name(self) -> str:
        """One of ``NOISE_SOURCES``."""
        ...

    @property
    def grid(self) -> float:
        """What the numbers are multiples of, exactly, so that sums on the same grid can be covered
        without a rounding error (``quietgrad.noise.sources.grid``); 0: any float.
        """
        ...

    def normal(
        self, like: Tensor, key: RandomKey, step: int, name: str, scale: float = 1.0
    ) -> Tensor:
        """``scale`` times standard normal noise in the shape and on the device of ``like``."""
        ...

    def stretch(
        self,
        like: Tensor,
        key: RandomKey,
        step: int,
        name: str,
        place: Stretch,
        scale: float = 1.0,
    ) -> Tensor:
        """What ``normal`` has at a stretch of the parameter, drawn without the rest of it.

        Args:
            like: the stretch.
            key, step, name, scale: as for ``normal``.
            place: where it lies.
        """
        ...

    def how_drawn(self, like: Mapping[str, Tensor]) -> str:
        """What the numbers depend on beside key, step and name: a public fact. Where it differs,
        equal keys give other numbers.
        """
        ...


def noise_source(name: str) -> NoiseSource:
    """The source of that name.

    Raises:
        ValueError: for another name, or if "secure" lacks its package.
    """
    from quietgrad.noise.sources.keyed import KeyedSource
    from quietgrad.noise.sources.secure import SecureSource

    return (
        SecureSource() if require_word("source", name, NOISE_SOURCES) == "secure" else KeyedSource()
    )
