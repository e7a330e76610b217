"""Made-up records alone and beside each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.soundness.company.differences import MIXES, Mixes, close, require_same
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.clipping.soundness.records import take
from quietgrad.clipping.soundness.subject import Look, Subject
from quietgrad.tensors import Batch, batch_size_of


@dataclass(frozen=True)
class Company:
    """How records are compared that a model may not be able to run on.

    Attributes:
        subject: model and loss; random numbers are held still.
        seen: what is said of a difference.
        factors: whether what gradients are made of is compared, beside losses.
    """

    subject: Subject
    seen: str
    factors: bool

    def compare(
        self, made: Batch, orders: list[list[int]], rows: Collection[int] | None = None
    ) -> bool:
        """Whether the model ran on these records together, in all orders; nothing of them stays.
        A record that it cannot take alone stands beside the others, and is not compared.

        Args:
            made: the records.
            orders: places of them, in each company.
            rows: places of those that are taken alone and compared; None for all.

        Raises:
            Mixes: where a record's loss, or what its gradient is made of, is another in company.
        """
        before = Snapshot(self.subject.model, self.subject.per_example_loss)
        try:
            every = range(batch_size_of(made))
            wanted = every if rows is None else rows
            alone = [self._alone(made, row) if row in wanted else None for row in every]
            for order in orders:
                self._require_same(take(made, order), [alone[row] for row in order])
            return any(one is not None for one in alone)
        except Mixes:
            raise
        except Exception:  # it may check lengths or look numbers up
            return False
        finally:
            before.put_back()

    def _alone(self, made: Batch, row: int) -> Look | None:
        one = take(made, [row])
        try:
            return self._look(one)
        except Exception:
            return None

    def _look(self, records: Batch, salt: int = 0) -> Look:
        if self.factors:
            return self.subject.look(records, salt=salt)
        return Look(self.subject.losses(records, salt), {}, {})

    def _require_same(self, records: Batch, alone: list[Look | None]) -> None:
        together = self._look(records)
        known = [row for row, look in enumerate(alone) if look is not None]
        looks = [look for look in alone if look is not None]
        if not looks:
            return
        apart = torch.cat([look.losses for look in looks])
        limits = self.subject.tolerance(apart)
        if not self._agree(together.losses[known], apart):
            if self._agree(together.losses, self._look(records, salt=1).losses):
                raise Mixes(MIXES.format(self.seen))
            return  # numbers that are drawn by other means: nothing can be compared
        for row, look in zip(known, looks, strict=True):
            if bool(look.losses.isfinite().all()):
                require_same(look, together, row, limits)

    def _agree(self, one: Tensor, other: Tensor) -> bool:
        limits = self.subject.tolerance(one)
        return close(one, other, limits.loss, limits.floor)
