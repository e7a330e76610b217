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

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quietgrad.clipping.convolution import patch_columns, patch_gram, weight_gradients_one_by_one
from quietgrad.clipping.factors import (
    ConvolutionFactors,
    DenseFactors,
    DirectGradients,
    ListedGradients,
    MatrixFactors,
    OneHotFactors,
    examples_of,
    unfolded,
    wide_product,
)

HEAD_ROWS = 2048  # of the head of Hutch++ that are formed at once
BLOCK_ELEMENTS = 8 * 1024 * 1024  # no temporary grows past this many entries (32 MiB in float32) if it can be cut
CACHED_ELEMENTS = 1280 * 1024  # of patches that are formed at once on a processor: 5 MiB in float32

# Not part of torch's public interface: used where it is there.
_HAS_THIN_LINEAR = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

Unfolded = DenseFactors | OneHotFactors


def kernel_gradients(use: ConvolutionFactors, dtype: torch.dtype) -> tuple[Tensor, ListedGradients]:
    """[b] squared norms and per-example gradients of a convolution's kernel on a processor, where they are left as they come."""
    some, norms = [], []
    for gradients in _kernel_gradients(use, dtype):
        some.append(gradients)
        norms.append(torch.linalg.vector_norm(gradients, dim=1))  # at once: they still lie in the processor's cache
    return torch.cat(norms).square_(), ListedGradients(tuple(some))


