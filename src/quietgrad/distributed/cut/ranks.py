"""The ranks of a run whose model is cut over them by tensor parallel plans. Neighbours share
records: each of them holds a part of every layer, and a share of the batch is clipped by all of
them together. Groups of neighbours have shares of their own, and copies of the model, or shards.

What is cut over neighbours alone has copies in other groups, and what is sharded over groups has
copies among neighbours; what is neither is everywhere. The sums of copies go to one owner, who
draws the noise, and what is released goes from there to all: copies that differ by a rounding
would, with the same noise on both, tell the difference without noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quietgrad.distributed.alike import message, weights_digest
from quietgrad.distributed.circles import Circle, Circles
from quietgrad.distributed.compared.code import CODE
from quietgrad.distributed.groups.patience import patience
from quietgrad.distributed.ranks import ALL, Ranks
from quietgrad.distributed.team import Facts
from quietgrad.tensors import Block, axis_of, block_at, is_spread

ACROSS, WITHIN = "across", "within"  # circles of other groups, and of neighbours


class CutRanks(Ranks):
    """This process as one rank of a run whose neighbours share every record; see ``Team``.

    Args:
        together: how many neighbours share a record; a divisor of the number of ranks.

    Attributes:
        neighbours: ranks that share this one's records, in order.
        across: ranks that hold what this one holds, for other records, and this one; in order.
    """

    named = ("weights", "weights of cut layers", "sharded weights")

    def __init__(self, together: int) -> None:
        self.together = together
        self._subgroups: dict[tuple[str, str], Any] = {}
        super().__init__()

    def form(self) -> None:
        self._group_among(WITHIN, "cpu")
        self._group_among(ACROSS, "cpu")

    @property
    def neighbours(self) -> tuple[int, ...]:
        first = self.rank - self.rank % self.together
        return tuple(range(first, first + self.together))

    @property
    def across(self) -> tuple[int, ...]:
        return tuple(range(self.rank % self.together, self.size, self.together))

    @property
    def share(self) -> tuple[int, int]:
        return self.rank // self.together, self.size // self.together

    @property
    def _counting(self) -> range:
        return range(0, self.size, self.together)

    def agree(self, place: str, facts: Facts, examples: int = 0) -> int:
        """See ``Ranks.agree``. The examples are the same on neighbours, and count once.

        Raises:
            RuntimeError: on all ranks where they are not.
        """
        numbers = self.agreed(place, facts, examples)
        if any(numbers[r] != numbers[r - r % self.together] for r in range(self.size)):
            raise self._stop(
                "the ranks hold different numbers of records of one batch, and share every record; "
                "clip the same records on all ranks"
            )
        return sum(numbers[:: self.together])

    def among_neighbours(self, place: str, facts: Facts) -> None:
        """That those that share records say the same.

        Raises:
            RuntimeError: on all of them where they do not; the others hear of it at their next
                agreement.
        """
        self.require()
        group = self._group_among(WITHIN, "cpu")
        try:
            told = {**facts, **{name: self._weights.get(name, "") for name in CODE}}
            self._said_alike(place, told, 0, list(self.neighbours), group)
        except RuntimeError:
            if len(self.across) > 1:
                self._tell()
            raise

    @property
    def _own_groups(self) -> list[Any]:
        return [*super()._own_groups, *self._subgroups.values()]

    def _tell(self) -> bool:
        """To neighbours, who may be in the middle of a share, and to all."""
        mine = message(False, "", {}, 0)
        told = [torch.empty_like(mine) for _ in self.neighbours]
        with contextlib.suppress(Exception):
            if len(self.across) > 1:
                group = self._group_among(WITHIN, "cpu")
                dist.all_gather(told, mine, group=group, async_op=True)
        return super()._tell()

    def _digests(self, model: nn.Module) -> dict[str, str]:
        circle = self._circle_of
        return {
            name: weights_digest(model, lambda p, of=of: circle(p) == of)  # type: ignore[misc]
            for name, of in zip(self.named, (ALL, ACROSS, WITHIN), strict=True)
        }

    def _compared(self, name: str) -> list[list[int]]:
        first, step = range(0, self.size, self.together), range(self.together)
        if name == "weights of cut layers":
            return [[f + s for f in first] for s in step]
        if name == "sharded weights":
            return [[f + s for s in step] for f in first]
        return super()._compared(name)

    def _all_circles(self) -> Circles:
        circles = {ALL: Circle(self.rank, self.size, self._group)}
        for name, ranks in ((ACROSS, self.across), (WITHIN, self.neighbours)):
            circles[name] = Circle(ranks.index(self.rank), len(ranks), self._moving(name))
        return Circles(circles, self._circle_of)

    def _moving(self, name: str) -> Any:
        def group(tensors: Mapping[str, Tensor]) -> Any:
            return self._group_among(name, next(iter(tensors.values())).device.type)

        return group

    def _circle_of(self, tensor: Tensor) -> str | None:
        cut, sharded = (self._is_spread_over(tensor, r) for r in (self.neighbours, self.across))
        if cut:
            return None if sharded or len(self.across) == 1 else ACROSS
        return WITHIN if sharded else ALL

    @staticmethod
    def _is_spread_over(tensor: Tensor, ranks: tuple[int, ...]) -> bool:
        axis = axis_of(tensor, ranks) if is_spread(tensor) else None
        spread: Any = tensor
        return axis is not None and not spread.placements[axis].is_replicate()

    def _block(self, tensor: Tensor, rank: int) -> Block:
        like: Any = tensor
        place = [0] * like.device_mesh.ndim
        for ranks, there in (
            (self.neighbours, rank % self.together),
            (self.across, rank // self.together),
        ):
            axis = axis_of(tensor, ranks)
            if axis is not None:
                place[axis] = there
        return block_at(like.shape, like.placements, tuple(like.device_mesh.shape), tuple(place))

    def _group_among(self, name: str, kind: str) -> Any:
        """A group of this rank's circle whose backend moves tensors of this kind of device; all
        ranks come here alike.
        """
        if name == WITHIN and len(self.across) == 1:
            return self._group_of(kind)
        if (name, kind) not in self._subgroups:
            compared = {WITHIN: "sharded weights", ACROSS: "weights of cut layers"}[name]
            for ranks in self._compared(compared):
                backend = "gloo" if kind == "cpu" else None
                group = dist.new_group(ranks, timeout=patience(), backend=backend)
                if self.rank in ranks:
                    self._subgroups[name, kind] = group
        return self._subgroups[name, kind]
