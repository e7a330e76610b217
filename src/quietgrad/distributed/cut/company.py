"""The ranks that share records, as clipping meets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quietgrad.distributed.alike import batch_digest
from quietgrad.distributed.cut.ranks import CutRanks
from quietgrad.distributed.exchange import owners_of
from quietgrad.distributed.team import Facts
from quietgrad.distributed.wrapping import Expected
from quietgrad.tensors import Batch


@dataclass
class Cutters:
    """``CutCompany`` over ranks of a run.

    Attributes:
        team: all ranks of the run.
        group: of those that share records, which layers are cut over.
        kind: of device.
        expected: operations that are the library's own.
    """

    team: CutRanks
    group: Any
    kind: str
    expected: Expected

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.team.neighbours

    @property
    def across(self) -> tuple[int, ...]:
        return self.team.across

    @property
    def rank(self) -> int:
        return self.ranks.index(self.team.rank)

    def owners(self, entries: Mapping[str, int]) -> dict[str, int]:
        return owners_of(entries, len(self.ranks))

    def require_same_records(self, batch: Batch, parameters: str, loss: str) -> None:
        facts = {"micro-batch": batch_digest(batch), "parameters": parameters, "loss": loss}
        self._require_same("micro-batch", facts)

    def require_same(self, place: str, said: str) -> None:
        self._require_same(place, {"passes": said})

    def _require_same(self, place: str, facts: Facts) -> None:
        with self.expected.operations():
            self.team.among_neighbours(place, facts)

    def of_each(self, values_n: Tensor) -> Tensor:
        values = values_n.detach().contiguous().to(self.kind)
        # Zeros: what does not arrive is then no other tensor's memory.
        found = [torch.zeros_like(values) for _ in self.ranks]
        with self.expected.operations(), self.team.lost():
            dist.all_gather(found, values, group=self.group)
        return torch.stack(found)
