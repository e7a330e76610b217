"""A batch that was drawn, as the records that are known and the canaries among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietgrad.plan import PrivacyPlan
from quietgrad.sampling import UserIndices

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Drawn:
    """Canaries of a batch.

    Attributes:
        numbers: 0 .. m - 1.
        sizes: [canaries] records that stand for each in this step; None where canaries are records.
    """

    numbers: Indices
    sizes: tuple[int, ...] | None = None

    @property
    def rows(self) -> Indices:
        """The canary of every record."""
        return self.numbers if self.sizes is None else np.repeat(self.numbers, self.sizes)

    def where(self, kept: NDArray[np.bool_]) -> Drawn:
        """Those of them, by [canaries] booleans."""
        if self.sizes is None:
            return Drawn(self.numbers[kept])
        sizes = tuple(n for n, here in zip(self.sizes, kept, strict=True) if here)
        return Drawn(self.numbers[kept], sizes)

    def parts(self, records: int) -> Iterator[Drawn]:
        """In order, of about so many records each."""
        at_once = max(1, records // max(self.sizes or (1,)))
        for start in range(0, len(self.numbers), at_once):
            span = slice(start, start + at_once)
            yield Drawn(self.numbers[span], None if self.sizes is None else self.sizes[span])


def divided(batch: Indices | UserIndices, known: int) -> tuple[Indices | UserIndices, Drawn]:
    """The records (users) 0 .. known - 1 of a batch, and the canaries after them."""
    if isinstance(batch, UserIndices):
        ours = batch.users < known
        canaries = batch.where(~ours)
        return batch.where(ours), Drawn(canaries.users - known, canaries.sizes)
    return batch[batch < known], Drawn(batch[batch >= known] - known)


def require_last(plan: PrivacyPlan, canaries: int) -> None:
    """Refuses a plan for users whose canaries' records do not follow all others'.

    Raises:
        ValueError: since indices of the others would not be those of the caller's records.
    """
    users = plan.sampler.users
    if users is None:
        return
    end = users.offsets[-canaries - 1]
    if (users.order[end:] < end).any():
        raise ValueError(
            "the last users of the plan are the canaries, and some of their records come before "
            "another user's; build it with record_owner=[*owners, *owners_of_canaries]"
        )
