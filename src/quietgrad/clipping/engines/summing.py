"""How micro-batches are added up, so that neither their order nor who added them changes the sum.

In float64 every micro-batch's sum is brought to whole multiples of one small unit before it is
added. Sums of such numbers are exact as long as they stay below 2^53 units, so they are the same in
any order, on any number of processes, by any algorithm of a reduction. The unit is 2^-50 of what
four expected batches can add up to: with B = 64 about 1e-12 of the clipping norm, far below what
noise covers. In float32 a unit would cost digits. There a few micro-batches are added up as they
come, and each such run is added with what rounding took from the earlier ones (W. Kahan, "Further
remarks on reducing truncation errors", CACM 8(1), 1965): what one record more does to the rounding
of all later additions grows with the run, not with the batch.

One record more moves all later ones to other micro-batches, whose sums are then rounded otherwise:
by up to a unit each, in every one of d entries, so by M sqrt(d) units in norm. The slack of the
norms, 2^-10, has to cover it. Where a batch and a model are so large that it might not, float64
sums too are added as they are, which rounds by 2^-53 of the sum itself and not of a bound on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quietgrad.beside.values import Observed
from quietgrad.clipping.engines.accumulator import Sums

UNITS = 2.0**50
MAGIC = 1.5 * 2.0**52  # times a unit: adding and subtracting it rounds to whole units
SPARE = 64.0  # records beyond four expected batches
RUN = 8  # micro-batches that are added up one after the other, and then as one
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


def sums_held(parts: int) -> int:
    """How many sums as large as the gradients ``Total`` holds for so many micro-batches, in
    float32.
    """
    return 3 if parts > RUN else 1


@dataclass
class Total:
    """The sum of a batch while its micro-batches come. Private.

    Memory: the sum; with units or more than ``RUN`` micro-batches a run's too, and in float32 what
    rounding took.

    Attributes:
        summing: how they are added up.
        run: how many are summed apart before they are added; 0 for none.
    """

    summing: Summing
    run: int
    _sums: Sums = field(default_factory=dict, repr=False)
    _lost: Sums = field(default_factory=dict, repr=False)
    _own: Sums = field(default_factory=dict, repr=False)
    _held: int = 0

    @classmethod
    def of(cls, summing: Summing, parameters: Iterable[Tensor], parts: int) -> Total:
        """``parts``: how many micro-batches there will be."""
        if summing.apart(parameters):
            return cls(summing, 1)
        return cls(summing, RUN if parts > RUN else 0)

    def add(self, add_to: Callable[[Sums], Observed]) -> Observed:
        """One micro-batch, which ``add_to`` adds to what it is given; returns what that returns."""
        if not self.run:
            return add_to(self._sums)
        seen = add_to(self._own)
        self._held += 1
        if self._held == self.run:
            self._fold()
        return seen

    def finished(self) -> Sums:
        """All of them."""
        self._fold()
        for name in list(self._lost):
            self._sums[name].sub_(self._lost.pop(name))
        return self._sums

    def _fold(self) -> None:
        for name in list(self._own):
            part = self._own.pop(name)
            if name not in self._sums or part.dtype == torch.float64:
                self.summing.add(self._sums, {name: part})
                continue
            before = self._sums[name]
            if name in self._lost:
                part.sub_(self._lost[name])
            after = self._sums[name] = before + part
            self._lost[name] = before.neg_().add_(after).sub_(part)
        self._held = 0


def settled(value: Tensor, unit: float) -> Tensor:
    """``value`` in whole units, in place; as it is in another dtype than float64."""
    if unit <= 0 or value.dtype != torch.float64:
        return value
    return value.add_(MAGIC * unit).sub_(MAGIC * unit)
