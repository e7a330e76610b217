"""Squared norms of per-example gradients from their factors: four estimators, evaluated in blocks of bounded size.

    materialized   ||left^T right||^2, in blocks of examples and rows                  t p d multiplications per example
    ghost          sum((left left^T) * (right right^T)), in blocks of examples, tiles   t^2 (p + d)
    hutch          ||right^T (left P)||^2 with P of variance 1/k, k columns             t k (p + d)
    hutch++        exact on the range of a first sketch, hutch on the rest             about 3 x hutch

Several uses of one parameter (tied weights) are summed before the norm is taken, never after: cross terms included.
Sources: docs/methods, section 1; DP-SGD-RC, Algorithm 2 with errata E2 and E3.
Shape legend: b examples, g blocks, t positions, p rows, d columns, k projections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quietgrad.clipping.factors import DenseFactors, MatrixFactors, OneHotFactors, positions, rows_and_columns

BLOCK_ELEMENTS = 8 * 1024 * 1024  # no temporary grows past this many entries (32 MiB in float32) if it can be cut


def materialized_norms(
    uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int = BLOCK_ELEMENTS
) -> Tensor:
    """[b] squared norms by forming the per-example gradients, a block of examples and rows at a time."""
    p, d = rows_and_columns(uses[0])
    b, g = uses[0].right_bgtd.shape[:2]
    rows = max(1, min(p, block_elements // max(1, d * g)))
    examples = max(1, min(b, block_elements // max(1, rows * d * g)))
    result = uses[0].right_bgtd.new_zeros(b, dtype=dtype)
    for i in range(0, b, examples):
        for r in range(0, p, rows):
            total: Tensor | None = None
            for use in uses:
                part = _gradient_rows(use, slice(i, i + examples), r, min(p, r + rows), dtype)
                total = part if total is None else total + part
            assert total is not None
            result[i : i + examples] += total.pow(2).sum(dim=(1, 2, 3))
    return result


def _gradient_rows(use: MatrixFactors, examples: slice, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    right = use.right_bgtd[examples].to(dtype)
    if isinstance(use, DenseFactors):
        left = use.left_bgtp[examples, :, :, start:stop].to(dtype)
        return left.transpose(2, 3) @ right
    b, _, _, d = right.shape
    ids = use.ids_bt[examples]
    inside = (ids >= start) & (ids < stop)
    gradient = torch.zeros(b, stop - start, d, dtype=dtype, device=right.device)
    index = torch.where(inside, ids - start, 0).unsqueeze(-1).expand(-1, -1, d)
    gradient.scatter_add_(1, index, right[:, 0] * inside.unsqueeze(-1))
    return gradient.unsqueeze(1)


def ghost_norms(uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int = BLOCK_ELEMENTS) -> Tensor:
    """[b] squared norms from Gram matrices over positions, a tile of positions and a block of examples at a time."""
    b = uses[0].right_bgtd.shape[0]
    result = uses[0].right_bgtd.new_zeros(b, dtype=dtype)
    for i, first in enumerate(uses):
        for second in uses[i:]:
            cross = _ghost_product(first, second, dtype, block_elements)
            result += cross if second is first else 2 * cross
    return result.clamp_min(0)


def _ghost_product(first: MatrixFactors, second: MatrixFactors, dtype: torch.dtype, block_elements: int) -> Tensor:
    """[b] inner products <M_first, M_second>."""
    b, g = first.right_bgtd.shape[:2]
    t1, t2 = positions(first), positions(second)
    if t1 == t2 == 1 and first is second:
        right = first.right_bgtd.to(dtype).pow(2).sum(dim=3)
        if isinstance(first, DenseFactors):
            right = right * first.left_bgtp.to(dtype).pow(2).sum(dim=3)
        return right.sum(dim=(1, 2))
    tile1 = max(1, min(t1, block_elements // max(1, g * t2)))
    tile2 = max(1, min(t2, block_elements // max(1, g * tile1)))
    examples = max(1, min(b, block_elements // max(1, g * tile1 * tile2)))
    result = first.right_bgtd.new_zeros(b, dtype=dtype)
    for i in range(0, b, examples):
        rows = slice(i, i + examples)
        for s in range(0, t1, tile1):
            one = _positions_of(first, rows, slice(s, s + tile1))
            for u in range(0, t2, tile2):
                two = (
                    one
                    if second is first and s == u and tile1 == tile2
                    else _positions_of(second, rows, slice(u, u + tile2))
                )
                gram = one.right_bgtd.to(dtype) @ two.right_bgtd.to(dtype).transpose(2, 3)
                result[rows] += (gram * _left_gram(one, two, dtype)).sum(dim=(1, 2, 3))
    return result


def _positions_of(use: MatrixFactors, rows: slice, span: slice) -> MatrixFactors:
    right = use.right_bgtd[rows, :, span]
    if isinstance(use, DenseFactors):
        return DenseFactors(use.left_bgtp[rows, :, span], right)
    return OneHotFactors(use.ids_bt[rows, span], right, use.rows)


def _left_gram(one: MatrixFactors, two: MatrixFactors, dtype: torch.dtype) -> Tensor:
    """[b, g, t1, t2] inner products of rows factors, by gathering where one of them is one-hot."""
    if isinstance(one, DenseFactors) and isinstance(two, DenseFactors):
        return one.left_bgtp.to(dtype) @ two.left_bgtp.to(dtype).transpose(2, 3)
    if isinstance(one, OneHotFactors) and isinstance(two, OneHotFactors):
        return (one.ids_bt.unsqueeze(2) == two.ids_bt.unsqueeze(1)).to(dtype).unsqueeze(1)
    if isinstance(one, DenseFactors):
        assert isinstance(two, OneHotFactors)
        t1 = one.left_bgtp.shape[2]
        index = two.ids_bt.unsqueeze(1).expand(-1, t1, -1)
        return one.left_bgtp[:, 0].gather(2, index).to(dtype).unsqueeze(1)
    return _left_gram(two, one, dtype).transpose(2, 3)


def hutch_norms(
    uses: Sequence[MatrixFactors], sketch_dim: int, generator: torch.Generator | None, dtype: torch.dtype
) -> Tensor:
    """[b] Hutchinson estimates of the squared norms: unbiased, relative variance 2/k at rank one.

    The larger dimension is projected by one Gaussian matrix, fresh at every call and shared by the examples of the call.
    """
    p, d = rows_and_columns(uses[0])
    reference = uses[0].right_bgtd
    projection = _gaussian(max(p, d), sketch_dim, reference, generator, dtype)
    sketch = _project_rows(uses, projection, dtype) if p >= d else _project_columns(uses, projection, dtype)
    return sketch.pow(2).sum(dim=(1, 2, 3))


def hutch_plus_plus_norms(
    uses: Sequence[MatrixFactors], sketch_dim: int, generator: torch.Generator | None, dtype: torch.dtype
) -> Tensor:
    """[b] Hutch++ estimates: exact for per-example gradients of rank below k.

    With M the p x d gradient of one example, Q an orthonormal basis of M^T S and Y = M^T P: ||M Q||^2 + ||Y - Q Q^T Y||^2.
    """
    p, d = rows_and_columns(uses[0])
    reference = uses[0].right_bgtd
    # Each block of a grouped convolution gets a basis of its own; the squared norms of blocks add up.
    range_finder = _gaussian(max(p, d), sketch_dim, reference, generator, dtype)
    tail_probe = _gaussian(max(p, d), sketch_dim, reference, generator, dtype)
    project, apply_other = (_project_rows, _project_columns) if p >= d else (_project_columns, _project_rows)
    small = min(p, d)
    basis_bgsk = torch.linalg.qr(project(uses, range_finder, dtype)[..., : min(sketch_dim, small)]).Q
    head = apply_other(uses, basis_bgsk, dtype)
    tail = project(uses, tail_probe, dtype)
    tail = tail - basis_bgsk @ (basis_bgsk.transpose(2, 3) @ tail)
    return head.pow(2).sum(dim=(1, 2, 3)) + tail.pow(2).sum(dim=(1, 2, 3))


def _gaussian(rows: int, k: int, like: Tensor, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    device = generator.device if generator is not None else like.device
    sample = torch.randn(rows, k, dtype=dtype, device=device, generator=generator)
    return sample.to(like.device).mul_(k**-0.5)


def _project_rows(uses: Sequence[MatrixFactors], projection: Tensor, dtype: torch.dtype) -> Tensor:
    """M^T P summed over uses: [b, g, d, k] for P of shape [p, k] or per example [b, g, p, k]."""
    total: Tensor | None = None
    for use in uses:
        if isinstance(use, DenseFactors):
            small = use.left_bgtp.to(dtype) @ projection
        elif projection.dim() == 2:
            small = projection[use.ids_bt].unsqueeze(1)
        else:
            index = use.ids_bt.unsqueeze(-1).expand(-1, -1, projection.shape[-1])
            small = projection[:, 0].gather(1, index).unsqueeze(1)
        part = use.right_bgtd.to(dtype).transpose(2, 3) @ small
        total = part if total is None else total + part
    assert total is not None
    return total


def _project_columns(uses: Sequence[MatrixFactors], projection: Tensor, dtype: torch.dtype) -> Tensor:
    """M P summed over uses: [b, g, p, k] for P of shape [d, k] or per example [b, g, d, k]."""
    total: Tensor | None = None
    for use in uses:
        small = use.right_bgtd.to(dtype) @ projection
        if isinstance(use, DenseFactors):
            part = use.left_bgtp.to(dtype).transpose(2, 3) @ small
        else:
            b, _, _, k = small.shape
            part = torch.zeros(b, use.rows, k, dtype=dtype, device=small.device)
            part.scatter_add_(1, use.ids_bt.unsqueeze(-1).expand(-1, -1, k), small[:, 0])
            part = part.unsqueeze(1)
        total = part if total is None else total + part
    assert total is not None
    return total
