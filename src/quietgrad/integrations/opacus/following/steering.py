"""Learning rates that follow the training loss: ``ReduceLROnPlateau`` is to watch public records.

A loop reads losses off its batches to print them, and their mean is as private as they are. Where a
schedule's best value is what the last pass makes of such numbers, it is refused; another use of
them (a loss of one's own making, an early stop) is not seen.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence

from torch.optim.lr_scheduler import ReduceLROnPlateau

from quietgrad.clipping.soundness.refusals import named_by_callers

READINGS = 8  # numbers of a batch that are followed
CLOSE = 1e-6


class PassReadings:
    """What a loop read off the batches of a pass. Private."""

    def __init__(self) -> None:
        self._series: list[list[tuple[float, int]]] = []
        self._told: list[float] = []  # of the last pass

    def note(self, numbers: Sequence[float], records: int) -> None:
        """Those of one micro-batch, in order."""
        for i, x in enumerate(numbers[:READINGS]):
            if i == len(self._series):
                self._series.append([])
            self._series[i].append((x, records))

    def next_pass(self, batches: int, dataset_size: int) -> None:
        """What loops make of them: sums and means, by batches or by records."""
        counts = (batches, dataset_size)
        told = itertools.chain(*(_made_of(series, *counts) for series in self._series))
        self._series, self._told = [], [x for x in told if math.isfinite(x) and x]

    def require(self, optimizers: Sequence[object]) -> None:
        """Before the first step of a pass.

        Args:
            optimizers: private ones, and what they wrap.

        Raises:
            ValueError: for a schedule of theirs that has watched such a number.
        """
        if not self._told:
            return
        for thing in named_by_callers(sys._getframe(1)):
            if issubclass(type(thing), ReduceLROnPlateau) and any(
                thing.optimizer is one for one in optimizers
            ):
                best = float(thing.best)
                if any(math.isclose(best, x, rel_tol=CLOSE) for x in self._told):
                    raise ValueError(
                        "ReduceLROnPlateau was given a number that was read off the private "
                        "batches (the training loss): the learning rate would follow private "
                        "records, and epsilon does not cover it; give it a loss of public "
                        "records, or use a schedule that follows the epoch alone"
                    )


def _made_of(series: list[tuple[float, int]], batches: int, dataset_size: int) -> Iterator[float]:
    plain = math.fsum(x for x, _ in series)
    weighted = math.fsum(x * n for x, n in series)
    yield series[-1][0]
    yield from (plain, plain / len(series), plain / max(1, batches), plain / dataset_size)
    yield from (weighted, weighted / max(1, sum(n for _, n in series)), weighted / dataset_size)
