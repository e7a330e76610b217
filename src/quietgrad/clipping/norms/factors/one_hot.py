"""One-hot factors: the rows of an embedding table that each position reads, never formed as a
matrix.

Shape legend: b examples, g = 1 block, t positions, p rows of the table, d columns, k projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.matrix import Sizes, Unfolded
from quietgrad.clipping.norms.factors.products import zeroed
from quietgrad.clipping.norms.factors.rows import at_least, not_zero, row_norms
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import gamma


@dataclass(frozen=True)
class OneHotFactors(Unfolded):
    """One use of an embedding table: left is the one-hot matrix of ``ids``, never formed.

    Attributes:
        ids_bt: row of the table that each position reads.
        right_bgtd: gradient at each position, zero at positions that read the padding row; g = 1.
        rows: number of rows of the table.
    """

    ids_bt: Tensor
    right_bgtd: Tensor
    rows: int

    @property
    def sizes(self) -> Sizes:
        b, g, t, d = self.right_bgtd.shape
        return Sizes(b, g, t, self.rows, d)

    @property
    def one_hot(self) -> bool:
        return True

    @property
    def additions(self) -> int:
        return self.right_bgtd.shape[2]  # row by row, one position after the other

    def examples(self, span: slice) -> OneHotFactors:
        return OneHotFactors(self.ids_bt[span], self.right_bgtd[span], self.rows)

    def positions(self, examples: slice, positions: slice) -> OneHotFactors:
        return OneHotFactors(
            self.ids_bt[examples, positions], self.right_bgtd[examples, :, positions], self.rows
        )

    def of_extent(self, numbers: Tensor, extent: tuple[int, ...]) -> OneHotFactors:
        return OneHotFactors(self.ids_bt[numbers], self.right_bgtd[numbers], self.rows)

    def merged(self, groups: RowGroups) -> OneHotFactors:
        ids, right = groups.indices(self.ids_bt), groups.positions(self.right_bgtd)
        return OneHotFactors(ids, right, self.rows)

    def without(self, dropped_b: Tensor) -> OneHotFactors:
        return OneHotFactors(self.ids_bt, zeroed(self.right_bgtd, dropped_b), self.rows)

    def weighted_sum(
        self, weights_b: Tensor, shape: torch.Size, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Formed apart, of the rows that are read: added to ``into`` one position after the other,
        each addition would round as much as the whole sum. In float64: all positions of all
        examples may read one row, one after the other, and what one of them adds in this use and
        takes back in another would decide how all that follow round.
        """
        right = (self.right_bgtd.to(dtype) * weights_b.to(dtype).view(-1, 1, 1, 1)).flatten(0, 2)
        ids = self.ids_bt.reshape(-1)
        wide = torch.float64
        if self.rows <= len(ids):
            made = right.new_zeros(self.rows, right.shape[1], dtype=wide)
            made = made.index_add_(0, ids, right.to(wide)).to(dtype).view(shape)
            return made if into is None else into.add_(made)
        runs, rows = _runs_of(ids)
        made = right.new_zeros(right.shape, dtype=wide).index_add_(0, runs, right.to(wide))
        into = torch.zeros(shape, dtype=dtype, device=right.device) if into is None else into
        into.view(self.rows, -1).index_add_(0, rows, made.to(dtype))
        return into

    def gradient_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        right = self.right_bgtd.to(dtype)
        b, _, _, d = right.shape
        ids = self.ids_bt
        if (start, stop) != (0, self.rows):
            inside = (ids >= start) & (ids < stop)
            ids, right = torch.where(inside, ids - start, 0), right * inside.view(b, 1, -1, 1)
        gradient = torch.zeros(b, stop - start, d, dtype=dtype, device=right.device)
        gradient.scatter_add_(1, ids.unsqueeze(-1).expand(-1, -1, d), right[:, 0])
        return gradient.unsqueeze(1)

    def row_norms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        n = row_norms(self.right_bgtd, dtype)
        return n, torch.ones_like(n)

    def alive(self) -> Tensor:
        return not_zero(self.right_bgtd)

    def write_left_norms(self, out_bgt: Tensor) -> None:
        out_bgt.fill_(1.0)

    def write_left_squares(self, left: Tensor, out_xt: Tensor) -> None:
        out_xt.fill_(1.0)

    def sums_by_rows(self, dtype: torch.dtype) -> Tensor:
        """[b, t, d] the gradient of each row of the table that an example reads, zeros elsewhere:
        no more than the factor. Each is added up in the order of the positions.
        """
        b, t, d = self.right_bgtd.shape[0], *self.right_bgtd.shape[2:]
        ids, order = self.ids_bt.sort(dim=1, stable=True)
        place = torch.arange(b * t, device=ids.device).view(b, t)
        first = torch.ones_like(ids, dtype=torch.bool)
        torch.ne(ids[:, 1:], ids[:, :-1], out=first[:, 1:])
        # Each run of equal rows begins a bag; the bags of what is left of a run are empty.
        begins = torch.where(first, place, b * t).flatten().flip(0).cummin(0).values.flip(0)
        values = self.right_bgtd.to(dtype).reshape(b * t, d)
        read = (order + place[:, :1]).flatten()
        return torch.nn.functional.embedding_bag(read, values, begins, mode="sum").view(b, t, d)

    def errors_by_rows(self, dtype: torch.dtype) -> Tensor:
        """[b] float64 root of sum_r (gamma(n_r) s_r)^2, n_r the positions with a gradient that read
        row r and s_r the sum of their |g_t|: what adding the gradient up row by row can be off by.
        """
        norms = row_norms(self.right_bgtd, dtype)[:, 0]
        norms = at_least(norms, self.right_bgtd.shape[3]).double()
        ids, order = self.ids_bt.sort(dim=1, stable=True)
        changes = (ids[:, 1:] != ids[:, :-1]).long()
        group = torch.nn.functional.pad(changes.cumsum(1), (1, 0))
        sums = torch.zeros_like(norms).scatter_add_(1, group, norms.gather(1, order))
        counts = torch.zeros_like(norms).scatter_add_(
            1, group, self.alive()[:, 0].double().gather(1, order)
        )
        return torch.linalg.vector_norm(gamma(counts, norms, dtype) * sums, dim=1)

    def left_gram(self, other: Unfolded, dtype: torch.dtype) -> Tensor:
        return other.gram_with_ids(self.ids_bt, dtype)

    def gram_with_rows(self, left_bgtp: Tensor, dtype: torch.dtype) -> Tensor:
        index = self.ids_bt.unsqueeze(1).expand(-1, left_bgtp.shape[2], -1)
        return left_bgtp[:, 0].gather(2, index).to(dtype).unsqueeze(1)

    def gram_with_ids(self, ids_bt: Tensor, dtype: torch.dtype) -> Tensor:
        return (ids_bt.unsqueeze(2) == self.ids_bt.unsqueeze(1)).to(dtype).unsqueeze(1)

    def left_product(
        self, projection: Tensor, dtype: torch.dtype, scratch: Scratch | None = None
    ) -> Tensor:
        if projection.dim() == 2:
            return projection[self.ids_bt].unsqueeze(1)
        index = self.ids_bt.unsqueeze(-1).expand(-1, -1, projection.shape[-1])
        return projection[:, 0].gather(1, index).unsqueeze(1)

    def add_left(
        self,
        total: Tensor | None,
        small_bgtk: Tensor,
        rows: slice = slice(None),
        scratch: Scratch | None = None,
    ) -> Tensor:
        assert rows == slice(None)
        b, _, _, k = small_bgtk.shape
        index = self.ids_bt.unsqueeze(-1).expand(-1, -1, k)
        part = small_bgtk.new_zeros(b, self.rows, k).scatter_add_(1, index, small_bgtk[:, 0])
        found = part.unsqueeze(1).transpose(2, 3)
        return found if total is None else total.add_(found)


def _runs_of(ids_n: Tensor) -> tuple[Tensor, Tensor]:
    """[n] the number of each one among those that differ, and [n] what that number stands for;
    numbers that stand for none stand for 0.
    """
    ordered, order = ids_n.sort()
    number = torch.nn.functional.pad((ordered[1:] != ordered[:-1]).long().cumsum(0), (1, 0))
    runs = torch.empty_like(ids_n).scatter_(0, order, number)
    return runs, torch.zeros_like(ids_n).scatter_(0, number, ordered)
