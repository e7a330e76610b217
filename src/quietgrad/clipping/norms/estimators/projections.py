"""Random projections of sketched norms: a function of (key, step, stream, role) alone.

Hutch++ has a stream for each parameter. Hutch has one for each block of a model (``block_of``): the
sum of its estimates for matrices that meet one projection is its estimate for the matrix that they
make when stacked, whose law the envelope covers as well, and what they have in common (the input of
queries, keys and values) is projected once.

Which projection a record meets must not depend on who else is in the batch: a fresh one for every
micro-batch shifts with the cut, so one record more changes what all others contribute (errata,
E14). Keyed, a projection need not be kept between micro-batches nor sent to other ranks. It may be
public; it must be drawn afresh for every release, independently of the data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from quietgrad.randomness import RandomKey

Role = Literal["hutch", "range", "tail"]

KEPT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Projections:
    """All projections of one release.

    Attributes:
        key: root of the streams.
        step: number of the release.

    Up to ``KEPT_BYTES`` of what was drawn are kept for the micro-batches that follow; what is above
    is drawn again.
    """

    key: RandomKey
    step: int = 0
    _kept: dict[tuple[str, Role, int, int], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def fresh(cls) -> Projections:
        """For one use outside a run: from the operating system's entropy."""
        return cls(RandomKey.from_entropy())

    def gaussian(self, stream: str, role: Role, rows: int, columns: int) -> Tensor:
        """[rows, columns] float32 on the processor, entries N(0, 1/columns) (erratum E2); not to be
        written to. Cost: one normal draw an entry.
        """
        name = (stream, role, rows, columns)
        if name in self._kept:
            return self._kept[name]
        source = self.key.generator("projection", self.step, f"{stream}\x00{role}\x00{columns}")
        sample = torch.from_numpy(source.standard_normal((rows, columns), dtype="float32"))
        drawn = sample.mul_(columns**-0.5)
        if sum(some.nbytes for some in self._kept.values()) + drawn.nbytes <= KEPT_BYTES:
            self._kept[name] = drawn
        return drawn

    def signs(self, stream: str, count: int) -> Tensor:
        """[count] float32 on the processor, each 1 or -1; of more of them the first are the same.

        Args:
            stream: no name that ``gaussian`` draws by.
            count: how many.
        """
        source = self.key.generator("projection", self.step, stream)
        return torch.from_numpy(source.random(count)).lt(0.5).float().mul_(2.0).sub_(1.0)


def block_of(parameter: str) -> str:
    """The part of a model that a parameter is in, by its name: that of the last number in it
    (``encoder.layer.3``), else that of the module around its own; its own where there is none.
    """
    parts = parameter.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdecimal()]
    if numbered:
        return ".".join(parts[: numbered[-1] + 1])
    return ".".join(parts[:-2]) or parameter
