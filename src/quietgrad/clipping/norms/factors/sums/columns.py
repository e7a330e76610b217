"""Rows times a thin projection: in sums over a few columns, whose rounding is small, added up in
pairs.

Shape legend: b examples, g blocks, t positions, n long dimension, k projections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quietgrad.clipping.norms.factors.products import AT_ONCE, block_products
from quietgrad.clipping.norms.factors.sums.pairs import InPairs, add_in_pairs, levels
from quietgrad.clipping.norms.factors.sums.scratch import Scratch

COLUMNS = 64

# A processor's library has other ways, with other roundings, for a few rows (in all, or for one of
# its threads) and for projections that lie transposed. In multiples of so many, with a projection
# that does not, a row is the same bits whatever rows stand beside it: a sketch must not depend on
# how records were cut into micro-batches, nor on padding.
ROWS = 64

# Where rows begin in memory, and so an example's place in the batch, shows in the rounding of a
# processor's library: rows of results have a multiple of so many entries.
EVEN = 16

# Products of few columns are formed transposed, filled up to so many: libraries are twice as slow
# at the rest of a run of ``EVEN``. One example's rows stand in runs of ``EVEN`` then, since fewer
# are another routine's, with another rounding.
NARROW = 8

# Entries of sums over columns that a processor forms at once (8 MiB in float32): a call more costs
# more than what no longer fits its cache.
IN_CACHE = 2 * 1024 * 1024

# Entries of rows that a processor takes at once (4 MiB in float32). Their norms are found first, in
# the order in which they lie: products of short sums jump from row to row, and take half as long
# again where rows have to come from memory.
FETCHED = 1024 * 1024

# Positions from which examples are taken one after the other, where each has its own projection.
ROWS_EACH = 256


class Sums(NamedTuple):
    """How a row times a projection is added up: ``entries`` columns, in ``stretches`` sums of
    ``within`` columns at most, which are then added up: in pairs (``add_in_pairs``) where
    ``paired``, else one after the other.
    """

    entries: int
    within: int
    stretches: int
    paired: bool = False

    def across(self) -> tuple[float, float]:
        """Additions of stretches, weighted by what they give as a share of the row: by its norm,
        and by that norm where all of the row is in one stretch.

        The n additions of one level of a sum in pairs give n parts of the row, the squares of whose
        norms add up to the row's at most: their norms to sqrt(n) times its norm at most. One after
        the other, each may give the whole.
        """
        if not self.paired:
            return float(self.stretches), float(self.stretches)
        parts, norms = self.stretches, 0.0
        while parts > 1:
            norms += math.sqrt(parts // 2)
            parts -= parts // 2
        return norms, float(levels(self.stretches))


def sums_over_columns(columns: int, paired: bool = True) -> Sums:
    """Of ``thin_product``; ``paired`` where the projection is the same for all examples: others'
    pieces may be added one after the other, which bounds pairs as well.
    """
    return Sums(columns, min(columns, COLUMNS), -(-columns // COLUMNS), paired)


def thin_product(
    factor: Tensor,
    projection: Tensor,
    dtype: torch.dtype,
    scratch: Scratch | None = None,
    name: str = "thin",
) -> Tensor:
    """factor @ projection, [b, g, t, k], of short sums, see ``sums_over_columns``.

    ``projection``: [n, k], or [b, g, n, k]. ``scratch``: where the result may lie, if the next one
    of that ``name`` may take its place; one that is asked for twice in a row is formed once. Where
    norms of rows are found beside it, ``scratch`` keeps them too (``Scratch.norms_of``).
    """
    if projection.dim() == 2:
        scratch = scratch or Scratch()
        made = scratch.recall(name, factor, projection)
        if made is None:
            made, norms = _shared_product(factor.to(dtype), projection, scratch, name)
            scratch.remember(name, factor, projection, made, norms)
        return made
    return _product_of_each(factor, projection, dtype, scratch or Scratch(), name)


def whole_columns(columns: int) -> int:
    """So many columns are filled up to with zeros, on a processor."""
    run = NARROW if columns <= NARROW else EVEN
    return -(-columns // run) * run


def _product_of_each(
    factor: Tensor, projection: Tensor, dtype: torch.dtype, scratch: Scratch, name: str
) -> Tensor:
    """``thin_product`` with a projection for each example."""
    t, k = factor.shape[2], projection.shape[3]
    if factor.is_cuda:
        return _sum_of_pieces(factor, projection, dtype)
    odd = whole_columns(k) - k
    if odd:
        projection = torch.nn.functional.pad(projection, (0, odd))
    if k > NARROW:
        made = _in_runs(factor, lambda rows: _sum_of_pieces(rows, projection, dtype))
        return made[..., :k]
    turned = projection.transpose(2, 3).contiguous()
    if t < ROWS_EACH or factor.dtype != dtype:
        made = _in_runs(factor, lambda rows: _turned_pieces(rows, turned, dtype))
        return made[..., :k]
    norms: list[Tensor] = []

    def product(rows: Tensor) -> Tensor:
        norms.append(rows.new_empty(rows.shape[:3]))
        return _turned_rows(rows, turned, norms[-1], scratch)

    made = _in_runs(factor, product)[..., :k]
    scratch.remember(name, factor, projection, made, torch.cat(norms, dim=2)[:, :, :t])
    return made


def _in_runs(factor: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A product of positions in whole runs of ``EVEN``, zeros after the last."""
    t = factor.shape[2]
    last = t % EVEN
    found = [] if 0 < t == last else [product(factor[:, :, : t - last])]
    if last:
        rows = torch.nn.functional.pad(factor[:, :, t - last :], (0, 0, 0, EVEN - last))
        found.append(product(rows)[:, :, :last])
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _sum_of_pieces(factor: Tensor, projection: Tensor, dtype: torch.dtype) -> Tensor:
    """One piece of ``COLUMNS`` columns after the other."""
    total: Tensor | None = None
    for some, others in zip(
        factor.split(COLUMNS, dim=3), projection.split(COLUMNS, dim=2), strict=True
    ):
        part = block_products(some, others, dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _turned_pieces(factor: Tensor, turned_bgkn: Tensor, dtype: torch.dtype) -> Tensor:
    """The transposed product, in pairs of pieces: all examples in one call."""
    total = InPairs()
    for some, others in zip(
        factor.split(COLUMNS, dim=3), turned_bgkn.split(COLUMNS, dim=3), strict=True
    ):
        total.add(block_products(others, some.transpose(2, 3), dtype))
    return total.total().transpose(2, 3)


def _turned_rows(
    factor: Tensor, turned_bgkn: Tensor, norms_bgt: Tensor, scratch: Scratch
) -> Tensor:
    """The same to the bit: all pieces of some rows of an example in one call, and the norms of
    these rows.
    """
    b, g, t, n = factor.shape
    each, projections, norms = (x.flatten(0, 1) for x in (factor, turned_bgkn, norms_bgt))
    k, stretches = projections.shape[1], -(-n // COLUMNS)
    made = factor.new_empty(b * g, k, t)
    at_once = max(1, FETCHED // n // ROWS) * ROWS
    whole = n - n % COLUMNS
    for x, projection, norm, out in zip(each, projections, norms, made, strict=True):
        pieces = projection[:, :whole].unflatten(1, (-1, COLUMNS)).transpose(0, 1)
        for start in range(0, t, at_once):
            span = slice(start, start + at_once)
            rows = x[span]
            torch.linalg.vector_norm(rows, dim=1, out=norm[span])
            parts = scratch.take("columns", (stretches, k, len(rows)), rows)
            if whole:
                cut = rows[:, :whole].unflatten(1, (-1, COLUMNS)).permute(1, 2, 0)
                torch.bmm(pieces, cut, out=parts[: whole // COLUMNS])
            if whole < n:
                torch.mm(projection[:, whole:], rows[:, whole:].T, out=parts[-1])
            add_in_pairs(parts.unsqueeze(0), out[:, span].unsqueeze(0))
    return made.unflatten(0, (b, g)).transpose(2, 3)


def _shared_product(
    factor: Tensor, projection: Tensor, scratch: Scratch, name: str
) -> tuple[Tensor, Tensor | None]:
    """``thin_product`` with one projection for all examples; on a processor, with the norms of all
    rows [b, g, t], as they come.
    """
    b, g, t, n = factor.shape
    k = projection.shape[1]
    rows, count = factor.reshape(-1, n), b * g * t
    odd = 0 if rows.is_cuda else -k % EVEN
    projection = torch.nn.functional.pad(projection, (0, odd)) if odd else projection.contiguous()
    found = scratch.take(name, (count, k + odd), rows)
    stretches = -(-n // COLUMNS)
    if rows.is_cuda:
        at_once = max(1, AT_ONCE // (stretches * k))
        for start in range(0, count, at_once):
            span = slice(start, start + at_once)
            _sum_of_columns(rows[span], projection, found[span], scratch)
        return found.view(b, g, t, k), None
    norms, last = scratch.take(f"{name} norms", (count,), rows), count % ROWS
    at_once = max(1, min(IN_CACHE // (stretches * k), FETCHED // max(1, n)) // ROWS) * ROWS
    for start in range(0, count - last, at_once):
        span = slice(start, min(start + at_once, count - last))
        torch.linalg.vector_norm(rows[span], dim=1, out=norms[span])
        _sum_of_columns(rows[span], projection, found[span], scratch)
    if last:
        tail, part = rows.new_zeros(ROWS, n), rows.new_empty(ROWS, k + odd)
        tail[:last] = rows[-last:]
        norms[-last:] = torch.linalg.vector_norm(tail, dim=1)[:last]
        _sum_of_columns(tail, projection, part, scratch)
        found[-last:] = part[:last]
    return found[:, :k].view(b, g, t, k), norms.view(b, g, t)


def _sum_of_columns(rows: Tensor, projection: Tensor, out: Tensor, scratch: Scratch) -> None:
    """rows @ projection into ``out``; all sums over ``COLUMNS`` columns in one call."""
    (count, n), k = rows.shape, projection.shape[1]
    stretches, rest = divmod(n, COLUMNS)
    if stretches + bool(rest) <= 1:
        torch.mm(rows, projection, out=out)
        return
    whole = stretches * COLUMNS
    parts = scratch.take("columns", (stretches + bool(rest), count, k), rows)
    cut = rows[:, :whole].unflatten(1, (stretches, COLUMNS)).transpose(0, 1)
    weights = projection[:whole].view(stretches, COLUMNS, k)
    torch.bmm(cut, weights, out=parts[:stretches])
    if rest:
        torch.mm(rows[:, whole:], projection[whole:], out=parts[stretches])
    add_in_pairs(parts.unsqueeze(0), out.unsqueeze(0))
