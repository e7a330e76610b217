"""What clipping asks of the other ranks, where all of them gather a model's parameters together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

Arriving = Callable[[], Tensor]  # waits for what is on its way


class Company(Protocol):
    """The ranks of a run that hold a shard of every parameter each. Every method is called by all
    of them, in the same order.
    """

    @property
    def size(self) -> int:
        """How many ranks, or groups of ranks that share records: as many shards."""
        ...

    def told(self, place: str, number: int, facts: str = "", of: str = "passes") -> list[int]:
        """A number of each rank, in the order of the ranks; ``facts``, of the passes or of the
        loss, have to be the same on all.

        Raises:
            RuntimeError: on all ranks where they are at different places, or say different things.
        """
        ...

    def given_by(self, rank: int, value: Any) -> Any:
        """What one rank gives, on all. May be private."""
        ...

    def scattered(self, sums_wn: Tensor) -> Arriving:
        """[n]: this rank's row of the sum over all ranks, once it is asked for.

        Args:
            sums_wn: [ranks, n] what this rank adds to each rank's row, which nobody writes to any
                more. Private.
        """
        ...
