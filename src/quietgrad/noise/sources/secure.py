"""The secure source of noise: a cryptographic stream, and numbers whose distribution is exactly the
one accounted for.

Two things set it apart from the keyed source. Its bits come from AES-256 in counter mode under a
key made from the whole root, so that no number helps to guess another. And each of its numbers is a
normal variable correctly rounded to a grid (``rounded_normal``), which makes what is released a
function of the real-valued mechanism (``grid``): attacks on the low bits of floating-point noise
(I. Mironov, On significance of the least significant bits for differential privacy, 2012) have
nothing to read.

The other published answer, the sum of four draws or more (N. Holohan and S. Braghin, Secure random
sampling in differential privacy, 2021), makes it harder to undo the draws but proves nothing about
the low bits of the sum, and costs four draws an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quietgrad.noise.sources.keystream import Keystream, require_cipher
from quietgrad.noise.sources.rounded_normal import rounded_normals
from quietgrad.noise.sources.stretch import Stretch
from quietgrad.randomness import RandomKey

GRID_BITS = 30
ON_THE_CPU = ("cpu", "mps")  # the latter knows no float64


@dataclass(frozen=True)
class SecureSource:
    """Normal numbers on the grid 2^-30, drawn on the CPU and moved to the device of the gradients;
    the same bits on every machine.

    Raises:
        ValueError: if ``cryptography`` is not installed, naming the extra.
    """

    name = "secure"
    grid = 2.0**-GRID_BITS

    def __post_init__(self) -> None:
        require_cipher()

    def normal(
        self, like: Tensor, key: RandomKey, step: int, name: str, scale: float = 1.0
    ) -> Tensor:
        """float64, whatever the dtype of ``like``: whole multiples of the grid. On a device without
        float64 the CPU keeps them.
        """
        return self.stretch(like, key, step, name, Stretch(0, like.numel()), scale)

    def stretch(
        self,
        like: Tensor,
        key: RandomKey,
        step: int,
        name: str,
        place: Stretch,
        scale: float = 1.0,
    ) -> Tensor:
        drawn = self.entries(key, step, name, place.start, like.numel(), scale).view(like.shape)
        return drawn if like.device.type in ON_THE_CPU else drawn.to(like.device)

    def entries(
        self, key: RandomKey, step: int, name: str, start: int, count: int, scale: float = 1.0
    ) -> Tensor:
        """[count] float64: entries start .. start + count - 1 of a parameter's noise in the order
        of its memory, drawn alone: any cut gives the same numbers.

        Args:
            key, step, name: which stream.
            start, count: which entries.
            scale: standard deviation; the grid stays.
        """
        stream = Keystream(key.stream_key("noise", step, name))
        return rounded_normals(stream, start, count, scale / self.grid).mul_(self.grid)

    def how_drawn(self, like: Mapping[str, Tensor]) -> str:
        """The shape of the arithmetic after it: rows of correlated noise are combined on the
        gradients' device.
        """
        kinds = sorted({tensor.device.type for tensor in like.values()})
        return f"secure, grid 2^-{GRID_BITS}, AES-256-CTR, rows on {', '.join(kinds)}"
