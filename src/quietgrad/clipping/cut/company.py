"""What clipping asks of the other ranks, where they hold the records together and a part of every
layer each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from quietgrad.tensors import Batch


class CutCompany(Protocol):
    """The ranks of a run that share this one's records. Every method is called by all of them, in
    the same order.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the process group, in order."""
        ...

    @property
    def across(self) -> tuple[int, ...]:
        """Of the process group, those that hold the same part as this one for other records, and
        this one; in order.
        """
        ...

    @property
    def rank(self) -> int: ...
    def owners(self, entries: Mapping[str, int]) -> dict[str, int]:
        """Name -> the rank that counts a parameter which all hold whole; needs no other rank."""
        ...

    def require_same_records(self, batch: Batch, parameters: str, loss: str) -> None:
        """That all ranks are about to run the same records, in the same order, and train the same
        parameters, cut in the same way: each would else count what another counts too. And that
        they know the same of the loss: each would else look at it alone.

        Raises:
            RuntimeError: on all ranks where they are not.
        """
        ...

    def require_same(self, place: str, said: str) -> None:
        """That all ranks are at one place and say the same.

        Raises:
            RuntimeError: on all ranks where they do not.
        """
        ...

    def of_each(self, values_n: Tensor) -> Tensor:
        """[ranks, n]: a vector of every rank, in the order of the ranks. May be private."""
        ...
