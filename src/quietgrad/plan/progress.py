"""What a run tells of how far it is, and of what it has spent. Public."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quietgrad.accounting import epsilon_report
from quietgrad.plan.open_batch import OpenBatch, tell_where_none_is_left
from quietgrad.plan.planned import Planned


class TellsProgress:
    """How many releases were made, which epoch and phase it is, and what was spent."""

    _plan: Planned
    _released: int
    _given_up: bool
    _spent: tuple[int, float]
    _open: OpenBatch | None

    @property
    def plan(self) -> Planned:
        """What the run carries out, and what its epsilon is of: the same to its end."""
        return self._plan

    @property
    def released(self) -> int:
        """Noisy sums released so far, also those of an earlier session with the same ledger."""
        return self._released

    def epochs(self) -> Iterator[int]:
        """Numbers of the epochs that remain, one a pass over ``loader``; a resumed run goes on with
        the epoch that it was in.
        """
        if self._open is None:
            tell_where_none_is_left(self._released, self.plan.steps)
        while self._released < self.plan.steps:
            yield self._released // self.plan.sampler.steps_per_epoch

    def phases(self) -> Iterator[tuple[int, int]]:
        """(phase, steps of it that remain) of the phases that do; a resumed run goes on in the one
        that it was in. Inside, loop over ``batches(steps)``. Where a phase ends is public.
        """
        if self._open is None:
            tell_where_none_is_left(self._released, self.plan.steps)
        while self._released < self.plan.steps:
            yield self.plan.phase_at(self._released)

    def epsilon(self) -> float:
        """Privacy spent so far at the plan's delta; 0 before the first release, infinite once
        privacy was given up.
        """
        if self._given_up:
            return math.inf
        if self._spent[0] != self._released:
            event = self.plan.event.after(self._released)
            self._spent = self._released, epsilon_report(event, self.plan.delta).epsilon
        return self._spent[1]