def _kernel_gradients(use: ConvolutionFactors, dtype: torch.dtype) -> Iterator[Tensor]:
    """[n, g p d] per-example gradients on a processor, n examples at a time.

    From patches where those of a few examples fit the processor's cache; else by the native routine, one example a call: it forms no
    patches, but each call costs tens of microseconds beside the work.
    """
    s, examples = use.sizes, examples_in_cache(use)
    if examples == 1:
        shape = torch.Size((s.g * s.p, s.d // use.geometry.taps, *use.geometry.kernel))
        for gradient in weight_gradients_one_by_one(use.x, use.grad, shape, use.geometry, dtype):
            yield gradient.reshape(1, -1)
        return
    left = use.grad.reshape(s.b, s.g, s.p, s.t)
    columns = patch_columns(use.x, use.geometry, examples, dtype)
    for some, right in zip(left.split(examples), columns, strict=True):
        yield torch.bmm(some.flatten(0, 1).to(dtype), right.transpose(1, 2)).view(len(some), -1)


def examples_in_cache(use: ConvolutionFactors) -> int:
    """How many examples' patches are formed at once on a processor; 1 where not even two fit, and the native routine is faster."""
    s = use.sizes
    return max(1, min(CACHED_ELEMENTS // max(1, s.g * s.t * s.d), BLOCK_ELEMENTS // max(1, s.g * s.p * s.d)))


def materialized_gradients(uses: Sequence[MatrixFactors], dtype: torch.dtype) -> DirectGradients:
    """[b, g p d] per-example gradients of one parameter, kept whole: memory b g p d."""
    s = uses[0].sizes
    total: Tensor | None = None
    for use in uses:
        part = _whole_gradients(use, dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return DirectGradients(total.reshape(s.b, -1))


def _whole_gradients(use: MatrixFactors, dtype: torch.dtype) -> Tensor:
    s = use.sizes
    if isinstance(use, ConvolutionFactors) and not use.x.is_cuda:
        return torch.cat(tuple(_kernel_gradients(use, dtype)))
    return _gradient_rows(unfolded(use), 0, s.p, dtype).reshape(s.b, -1)


def materialized_norms(
    uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int = BLOCK_ELEMENTS
) -> Tensor:
    """[b] squared norms by forming the per-example gradients, a block of examples and rows at a time."""
    s = uses[0].sizes
    if len(uses) == 1 and isinstance(uses[0], ConvolutionFactors) and not uses[0].x.is_cuda:
        return torch.cat([squared_norms(gradients) for gradients in _kernel_gradients(uses[0], dtype)])
    patch_elements = max((s.g * u.sizes.t * s.d for u in uses if isinstance(u, ConvolutionFactors)), default=0)
    rows = max(1, min(s.p, block_elements // max(1, s.d * s.g)))
    examples = max(1, min(s.b, block_elements // max(1, rows * s.d * s.g, patch_elements)))
    parts = []
    for i in range(0, s.b, examples):
        some = [unfolded(examples_of(use, slice(i, i + examples))) for use in uses]
        squared = some[0].right_bgtd.new_zeros(some[0].sizes.b, dtype=dtype)
        for r in range(0, s.p, rows):
            total: Tensor | None = None
            for use in some:
                part = _gradient_rows(use, r, min(s.p, r + rows), dtype)
                total = part if total is None else total.add_(part)
            assert total is not None
            squared += squared_norms(total)
            del part, total  # else the next block would be formed beside this one
        parts.append(squared)
    return torch.cat(parts)


def squared_norms(values: Tensor) -> Tensor:
    """[b] sums of squares over all other dimensions, without a temporary where memory is contiguous."""
    flat = values.flatten(1)
    return torch.linalg.vector_norm(flat, dim=1).square_()


def _gradient_rows(use: Unfolded, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """[b, g, rows, d] of the per-example gradients."""
    if isinstance(use, DenseFactors):
        return _products(use.left_bgtp[..., start:stop].transpose(2, 3), use.right_bgtd, dtype)
    right = use.right_bgtd.to(dtype)
    b, _, _, d = right.shape
    ids = use.ids_bt
    if (start, stop) != (0, use.rows):
        inside = (ids >= start) & (ids < stop)
        ids, right = torch.where(inside, ids - start, 0), right * inside.view(b, 1, -1, 1)
    gradient = torch.zeros(b, stop - start, d, dtype=dtype, device=right.device)
    gradient.scatter_add_(1, ids.unsqueeze(-1).expand(-1, -1, d), right[:, 0])
    return gradient.unsqueeze(1)


def _products(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, g, ...] batched products, in three dimensions where there is one block."""
    if left.shape[1] == 1:
        return wide_product(left[:, 0], right[:, 0], dtype).unsqueeze(1)
    b = left.shape[0]
    return wide_product(left.flatten(0, 1), right.flatten(0, 1), dtype).unflatten(0, (b, -1))


def ghost_norms(uses: Sequence[MatrixFactors], dtype: torch.dtype, block_elements: int = BLOCK_ELEMENTS) -> Tensor:
    """[b] squared norms from Gram matrices over positions, a tile of positions and a block of examples at a time."""
    if len(uses) == 1 and isinstance(uses[0], ConvolutionFactors):
        s = uses[0].sizes
        in_one_piece = not uses[0].x.is_cuda and s.g * s.t * max(s.t, s.d) <= block_elements
        if in_one_piece or pixel_gram_pays(uses[0], block_elements):
            return _convolution_ghost(uses[0], dtype, block_elements)
    reference = uses[0].grad if isinstance(uses[0], ConvolutionFactors) else uses[0].right_bgtd
    result = reference.new_zeros(uses[0].sizes.b, dtype=dtype)
    patch_elements = max(
        (u.sizes.g * u.sizes.t * u.sizes.d for u in uses if isinstance(u, ConvolutionFactors)), default=1
    )
    examples = max(1, min(uses[0].sizes.b, block_elements // max(1, patch_elements)))
    for e in range(0, uses[0].sizes.b, examples):
        span = slice(e, e + examples)
        some = [unfolded(examples_of(use, span)) for use in uses]
        for i, first in enumerate(some):
            for second in some[i:]:
                cross = _ghost_product(first, second, dtype, block_elements)
                result[span] += cross if second is first else 2 * cross
    return result.clamp_min_(0)


def pixel_gram_pays(use: ConvolutionFactors, block_elements: int = BLOCK_ELEMENTS) -> bool:
    """Whether the Gram matrix of patches is cheaper from single positions than from patches."""
    s, u = use.sizes, use.input_positions
    channels = s.d // use.geometry.taps
    fits = s.g * max(u, s.t) ** 2 <= block_elements
    return fits and u * u * channels + 2 * s.t * s.t * use.geometry.taps < s.t * s.t * s.d


def _convolution_ghost(use: ConvolutionFactors, dtype: torch.dtype, block_elements: int) -> Tensor:
    s = use.sizes
    if pixel_gram_pays(use, block_elements):
        examples = max(1, block_elements // (s.g * max(use.input_positions, s.t) ** 2))
        grams = (patch_gram(some.to(dtype), use.geometry) for some in use.x.split(examples))
    else:
        examples = max(1, min(block_elements, CACHED_ELEMENTS) // (s.g * s.t * max(s.t, s.d)))
        grams = (c.transpose(1, 2) @ c for c in patch_columns(use.x, use.geometry, examples, dtype))
    parts = []
    for some, gram in zip(use.grad.reshape(s.b, s.g, s.p, s.t).split(examples), grams, strict=True):
        rows = some.flatten(0, 1).to(dtype)
        inner = _inner_products(torch.bmm(rows.transpose(1, 2), rows), gram)
        parts.append(inner.view(len(some), s.g).sum(1))
    return torch.cat(parts).clamp_min_(0)


def _inner_products(first: Tensor, second: Tensor) -> Tensor:
    """[b] sums over all other dimensions of products of entries, without a temporary."""
    return torch.bmm(first.flatten(1).unsqueeze(1), second.flatten(1).unsqueeze(2)).view(-1)


def _ghost_product(first: Unfolded, second: Unfolded, dtype: torch.dtype, block_elements: int) -> Tensor:
    """[b] inner products <M_first, M_second>."""
    s, t2 = first.sizes, second.sizes.t
    b, g, t1 = s.b, s.g, s.t
    same = first is second
    if t1 == t2 == 1 and same:
        right = first.right_bgtd.to(dtype).pow(2).sum(dim=3)
        if isinstance(first, DenseFactors):
            right = right * first.left_bgtp.to(dtype).pow(2).sum(dim=3)
        return right.sum(dim=(1, 2))
    side = max(1, int((block_elements // g) ** 0.5))
    # A whole row of tiles where it fits, square tiles where it does not: of a square, tiles above the diagonal count twice.
    tile1, tile2 = (t1, t2) if g * t1 * t2 <= block_elements else (min(t1, side), min(t2, side))
    examples = max(1, min(b, block_elements // max(1, g * tile1 * tile2)))
    result = first.right_bgtd.new_zeros(b, dtype=dtype)
    for i in range(0, b, examples):
        rows = slice(i, i + examples)
        for r in range(0, t1, tile1):
            one = _positions_of(first, rows, slice(r, r + tile1))
            for u in range(r if same else 0, t2, tile2):
                two = one if same and r == u else _positions_of(second, rows, slice(u, u + tile2))
                gram = _products(one.right_bgtd, two.right_bgtd.transpose(2, 3), dtype)
                part = _inner_products(gram, _left_gram(one, two, dtype))
                result[rows] += 2 * part if same and r != u else part
    return result


def _positions_of(use: Unfolded, rows: slice, span: slice) -> Unfolded:
    right = use.right_bgtd[rows, :, span]
    if isinstance(use, DenseFactors):
        return DenseFactors(use.left_bgtp[rows, :, span], right)
    return OneHotFactors(use.ids_bt[rows, span], right, use.rows)


def _left_gram(one: Unfolded, two: Unfolded, dtype: torch.dtype) -> Tensor:
    """[b, g, t1, t2] inner products of rows factors, by gathering where one of them is one-hot."""
    if isinstance(one, DenseFactors) and isinstance(two, DenseFactors):
        return _products(one.left_bgtp, two.left_bgtp.transpose(2, 3), dtype)
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
    some = [unfolded(use) for use in uses]
    s = some[0].sizes
    projection = _gaussian(max(s.p, s.d), sketch_dim, some[0].right_bgtd, generator, dtype)
    sketch = _project_rows(some, projection, dtype) if s.p >= s.d else _project_columns(some, projection, dtype)
    return squared_norms(sketch)


def hutch_plus_plus_norms(
    uses: Sequence[MatrixFactors], sketch_dim: int, generator: torch.Generator | None, dtype: torch.dtype
) -> Tensor:
    """[b] Hutch++ estimates: exact for per-example gradients of rank below k.

    With M the p x d gradient of one example, Q an orthonormal basis of M^T S and Y = M^T P: ||M Q||^2 + ||Y - Q Q^T Y||^2.
    """
    some = [unfolded(use) for use in uses]
    s = some[0].sizes
    reference = some[0].right_bgtd
    # Each block of a grouped convolution gets a basis of its own; the squared norms of blocks add up.
    # Drawn one after the other, so that one only is held.
    project = _project_rows if s.p >= s.d else _project_columns
    columns = min(sketch_dim, s.p, s.d)
    probe = _gaussian(max(s.p, s.d), sketch_dim, reference, generator, dtype)
    basis_bgsk = torch.linalg.qr(project(some, probe[:, :columns], dtype)).Q
    del probe
    probe = _gaussian(max(s.p, s.d), sketch_dim, reference, generator, dtype)
    tail = project(some, probe, dtype)
    del probe
    tail.sub_(basis_bgsk @ (basis_bgsk.transpose(2, 3) @ tail))
    squared = squared_norms(tail)
    del tail
    return squared.add_(_head_norms(some, basis_bgsk, dtype))


def _head_norms(uses: Sequence[Unfolded], basis_bgsk: Tensor, dtype: torch.dtype) -> Tensor:
    """[b] ||M Q||^2 (M^T Q where p < d), a block of the larger dimension at a time."""
    s = uses[0].sizes
    tall = s.p >= s.d
    dense = [use for use in uses if isinstance(use, DenseFactors)]
    if len(dense) < len(uses):
        return squared_norms((_project_columns if tall else _project_rows)(uses, basis_bgsk, dtype))
    longs = [use.left_bgtp if tall else use.right_bgtd for use in dense]
    smalls = [_thin_product(use.right_bgtd if tall else use.left_bgtp, basis_bgsk, dtype) for use in dense]
    squared = smalls[0].new_zeros(s.b)
    for start in range(0, max(s.p, s.d), HEAD_ROWS):
        total: Tensor | None = None
        for long, small in zip(longs, smalls, strict=True):
            product = long[..., start : start + HEAD_ROWS].to(dtype).transpose(2, 3) @ small
            total = product if total is None else total.add_(product)
        assert total is not None
        squared += squared_norms(total)
        del product, total
    return squared


def _gaussian(rows: int, k: int, like: Tensor, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    device = generator.device if generator is not None else like.device
    # One row in memory per column, as the thin product wants it.
    sample = torch.randn(k, rows, dtype=dtype, device=device, generator=generator).t()
    return sample.to(like.device).mul_(k**-0.5)


def _thin_product(factor: Tensor, projection: Tensor, dtype: torch.dtype) -> Tensor:
    """factor @ projection, [b, g, t, k]. On a processor oneDNN needs half the time of the default library for so few columns."""
    factor = factor.to(dtype)
    if projection.dim() == 2 and factor.device.type == "cpu" and dtype == torch.float32 and _HAS_THIN_LINEAR:
        # The operator behind torch.compile's linear layers: rows of the weight are columns of the projection.
        return torch.ops.mkldnn._linear_pointwise(factor, projection.t().contiguous(), None, "none", [], "")
    return factor @ projection


def _project_rows(uses: Sequence[Unfolded], projection: Tensor, dtype: torch.dtype) -> Tensor:
    """M^T P summed over uses: [b, g, d, k] for P of shape [p, k] or per example [b, g, p, k]."""
    total: Tensor | None = None
    for use in uses:
        for part in _position_blocks(use, dtype):
            if isinstance(part, DenseFactors):
                small = _thin_product(part.left_bgtp, projection, dtype)
            elif projection.dim() == 2:
                small = projection[part.ids_bt].unsqueeze(1)
            else:
                index = part.ids_bt.unsqueeze(-1).expand(-1, -1, projection.shape[-1])
                small = projection[:, 0].gather(1, index).unsqueeze(1)
            product = part.right_bgtd.to(dtype).transpose(2, 3) @ small
            total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _project_columns(uses: Sequence[Unfolded], projection: Tensor, dtype: torch.dtype) -> Tensor:
    """M P summed over uses: [b, g, p, k] for P of shape [d, k] or per example [b, g, d, k]."""
    total: Tensor | None = None
    for use in uses:
        for part in _position_blocks(use, dtype):
            small = _thin_product(part.right_bgtd, projection, dtype)
            if isinstance(part, DenseFactors):
                product = part.left_bgtp.to(dtype).transpose(2, 3) @ small
            else:
                b, _, _, k = small.shape
                product = torch.zeros(b, part.rows, k, dtype=dtype, device=small.device)
                product.scatter_add_(1, part.ids_bt.unsqueeze(-1).expand(-1, -1, k), small[:, 0])
                product = product.unsqueeze(1)
            total = product if total is None else total.add_(product)
    assert total is not None
    return total


def _position_blocks(use: Unfolded, dtype: torch.dtype) -> Iterator[Unfolded]:
    """The use whole where its factors have the wanted type already, else cut so that the widened copies stay small."""
    factors = [use.right_bgtd] + ([use.left_bgtp] if isinstance(use, DenseFactors) else [])
    s = use.sizes
    widest = max(f.shape[3] for f in factors)
    step = s.t if all(f.dtype == dtype for f in factors) else max(1, BLOCK_ELEMENTS // (s.b * s.g * widest))
    for start in range(0, s.t, step):
        yield _positions_of(use, slice(None), slice(start, start + step))
