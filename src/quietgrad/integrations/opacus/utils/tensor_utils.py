"""Sums and patches of tensors that hold one example a row, for layer samplers of a script."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import BY_AUTOGRAD

Sizes = int | tuple[int, ...]


def calc_sample_norms(
    named_params: Iterable[tuple[str, Tensor]], *, flat: bool = True
) -> list[Tensor]:
    """Norms of examples' rows.

    Args:
        named_params: names, and tensors [b, ...].
        flat: one norm over all tensors together, instead of one for each.

    Returns:
        [b] each; of one tensor where ``flat``.
    """
    norms = [calc_sample_norms_one_layer(rows) for _, rows in named_params]
    return [torch.linalg.vector_norm(torch.stack(norms), dim=0)] if flat else norms


def calc_sample_norms_one_layer(param: Tensor) -> Tensor:
    """[b, ...] -> [b]."""
    return torch.linalg.vector_norm(param.reshape(len(param), -1), dim=1)


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """[b, ..., last n dimensions] -> [b, last n dimensions]."""
    between = tuple(range(1, tensor.dim() - n_dims))
    return tensor.sum(dim=between) if between else tensor


def unfold2d(
    input: Tensor, *, kernel_size: Sizes, padding: str | Sizes, stride: Sizes, dilation: Sizes
) -> Tensor:
    """[b, channels, h, w] -> [b, channels * kernel, places], as ``torch.nn.functional.unfold``;
    ``padding`` may be "same" or "valid".
    """
    return _patches(input, 2, kernel_size, padding, stride, dilation)


def unfold3d(
    tensor: Tensor,
    *,
    kernel_size: Sizes,
    padding: str | Sizes,
    stride: Sizes,
    dilation: Sizes = 1,
) -> Tensor:
    """[b, channels, d, h, w] -> [b, channels * kernel, places]; ``padding`` may be "same" or
    "valid".

    Raises:
        ValueError: for other than five dimensions.
    """
    if tensor.dim() != 5:
        raise ValueError(
            f"tensor has {tensor.dim()} dimensions; give [examples, channels, depth, height, width]"
        )
    return _patches(tensor, 3, kernel_size, padding, stride, dilation)


def _patches(
    x: Tensor, dims: int, kernel: Sizes, padding: str | Sizes, stride: Sizes, dilation: Sizes
) -> Tensor:
    """A convolution with the unit matrix: each output channel is one entry of the patches."""
    sizes = (kernel,) * dims if isinstance(kernel, int) else tuple(kernel)
    entries = int(torch.Size(sizes).numel())
    unit = torch.eye(entries, dtype=x.dtype, device=x.device).view(entries, 1, *sizes)
    convolve = F.conv2d if dims == 2 else F.conv3d
    alone = x.reshape(-1, 1, *x.shape[2:])
    if isinstance(padding, str):  # torch's own takes no stride beside it
        alone, padding = F.pad(alone, _beside(sizes, dilation, padding == "same")), 0
    found = convolve(alone, unit, None, stride, padding, dilation)
    return found.reshape(x.shape[0], x.shape[1] * entries, -1)


def _beside(sizes: tuple[int, ...], dilation: Sizes, same: bool) -> list[int]:
    """What is added before and behind each dimension, the last one first: half of what the kernel
    reaches over, the odd one behind.
    """
    apart = (dilation,) * len(sizes) if isinstance(dilation, int) else dilation
    reach = [d * (k - 1) if same else 0 for k, d in zip(sizes, apart, strict=True)]
    return [n for r in reversed(reach) for n in (r // 2, r - r // 2)]


__getattr__ = absent(__name__, {"filter_dilated_rows": BY_AUTOGRAD})
