"""Tensors without values, for what must not be read past the tape; and the names of functions that
read values, or only shapes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Of a tensor's values, as numbers of Python's, of numpy's or as memory.
_READS = (
    "item tolist numpy __array__ __float__ __int__ __bool__ __index__ __complex__ is_nonzero equal "
    "allclose __contains__ __dlpack__ to_dlpack __repr__ __format__ storage untyped_storage"
)
READS = set(_READS.split())
_SHAPED = (
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros "
    "new_ones new_empty new_full"
)
OF_SHAPES = {
    getattr(kind, name)
    for kind in (Tensor, torch)
    for name in _SHAPED.split()
    if hasattr(kind, name)
}


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype in (torch.bool, torch.uint8) else torch.iinfo(dtype).min


def hollow(t: Tensor) -> Tensor:
    """As ``t``, and every value a mark."""
    mark = _mark(t.dtype)
    one = torch.full((), 0 if mark is None else mark, dtype=t.dtype, device=t.device)
    return one.expand(t.shape)


def require_filled(t: Tensor) -> None:
    """Raises:
    ValueError: if every value of ``t`` is the mark.
    """
    mark = _mark(t.dtype)
    if mark is None or not t.numel() or t.layout is not torch.strided:
        return
    t = t.detach()
    if not bool(t[(0,) * t.dim()].isnan() if mark != mark else t[(0,) * t.dim()] == mark):
        return
    if bool((t.isnan() if mark != mark else t == mark).all()):
        raise ValueError(
            "records went through a function that cannot be followed (torch.jit, torch.vmap, "
            "torch.tensor(a tensor)), which finds no values; call it inside the model or in the "
            "data set, or use torch's functions on the tensors themselves"
        )
