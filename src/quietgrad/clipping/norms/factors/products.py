"""Products of factors: accumulated in the wide type whatever the factors' own, and of bounded
length.

Shape legend: b examples, g blocks, t positions, n long dimension, k projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Sums are cut into short ones, whose rounding is small: products with thin matrices into sums over
# so many columns, and over so many positions, which are added up in groups. What is added to goes
# by ``add_``, never as the third operand of a product: libraries begin their sums with it.
COLUMNS, POSITIONS, GROUP = 64, 32, 512

# Entries of short sums that are formed at once (16 MiB in float32), unless one example has more.
AT_ONCE = 4 * 1024 * 1024

# A processor's library has other ways, with other roundings, for a few rows (in all, or for one of
# its threads) and for projections that lie transposed. In multiples of so many, with a projection
# that does not, a row is the same bits whatever rows stand beside it: a sketch must not depend on
# how records were cut into micro-batches, nor on padding.
ROWS = 64

# For the same reason rows that are added up over positions have a multiple of so many entries.
EVEN = 16


def wide_product(
    left: Tensor, right: Tensor, dtype: torch.dtype, reuse: Tensor | None = None
) -> Tensor:
    """left @ right with sums accumulated and returned in ``dtype``, whatever the factors' own
    precision; in the memory of ``reuse``, an earlier product, where that is easy.

    On a GPU half-precision factors stay as they are (tensor cores accumulate in float32); a float32
    factor beside one of bfloat16 is taken as the sum of two of bfloat16, which leaves out 2^-17 of
    it. Elsewhere the factors are widened first.
    """
    if left.dtype == right.dtype == dtype:
        return torch.matmul(left, right, out=reuse)
    halves = [x.dtype for x in (left, right) if x.dtype in (torch.float16, torch.bfloat16)]
    if halves and left.is_cuda and dtype == torch.float32 and left.dim() in (2, 3):
        product = torch.mm if left.dim() == 2 else torch.bmm
        if len(halves) == 2:
            return product(left.to(halves[0]), right.to(halves[0]), out_dtype=dtype)
        if halves[0] == torch.float16:  # its range is too narrow for factors of another scale
            return left.to(dtype) @ right.to(dtype)
        # One factor is wide, such as one that carries clip factors: its leading and its remaining
        # digits, each in half precision.
        wide, other = (left, right) if left.dtype == dtype else (right, left)
        leading = wide.to(torch.bfloat16)
        parts = (leading, (wide - leading).to(torch.bfloat16))
        pairs = [(part, other) if wide is left else (other, part) for part in parts]
        return product(*pairs[0], out_dtype=dtype).add_(product(*pairs[1], out_dtype=dtype))
    return left.to(dtype) @ right.to(dtype)


def block_products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, g, ...] batched products, in three dimensions where there is one block."""
    if left.shape[1] == 1:
        return wide_product(left[:, 0], right[:, 0], dtype).unsqueeze(1)
    b = left.shape[0]
    return wide_product(left.flatten(0, 1), right.flatten(0, 1), dtype).unflatten(0, (b, -1))


