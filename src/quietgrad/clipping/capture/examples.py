"""What is clipped as one: a record, the views of a record, or all the records of a user that a
batch holds.

Views and records of a user are rows of the model's batch; their gradients are added up, divided or
not, before the norm is taken. So a user with many records contributes as much as one with a single
record at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor

from quietgrad.clipping.capture.views import rows_of, slice_batch
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.sending import numbers_beside
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of

Combined = Literal["mean", "sum"]
COMBINED: tuple[Combined, ...] = ("mean", "sum")


class UserBatch(NamedTuple):
    """Records of users, those of a user side by side. Private.

    Attributes:
        records: nested containers of tensors [records, ...].
        sizes: [users] how many of the records are each user's, in order; at least one.
    """

    records: Batch
    sizes: tuple[int, ...]

    def __repr__(self) -> str:
        return "UserBatch(hidden)"


@dataclass(frozen=True)
class Examples:
    """A batch as examples: what the model sees of it, and which rows are one example's. Private.

    Attributes:
        records: tensors [records, ...], or [records, K, ...] with K views.
        sizes: [examples] records of each; None where every record is an example.
        views: K.
        combined: "mean" or "sum" of the gradients of a user's records.
    """

    records: Batch = field(repr=False)
    sizes: tuple[int, ...] | None = field(default=None, repr=False)
    views: int = 1
    combined: Combined = "mean"

    @classmethod
    def of(cls, batch: Batch, views: int, combined: Combined | None) -> Examples:
        """A batch as it was handed over.

        Raises:
            ValueError: where users are protected and nothing says whose the records are, or the
                other way round.
        """
        if combined is None:
            if isinstance(batch, UserBatch):
                raise ValueError(
                    "the batch says which records are one user's, but records are what is clipped; "
                    "build the plan with record_owner, or clip batch.records"
                )
            return cls(batch, None, views)
        if not isinstance(batch, UserBatch):
            raise ValueError(
                "users are what is clipped, and nothing says which records of the batch are one "
                "user's; take batches from run.loader, or pass "
                "quietgrad.clipping.UserBatch(records, sizes)"
            )
        sizes = tuple(int(size) for size in batch.sizes)
        # No numbers: they are private.
        if min(sizes, default=1) < 1 or sum(sizes) != batch_size_of(batch.records):
            raise ValueError(
                "the sizes of a UserBatch must each be at least 1 and add up to its records; give "
                "the number of records of each user, in the order of the records"
            )
        return cls(batch.records, sizes, views, combined)

    @classmethod
    def each(cls, records: Batch, views: int) -> Examples:
        """Every record for itself, whosesoever it is."""
        return cls(records.records if isinstance(records, UserBatch) else records, None, views)

    def __len__(self) -> int:
        return batch_size_of(self.records) if self.sizes is None else len(self.sizes)

    @property
    def record_count(self) -> int:
        return batch_size_of(self.records)

    @cached_property
    def rows(self) -> Batch:
        """What the model sees.

        Raises:
            ValueError: for a tensor without a dimension of K views.
        """
        return rows_of(self.records, self.views)

    @cached_property
    def looked_at(self) -> Batch:
        """The rows, views and records of a user each by themselves, in which it is looked for what
        mixes records or is kept of them. One row where all are one record's, or one user's: they
        would show nothing of others.
        """
        return slice_batch(self.rows, 0, 1) if len(self) == 1 else self.rows

    @cached_property
    def groups(self) -> RowGroups:
        if self.sizes is None:  # no walk through all examples: small models wait for it
            return RowGroups((self.views,) * len(self), single=self.views == 1)
        return RowGroups(tuple(size * self.views for size in self.sizes))

    def parts(self, size: int) -> Iterator[Examples]:
        """Micro-batches of at most so many records, those counted that fill up smaller users; a
        user is never cut, and may be a micro-batch alone.
        """
        if self.sizes is None:
            for start in range(0, len(self), size):
                part = slice_batch(self.records, start, start + size)
                yield Examples(part, None, self.views)
            return
        begin = 0
        for span in whole_users(self.sizes, size):
            sizes = self.sizes[span]
            part = slice_batch(self.records, begin, begin + sum(sizes))
            begin += sum(sizes)
            yield Examples(part, sizes, self.views, self.combined)

    def averaged(self, losses: Tensor) -> Tensor:
        """[rows] losses, so divided that the gradient of an example's sum is what is clipped."""
        divisors = self._divisors
        if max(divisors, default=1) <= 1:
            return losses
        if self.sizes is None:
            return losses / self.views
        # Always by a tensor of the wide type. Half precision rounds 257 to 256, and a plain number
        # where all users have as many would not be rounded: a matter of who else is there.
        rows = [d for d, size in zip(divisors, self.groups.sizes, strict=True) for _ in range(size)]
        wide = accumulation_dtype(losses.dtype)
        return losses.to(wide) / numbers_beside(rows, losses, wide)

    @property
    def divisor(self) -> int:
        """Of an example that is alone: what the sum over its rows is divided by."""
        (found,) = self._divisors
        return found

    @cached_property
    def _divisors(self) -> tuple[int, ...]:
        """[examples]"""
        if self.sizes is None or self.combined == "sum":
            return (self.views,) * len(self)
        return self.groups.sizes


def whole_users(sizes: tuple[int, ...], size: int) -> Iterator[slice]:
    """Cuts users in order into micro-batches whose users, each filled up to the largest among them,
    are at most ``size`` records; at least one user each.
    """
    start, largest = 0, 0
    for i, records in enumerate(sizes):
        largest = max(largest, records)
        if i > start and (i + 1 - start) * largest > size:
            yield slice(start, i)
            start, largest = i, records
    if sizes:
        yield slice(start, len(sizes))
