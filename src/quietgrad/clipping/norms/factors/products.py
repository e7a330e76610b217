"""Products of factors: accumulated in the wide type whatever the factors' own, and of bounded
length.

Shape legend: b examples, g blocks, t positions, n long dimension, k projections.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# That are summed without an intermediate result, in products with thin matrices: short sums, whose
# rounding is small. Sums of POSITIONS are themselves added up in groups.
POSITIONS, GROUP, COLUMNS = 64, 1024, 128

# Not part of torch's public interface: used where it is there.
_HAS_THIN_LINEAR = torch.backends.mkldnn.is_available() and hasattr(
    torch.ops.mkldnn, "_linear_pointwise"
)


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right with sums accumulated and returned in ``dtype``, whatever the factors' own
    precision.

    On a GPU half-precision factors stay as they are (tensor cores accumulate in float32); a float32
    factor beside one of bfloat16 is taken as the sum of two of bfloat16, which leaves out 2^-17 of
    it. Elsewhere the factors are widened first.
    """
    if left.dtype == right.dtype == dtype:
        return left @ right
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


def thin_product(
    factor: Tensor, projection: Tensor, dtype: torch.dtype, columns: int = COLUMNS
) -> Tensor:
    """factor @ projection, [b, g, t, k], over at most so many columns at a time."""
    total: Tensor | None = None
    for start in range(0, factor.shape[3], columns):
        span = slice(start, start + columns)
        part = _few_columns(factor[..., span].to(dtype), projection[..., span, :])
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _few_columns(factor: Tensor, projection: Tensor) -> Tensor:
    """The product. On a processor by oneDNN, whose rows are the same bits however many there are: a
    sketch must not depend on how records were cut into micro-batches, nor on padding."""
    thin = projection.dim() == 2 and not factor.is_cuda and factor.dtype == torch.float32
    if thin and _HAS_THIN_LINEAR:
        # The operator behind torch.compile's linear layers: rows of the weight are columns of the
        # projection.
        weight = projection.t().contiguous()
        return torch.ops.mkldnn._linear_pointwise(factor, weight, None, "none", [], "")
    return factor @ projection


def add_over_positions(total: Tensor | None, long_bgtn: Tensor, small_bgtk: Tensor) -> Tensor:
    """total + small^T long, [b, g, k, n], over at most ``POSITIONS`` positions at a time.

    With the few rows first: the processor's library needs a third less time than for the transposed
    product. Widened copies of half-precision factors stay small, too.
    """

    def add(group: Tensor | None, span: slice) -> Tensor:
        few, long = small_bgtk[:, :, span].transpose(2, 3), long_bgtn[:, :, span]
        long = long.to(small_bgtk.dtype)
        if group is None:
            return few @ long
        group.flatten(0, 1).baddbmm_(few.flatten(0, 1), long.flatten(0, 1))
        return group

    return add_in_groups(total, small_bgtk.shape[2], add)


def add_in_groups(
    total: Tensor | None, positions: int, add: Callable[[Tensor | None, slice], Tensor]
) -> Tensor:
    """total + the sum over all positions, made of sums over ``GROUP`` positions.

    Args:
        total: what is added to, in place; None: nothing.
        positions: at least one.
        add: (sum so far or None, at most ``POSITIONS`` positions) to the sum with them.
    """
    for start in range(0, positions, GROUP):
        group: Tensor | None = None
        last = min(positions, start + GROUP)
        for first in range(start, last, POSITIONS):
            group = add(group, slice(first, min(first + POSITIONS, last)))
        assert group is not None
        total = group if total is None else total.add_(group)
    assert total is not None
    return total


def chain_of_columns(columns: int, at_once: int = COLUMNS) -> int:
    """Longest path of additions through ``thin_product`` over so many columns."""
    return min(columns, at_once) + -(-columns // at_once)


def as_positions(factor_bgtn: Tensor, views: int) -> Tensor:
    """[b K, g, t, n] to [b, g, K t, n]: a record's views are further positions of one example."""
    return factor_bgtn.unflatten(0, (-1, views)).transpose(1, 2).flatten(2, 3)


def zeroed(x: Tensor, dropped_b: Tensor) -> Tensor:
    """``x`` with the rows of dropped examples exactly zero, whatever they hold."""
    mask = dropped_b.view(-1, *([1] * (x.dim() - 1)))
    return torch.where(mask, torch.zeros((), dtype=x.dtype, device=x.device), x)
