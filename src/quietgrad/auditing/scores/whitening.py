"""Releases to what a record's contribution has to be compared with, whatever the noise's
correlation.

Released rows are X = C_mix^-1 (C_mix G + sigma C z), so C_mix X holds independent noise, and a
contribution g in row t enters it as the outer product of column t with g. All that C_mix X says
of g is its product with that column: row t of (C_mix^T C_mix) X, with noise of standard deviation
sigma C times the column's norm. For independent noise that is X itself. The matrix is public.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quietgrad.plan import PrivacyPlan


class Whitener:
    """Rows of (C_mix^T C_mix) X as they become complete; holds the last 2 b - 1 rows of X."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._steps = plan.steps
        correlated = plan.mixing is not None and plan.event.bands > 1
        self._bands = plan.event.bands if correlated else 1
        self._gram = (
            plan.mixing.banded.gram_band() if plan.mixing is not None and correlated else None
        )
        self._rows: deque[tuple[int, Tensor]] = deque(maxlen=2 * self._bands - 1)
        self._next = 0

    def weight(self, row: int, other: int) -> float:
        """Entry of C_mix^T C_mix."""
        if self._gram is None:
            return float(row == other)
        return (
            float(self._gram[min(row, other), abs(row - other)])
            if abs(row - other) < self._bands
            else 0.0
        )

    def variance(self, row: int) -> float:
        """Squared norm of column ``row``: variance of the row's noise, in units of (sigma C)^2, and
        squared length of the contribution's image, in units of its own.
        """
        return self.weight(row, row)

    def push(self, step: int, residual: Tensor) -> list[tuple[int, Tensor]]:
        """Takes row ``step`` of X, [size]; returns the rows that are complete with it, as (row,
        [size]).
        """
        self._rows.append((step, residual))
        return self._complete(step - self._bands + 1)

    def flush(self) -> list[tuple[int, Tensor]]:
        """The rows that remain after the last release."""
        return self._complete(self._steps - 1)

    def _complete(self, last: int) -> list[tuple[int, Tensor]]:
        found = []
        while self._next <= last:
            row = self._next
            parts = [
                (self.weight(row, step), residual)
                for step, residual in self._rows
                if abs(step - row) < self._bands
            ]
            total = parts[0][1] * parts[0][0]
            for weight, residual in parts[1:]:
                total = total + residual * weight
            found.append((row, total))
            self._next += 1
        return found


def participations(plan: PrivacyPlan, record: int) -> NDArray[np.int64]:
    """Steps whose batches may hold the record."""
    steps = np.arange(plan.steps)
    parts = plan.sampler.parts
    return steps if parts is None else steps[steps % plan.event.bands == parts[record]]


def log_likelihood_ratio(
    product: NDArray[np.float64], energy: NDArray[np.float64], rate: float
) -> NDArray[np.float64]:
    """log((1 - q) + q exp(<y, c> / s^2 - |c|^2 / (2 s^2))): one participation, with the record
    against without.

    Args:
        product: <y, c> / s^2, c the record's contribution, s the noise's standard deviation.
        energy: |c|^2 / s^2.
        rate: q.
    """
    exponent = product - energy / 2
    if rate >= 1:
        return exponent
    return np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
