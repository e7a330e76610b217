"""How micro-batches are added up, so that neither their order nor who added them changes the sum.

In float64 every micro-batch's sum is brought to whole multiples of one small unit before it is
added. Sums of such numbers are exact as long as they stay below 2^53 units, so they are the same in
any order, on any number of processes, by any algorithm of a reduction. The unit is 2^-50 of what
four expected batches can add up to: with B = 64 about 1e-12 of the clipping norm, far below what
noise covers. float32 sums are added as they are: a unit would cost digits there.

One record more moves all later ones to other micro-batches, whose sums are then rounded otherwise:
by up to a unit each, in every one of d entries, so by M sqrt(d) units in norm. The slack of the
norms, 2^-10, has to cover it. Where a batch and a model are so large that it might not, float64
sums too are added as they are, which rounds by 2^-53 of the sum itself and not of a bound on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.engines.accumulator import Sums

UNITS = 2.0**50
MAGIC = 1.5 * 2.0**52  # times a unit: adding and subtracting it rounds to whole units
SPARE = 64.0  # records beyond four expected batches
SLACK = 2.0**-11  # of C: what units may move a sum by, half of what norms are enlarged by


def unit_of(max_grad_norm: float, expected_batch_size: float) -> float:
    """A power of two, from public facts alone. A batch of up to eight times the expected size is
    summed exactly; a larger one is summed like any floats.

    Args:
        max_grad_norm: C, the most that one record adds to an entry.
        expected_batch_size: B.
    """
    most = max_grad_norm * (4.0 * expected_batch_size + SPARE)
    return 2.0 ** math.ceil(math.log2(most)) / UNITS


@dataclass(frozen=True)
class Summing:
    """How the sums of micro-batches become the sum of a batch.

    Attributes:
        unit: what float64 sums are multiples of; 0 for sums as they come.
        side_unit: what numbers beside the gradients are multiples of, to which a record adds at
            most 1; 0 for sums as they come.
        over_ranks: whether the caller adds up over the processes of a group before there is noise.
        most_entries: of float64 parameters, up to which there are units.
    """

    unit: float = 0.0
    side_unit: float = 0.0
    over_ranks: bool = False
    most_entries: float = math.inf

    def apart(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a micro-batch is summed by itself before it is added."""
        entries = sum(p.numel() for p in parameters if p.dtype == torch.float64)
        return self.unit > 0 and 0 < entries <= self.most_entries

    def add(self, total: Sums, part: Sums) -> None:
        """Adds a micro-batch that was summed apart, and lets go of it."""
        for name in list(part):
            brought = settled(part.pop(name), self.unit)
            total[name] = total[name].add_(brought) if name in total else brought

    def beside(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same for numbers beside the gradients, float64 whatever the gradients are."""
        return {name: settled(value, self.side_unit) for name, value in sums.items()}


def summing_of(
    max_grad_norm: float, expected_batch_size: float, over_ranks: bool = False
) -> Summing:
    """How the batch of a release is summed."""
    unit = unit_of(max_grad_norm, expected_batch_size)
    # M <= B: micro-batches of two records or more (a record alone is rounded alone), and up to
    # two expected batches.
    most = (SLACK * max_grad_norm / (unit * max(expected_batch_size, 1.0))) ** 2
    return Summing(unit, unit_of(1.0, expected_batch_size), over_ranks, most)


def settled(value: Tensor, unit: float) -> Tensor:
    """``value`` in whole units, in place; as it is in another dtype than float64."""
    if unit <= 0 or value.dtype != torch.float64:
        return value
    return value.add_(MAGIC * unit).sub_(MAGIC * unit)
