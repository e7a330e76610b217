"""Random projections of sketched norms: one for each release and parameter, a function of (key,
step, parameter, role) alone.

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

    def gaussian(self, parameter: str, role: Role, rows: int, columns: int) -> Tensor:
        """[rows, columns] float32 on the processor, entries N(0, 1/columns) (erratum E2); not to be
        written to. Cost: one normal draw an entry.
        """
        name = (parameter, role, rows, columns)
        if name in self._kept:
            return self._kept[name]
        source = self.key.generator("projection", self.step, f"{parameter}\x00{role}\x00{columns}")
        # One row in memory per column, as the thin product wants it.
        sample = torch.from_numpy(source.standard_normal((columns, rows), dtype="float32"))
        drawn = sample.mul_(columns**-0.5).t()
        if sum(some.nbytes for some in self._kept.values()) + drawn.nbytes <= KEPT_BYTES:
            self._kept[name] = drawn
        return drawn
