"""The ranks of a run whose model is cut over them by tensor parallel plans: all of them hold the
same records, and a part of every layer each. So a batch is one share, clipped by all together.

Sums of what is cut are where their noise is drawn. What all ranks hold whole is summed by one of
them and by no other, gets its noise on its owner, and goes from there to all: copies that differ
by a rounding would, with the same noise on both, tell the difference without noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quietgrad.distributed.alike import batch_digest
from quietgrad.distributed.exchange import owners_of
from quietgrad.distributed.ranks import FIRST, Ranks
from quietgrad.distributed.team import Facts
from quietgrad.distributed.wrapping import Expected
from quietgrad.tensors import Batch


class CutRanks(Ranks):
    """This process as one rank of a run whose ranks share every record; see ``Team``."""

    @property
    def share(self) -> tuple[int, int]:
        return 0, 1

    def agree(self, place: str, facts: Facts, examples: int = 0) -> int:
        """See ``Ranks.agree``. The examples are the same on all ranks, and count once.

        Raises:
            RuntimeError: on all ranks where they are not.
        """
        numbers = self.agreed(place, facts, examples)
        if any(number != numbers[0] for number in numbers):
            raise self._stop(
                "the ranks hold different numbers of records of one batch, and share every record; "
                "clip the same records on all ranks"
            )
        return numbers[0]

    def _side_sums(self, own: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
        """The first rank's: every rank has seen every record."""
        if self.rank != FIRST:
            return {}
        none = torch.zeros((), dtype=torch.float64)
        return {name: own.get(name, none).detach().to("cpu", torch.float64) for name in names}


@dataclass
class Cutters:
    """``CutCompany`` over the ranks of a run.

    Attributes:
        ranks: of the run.
        mesh: that layers are cut on.
        expected: operations that are the library's own.
    """

    ranks: CutRanks
    mesh: Any
    expected: Expected

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank())

    @property
    def size(self) -> int:
        return self.ranks.size

    def owners(self, entries: Mapping[str, int]) -> dict[str, int]:
        return owners_of(entries, self.size)

    def require_same_records(self, batch: Batch, parameters: str) -> None:
        facts = {"micro-batch": batch_digest(batch), "parameters": parameters}
        self._require_same("micro-batch", facts)

    def require_same(self, place: str, said: str) -> None:
        self._require_same(place, {"passes": said})

    def _require_same(self, place: str, facts: Facts) -> None:
        with self.expected.operations():
            self.ranks.agreed(place, facts, 0)

    def of_each(self, values_n: Tensor) -> Tensor:
        values = values_n.detach().contiguous().to(self.mesh.device_type)
        # Zeros: what does not arrive is then no other tensor's memory.
        found = [torch.zeros_like(values) for _ in range(self.size)]
        with self.expected.operations(), self.ranks.lost():
            dist.all_gather(found, values, group=self.mesh.get_group())
        return torch.stack(found)
