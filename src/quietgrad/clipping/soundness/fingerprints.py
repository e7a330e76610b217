"""Fingerprints of what per-example gradients are made of: inputs of a layer and gradients at its
output, a few numbers an example.

Two passes that give an example the same factors give it the same fingerprints, whatever stood
beside it; another gradient has others, unless the difference cancels under numbers that know
nothing of it. Signs alone would not see two positions change places that have the same one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.capture.call_shapes import tensors_among
from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.soundness.kept.put_again import numbers_of_places

HALVES = (torch.float16, torch.bfloat16)

# Entries that are taken to float64 at once (8 MiB), unless one example has more: logits over a
# vocabulary would otherwise be what a first step takes most memory for.
AT_ONCE = 2**20


@dataclass(frozen=True)
class Factors:
    """Fingerprints of one call's per-example inputs and output gradients: sums over positions
    with known numbers, and norms.

    Attributes:
        input_bd, gradient_bd: [examples, features], sums over positions with numbers that are
            the same in every pass.
        input_norms, gradient_norms: [examples].
        half: whether either was in half precision.
        reach: [examples] largest absolute entry of the gradient.
    """

    input_bd: Tensor | None
    input_norms: Tensor
    gradient_bd: Tensor
    gradient_norms: Tensor
    half: bool
    reach: Tensor

    def is_row_of(self, other: Factors, row: int, tolerance: float, floor: float) -> bool:
        """Whether the first example is example ``row`` of another pass, to rounding; what has
        another width cannot be compared and passes.

        Args:
            other: of the other pass.
            row: place there.
            tolerance: relative to the size of each factor.
            floor: gradients may differ by so much whatever their size; inputs are not compared
                where both gradients are smaller.
        """
        pairs = [
            (self.gradient_bd, other.gradient_bd, self.gradient_norms, other.gradient_norms, floor)
        ]
        vanishes = max(float(self.gradient_norms[0]), float(other.gradient_norms[row])) <= floor
        if self.input_bd is not None and other.input_bd is not None and not vanishes:
            pairs.append((self.input_bd, other.input_bd, self.input_norms, other.input_norms, 0.0))
        for sums, others, sizes, other_sizes, least in pairs:
            if sums.shape[1:] != others.shape[1:]:
                continue
            # A comparison with no number is never true: what became none beside others would pass.
            if not torch.equal(sums[0].isfinite(), others[row].isfinite()):
                return False
            size, other_size = (float(s.nan_to_num()) for s in (sizes[0], other_sizes[row]))
            apart = float((sums[0] - others[row]).nan_to_num().norm())
            if max(apart, abs(size - other_size)) > tolerance * size + least:
                return False
        return True


def factors_of(use: Use, examples: int, first: int | None = None) -> Factors | None:
    """Of one call; ``first``: of so many examples alone, the first ones."""
    gradient = use.output_gradients.get(0)
    if gradient is None or gradient.dim() == 0 or gradient.shape[0] != examples:
        return None
    inputs = tensors_among(use.args, use.kwargs)
    if not inputs and examples > 1 and use.site.rule is None:
        return None  # a table for all examples, which the fallback refuses, or gives one at a time
    x = next((x for x in inputs if x.dim() and x.shape[0] == examples), None)
    half = gradient.dtype in HALVES or (x is not None and x.dtype in HALVES)
    if first is not None and first < examples:
        gradient, x, examples = gradient[:first], None if x is None else x[:first], first
    entries = gradient.numel() + (0 if x is None else x.numel())
    few = max(1, AT_ONCE * examples // max(entries, 1))
    parts = [
        _prints(gradient[i : i + few], None if x is None else x[i : i + few])
        for i in range(0, max(examples, 1), few)
    ]
    sums, norms, input_sums, input_norms, reach = (
        _together([part for part in column if part is not None])
        for column in zip(*parts, strict=True)
    )
    assert sums is not None and norms is not None
    assert input_norms is not None and reach is not None
    return Factors(input_sums, input_norms, sums, norms, half, reach)


def _together(parts: list[Tensor]) -> Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat(parts)


def _prints(gradient: Tensor, x: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of a few examples: sums and norms of the gradient, those of the input, and the reach."""
    g = wide(gradient)
    reach = g.new_zeros(len(g))
    if g.numel():
        reach = torch.linalg.vector_norm(g.reshape(len(g), -1), ord=math.inf, dim=1)
    sums, norms = _known_sums(g)
    if x is None:
        return sums, norms, None, torch.ones_like(norms), reach
    known = wide(x)
    # Positions without a gradient (padding) add nothing, whatever stands there; nor do those where
    # it is rounding (a first token under a causal mask). The weight rises with the gradient, since
    # rounding must not decide whether a position counts.
    if gradient.dim() > 2 and x.shape == gradient.shape[:-1]:
        known = known * _weights(g, gradient.dtype)
    elif gradient.dim() > 2 and x.shape[:-1] == gradient.shape[:-1]:
        known = known * _weights(g, gradient.dtype).unsqueeze(-1)
    return sums, norms, *_known_sums(known), reach


def _weights(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, ..., d] -> [b, ...]: 0 without a gradient, 1 from the root of the machine epsilon times
    the example's largest position on.
    """
    sizes = torch.linalg.vector_norm(gradient, dim=-1)
    largest = (
        sizes.flatten(1).amax(dim=1).reshape(-1, *[1] * (sizes.dim() - 1))
        if sizes.numel()
        else sizes
    )
    enough = (torch.finfo(dtype).eps ** 0.5 * largest).clamp(min=torch.finfo(sizes.dtype).tiny)
    return (sizes / enough).clamp(max=1.0)


def _known_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """[b, ..., d] -> [b, d] and [b]; a longer example that ends in zeros gives the same."""
    b = x.shape[0]
    x_btd = x.reshape(b, 1, -1) if x.dim() < 3 else x.reshape(b, -1, x.shape[-1])
    known = numbers(x_btd.shape[1], x.device, x.dtype).expand(b, 1, -1)
    return torch.bmm(known, x_btd).squeeze(1), torch.linalg.vector_norm(x_btd, dim=(1, 2))


def numbers(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[count] one for each place, of either sign, between 1/2 and 3/2 in size, the same in every
    pass: what changes places changes a sum with these. No generator is touched.
    """
    return _numbers(1 << (count - 1).bit_length() if count else 0, device, dtype)[:count]


@functools.lru_cache(maxsize=64)  # every layer of a pass has the same few numbers of positions
def _numbers(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Of 63 bits the first 24, as numbers from -1 to 1.
    mixed = (numbers_of_places(count, device) >> 39).to(dtype) / 2**23 - 1
    return mixed + torch.where(mixed < 0, -0.5, 0.5)


def print_of(flat: Tensor) -> Tensor:
    """[2] norm of all entries, and their sum with ``numbers``: a few entries at once are widened,
    in one copy that both products read.
    """
    known = numbers(min(len(flat), AT_ONCE), flat.device, wide(flat[:0]).dtype)
    found = known.new_zeros(2)
    for block, some in enumerate(flat.split(AT_ONCE)):
        few = wide(some)
        found[0] += torch.dot(few, few)
        found[1] += torch.dot(few, known[: len(few)]) * (1.5 + math.cos(block))
    found[0].sqrt_()
    return found


def wide(x: Tensor) -> Tensor:
    """In float64 where the device has it."""
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)