def thin_product(factor: Tensor, projection: Tensor, dtype: torch.dtype) -> Tensor:
    """factor @ projection, [b, g, t, k], of short sums, see ``sums_over_columns``.

    ``projection``: [n, k], or [b, g, n, k].
    """
    if projection.dim() == 2:
        return _shared_product(factor.to(dtype), projection)
    total: Tensor | None = None
    for some, others in zip(
        factor.split(COLUMNS, dim=3), projection.split(COLUMNS, dim=2), strict=True
    ):
        part = block_products(some, others, dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _shared_product(factor: Tensor, projection: Tensor) -> Tensor:
    """``thin_product`` with one projection for all examples."""
    b, g, t, n = factor.shape
    k = projection.shape[1]
    if factor.is_cuda:
        return _at_once(factor, projection).view(b, g, t, k)
    rows, projection = factor.reshape(-1, n), projection.contiguous()  # see ``ROWS``
    last = len(rows) % ROWS
    found = rows.new_empty(len(rows), k)
    if last < len(rows):
        _sum_of_columns(rows[: len(rows) - last], projection, found[: len(rows) - last])
    if last:
        tail, part = rows.new_zeros(ROWS, n), rows.new_empty(ROWS, k)
        tail[:last] = rows[-last:]
        _sum_of_columns(tail, projection, part)
        found[-last:] = part[:last]
    return found.view(b, g, t, k)


def _sum_of_columns(rows: Tensor, projection: Tensor, out: Tensor) -> None:
    """rows @ projection into ``out``, sums over a few columns one after the other."""
    spare = torch.empty_like(out) if rows.shape[1] > COLUMNS else out
    for start in range(0, rows.shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        part = _short_product(rows[:, columns], projection[columns], spare if start else out)
        if start:
            out.add_(part)


def _short_product(rows: Tensor, projection: Tensor, out: Tensor) -> Tensor:
    """rows @ projection, over a few columns."""
    return torch.mm(rows, projection, out=out)


def _at_once(factor: Tensor, projection: Tensor) -> Tensor:
    """[b g t, k], all sums over ``COLUMNS`` columns in one call, some examples at a time: on a GPU
    calls are dear.
    """
    b, g, t, n = factor.shape
    k, stretches = projection.shape[1], n // COLUMNS
    whole = stretches * COLUMNS
    total: Tensor | None = None
    if stretches:
        weights = projection[:whole].reshape(stretches, COLUMNS, k)
        parts = []
        for some in factor[..., :whole].split(max(1, AT_ONCE // (g * t * stretches * k))):
            cut = some.reshape(-1, stretches, COLUMNS).transpose(0, 1)
            parts.append(torch.bmm(cut, weights).sum(0))
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
    if whole < n:
        rest = factor[..., whole:].reshape(b * g * t, -1) @ projection[whole:]
        total = rest if total is None else total.add_(rest)
    assert total is not None
    return total


def add_over_positions(total: Tensor | None, long_bgtn: Tensor, small_bgtk: Tensor) -> Tensor:
    """total + small^T long, [b, g, k, n], of sums over at most ``POSITIONS`` positions.

    With the few rows first: the processor's library needs a third less time than for the transposed
    product. Memory of the result, and ``AT_ONCE`` entries.
    """
    b, g, t, k = small_bgtk.shape
    n = long_bgtn.shape[3]
    small, long = small_bgtk.flatten(0, 1), long_bgtn.flatten(0, 1)
    if not small.is_cuda:  # else where rows begin in memory, and so an example's place, would show
        small, long = _even(small), _even(long)
    k = small.shape[2]
    found = (small.new_empty if t else small.new_zeros)(b * g, k, long.shape[2])
    sums, at_once = (_sums_at_once, GROUP // POSITIONS) if small.is_cuda else (_sum_by_sum, 1)
    examples = max(1, AT_ONCE // (at_once * k * found.shape[2]))
    for few, many, out in zip(
        small.split(examples), long.split(examples), found.split(examples), strict=True
    ):
        for start in range(0, t, GROUP):
            group = slice(start, start + GROUP)
            part = sums(few[:, group], many[:, group].to(few.dtype), None if start else out)
            if start:
                out.add_(part)
    found = found[:, : small_bgtk.shape[3], :n].contiguous().unflatten(0, (b, g))
    return found if total is None else total.add_(found)


def _even(rows: Tensor) -> Tensor:
    """Rows of whole runs of ``EVEN`` entries, zeros at their ends, each beginning at such a run."""
    odd = -rows.shape[-1] % EVEN
    if odd:
        return torch.nn.functional.pad(rows, (0, odd))
    cut = any(stride % EVEN for stride in rows.stride()[:-1])
    starts = rows.data_ptr() % (EVEN * rows.element_size())
    return rows.clone(memory_format=torch.contiguous_format) if cut or starts else rows


def _sum_by_sum(small_xtk: Tensor, long_xtn: Tensor, out: Tensor | None) -> Tensor:
    """[x, k, n] small^T long over at most ``GROUP`` positions, one sum added after the other."""
    x, t, k = small_xtk.shape
    out = small_xtk.new_empty(x, k, long_xtn.shape[2]) if out is None else out
    spare = torch.empty_like(out) if t > POSITIONS else out
    for start in range(0, t, POSITIONS):
        run = slice(start, start + POSITIONS)
        few, many = small_xtk[:, run].transpose(1, 2), long_xtn[:, run]
        part = torch.bmm(few, many, out=spare if start else out)
        if start:
            out.add_(part)
    return out


def _sums_at_once(small_xtk: Tensor, long_xtn: Tensor, out: Tensor | None) -> Tensor:
    """The same with all sums in one call: on a GPU calls are dear."""
    x, t, k = small_xtk.shape
    runs = t // POSITIONS
    whole = runs * POSITIONS
    total = small_xtk.new_zeros(x, k, long_xtn.shape[2]) if out is None else out.zero_()
    if runs:
        few = small_xtk[:, :whole].reshape(x * runs, POSITIONS, k).transpose(1, 2)
        sums = torch.bmm(few, long_xtn[:, :whole].reshape(x * runs, POSITIONS, -1))
        total.add_(added_up(sums.view(x, runs, k, -1)))
    if whole < t:
        total.add_(torch.bmm(small_xtk[:, whole:].transpose(1, 2), long_xtn[:, whole:]))
    return total


def added_up(sums_xr: Tensor) -> Tensor:
    """[x, r, ...] -> [x, ...], in the order of r: padding adds zeros at the end and changes
    nothing.
    """
    return sums_xr[:, 0] if sums_xr.shape[1] == 1 else sums_xr.sum(1)


class Sums(NamedTuple):
    """How a row times a projection is added up: ``entries`` columns, in ``stretches`` sums of
    ``within`` columns at most, which are then added up.
    """

    entries: int
    within: int
    stretches: int


def sums_over_columns(columns: int) -> Sums:
    """Of ``thin_product``."""
    return Sums(columns, min(columns, COLUMNS), -(-columns // COLUMNS))


def as_positions(factor_bgtn: Tensor, views: int) -> Tensor:
    """[b K, g, t, n] to [b, g, K t, n]: K rows of the batch are positions of one example."""
    return factor_bgtn.unflatten(0, (-1, views)).transpose(1, 2).flatten(2, 3)


def zeroed(x: Tensor, dropped_b: Tensor) -> Tensor:
    """``x`` with the rows of dropped examples exactly zero, whatever they hold."""
    mask = dropped_b.view(-1, *([1] * (x.dim() - 1)))
    return torch.where(mask, torch.zeros((), dtype=x.dtype, device=x.device), x)
