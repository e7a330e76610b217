"""Products of factors: accumulated in the wide type whatever the factors' own.

Shape legend: b examples, g blocks, t positions, n entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Entries of short sums that are formed at once (16 MiB in float32), unless one example has more.
AT_ONCE = 4 * 1024 * 1024

# Of products of few columns, see ``products_over_positions``.
FEW_COLUMNS, WHOLE_RUN = 16, 8

# Entries of two rows whose products are added up in one go. A head over a vocabulary has rows of
# 10^5: in one sum, their inner products' bound would leave every record of a language model in
# doubt.
GRAM_COLUMNS = 512

# From which on it is faster to form half of a symmetric matrix, on a processor.
HALVED_ROWS, HALVED_COLUMNS = 256, 512


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``; nearly always nothing is to do, and asking torch for it takes as long as a
    small product.
    """
    return x if x.dtype == dtype else x.to(dtype)


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
        # Asked for by name: ``matmul`` makes six views to find out which of them it is.
        if left.dim() == right.dim() == 2:
            return torch.mm(left, right, out=reuse)
        if left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0]:
            return torch.bmm(left, right, out=reuse)
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
        return wide_product(left.squeeze(1), right.squeeze(1), dtype).unsqueeze(1)
    b = left.shape[0]
    return wide_product(left.flatten(0, 1), right.flatten(0, 1), dtype).unflatten(0, (b, -1))


def products_over_positions(left_bgtp: Tensor, right_bgtd: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, g, p, d] left^T right: of a block of positions, after which zeros change nothing.

    A processor's library adds up the last positions in another order where the product has few
    columns (seen with MKL and less than 16, not with few rows). So the transposed product is formed
    then; where that has few columns too, positions are filled up to whole runs.
    """
    rows, columns = left_bgtp.shape[3], right_bgtd.shape[3]
    if columns >= FEW_COLUMNS or left_bgtp.is_cuda:
        return block_products(left_bgtp.transpose(2, 3), right_bgtd, dtype)
    if rows >= FEW_COLUMNS:
        return block_products(right_bgtd.transpose(2, 3), left_bgtp, dtype).transpose(2, 3)
    odd = -left_bgtp.shape[2] % WHOLE_RUN
    if odd:
        left_bgtp, right_bgtd = (
            torch.nn.functional.pad(x, (0, 0, 0, odd)) for x in (left_bgtp, right_bgtd)
        )
    return block_products(left_bgtp.transpose(2, 3), right_bgtd, dtype)


def gram_chain(entries: int) -> int:
    """Longest path of additions through ``gram_products`` of rows of so many entries."""
    pieces = -(-entries // GRAM_COLUMNS)
    return entries if pieces == 1 else GRAM_COLUMNS + pieces


def gram_products(left_bgtn: Tensor, right_bgun: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, g, t, u] inner products of rows, ``GRAM_COLUMNS`` entries at a time. The pieces are
    formed apart: a product that is added in one call begins with what it is added to. Of rows with
    themselves half is formed once, see ``_halved``.
    """
    if left_bgtn is right_bgun and _is_worth_halving(left_bgtn):
        return _halved(left_bgtn, dtype)
    if left_bgtn.shape[3] <= GRAM_COLUMNS:
        return block_products(left_bgtn, right_bgun.transpose(2, 3), dtype)
    total: Tensor | None = None
    pieces = zip(
        left_bgtn.split(GRAM_COLUMNS, dim=3), right_bgun.split(GRAM_COLUMNS, dim=3), strict=True
    )
    for left, right in pieces:
        part = block_products(left, right.transpose(2, 3), dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def write_gram_products(x_b1tn: Tensor, out_btt: Tensor) -> None:
    """``gram_products`` of one block's rows with themselves, in the type and memory of ``out_btt``,
    in as few calls as that takes: of small matrices calls are what takes time.
    """
    dtype = out_btt.dtype
    if _is_worth_halving(x_b1tn):
        _halved(x_b1tn, dtype, out_btt.unsqueeze(1))
        return
    x_btn, n = x_b1tn.squeeze(1), x_b1tn.shape[3]
    for start in range(0, n, GRAM_COLUMNS):
        some = x_btn if n <= GRAM_COLUMNS else x_btn[:, :, start : start + GRAM_COLUMNS]
        part = wide_product(some, some.mT, dtype, None if start else out_btt)
        if start:
            out_btt.add_(part)
        elif part is not out_btt:  # formed in a wider type
            out_btt.copy_(part)


def _is_worth_halving(x_bgtn: Tensor) -> bool:
    t, n = x_bgtn.shape[2:]
    return not x_bgtn.is_cuda and t % 2 == 0 and t >= HALVED_ROWS and n >= HALVED_COLUMNS


def _halved(x_bgtn: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """[b, g, t, t] of rows with themselves: of the first half with the second once, for both sides
    of the diagonal, and of either half with itself in the same way.
    """
    b, g, t, _ = x_bgtn.shape
    h = t // 2
    halves = x_bgtn.unflatten(2, (2, h))
    own = halves.flatten(1, 2)
    same = gram_products(own, own, dtype).unflatten(1, (g, 2))
    across = gram_products(halves[:, :, 0], halves[:, :, 1], dtype)
    found = across.new_empty(b, g, t, t) if out is None else out
    quarters = found.unflatten(3, (2, h)).unflatten(2, (2, h))  # [b, g, 2, h, 2, h]
    quarters[:, :, 0, :, 0].copy_(same[:, :, 0])
    quarters[:, :, 1, :, 1].copy_(same[:, :, 1])
    quarters[:, :, 0, :, 1].copy_(across)
    quarters[:, :, 1, :, 0].copy_(across.transpose(2, 3))
    return found


def as_positions(factor_bgtn: Tensor, views: int) -> Tensor:
    """[b K, g, t, n] to [b, g, K t, n]: K rows of the batch are positions of one example."""
    return factor_bgtn.unflatten(0, (-1, views)).transpose(1, 2).flatten(2, 3)


def zeroed(x: Tensor, dropped_b: Tensor) -> Tensor:
    """``x`` with the rows of dropped examples exactly zero, whatever they hold."""
    mask = dropped_b.view(-1, *([1] * (x.dim() - 1)))
    return torch.where(mask, torch.zeros((), dtype=x.dtype, device=x.device), x)
