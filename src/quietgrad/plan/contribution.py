"""Clipping of per-example gradients that were not captured by the clipper: canaries, and gradients
of a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quietgrad.beside.values import Observed, SideMethod
from quietgrad.checks import require_at_least, require_int
from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.events import RandomizedClipping, SensitivityClaim
from quietgrad.tensors import accumulation_dtype

# The factor is C / norm in float64, and this much less: its rounding to the sum's dtype and that of
# every product then stay below C.
MARGIN = 1 - 2.0**-20


def clip_given(
    gradients: Mapping[str, Tensor],
    examples: int | None,
    claim: SensitivityClaim,
    beside: Iterable[SideMethod] = (),
    losses: Tensor | None = None,
) -> ClippedSum:
    """Sum of given per-example gradients, each shortened to norm C. Private.

    Args:
        gradients: name -> one record's gradient in the parameter's shape, or [examples, *shape].
        examples: records; None for one without a dimension of its own.
        claim: what the sum is to claim; C is its ``max_grad_norm``.
        beside: what is summed of norms and losses, to be released beside the gradients; none for
            records that are absent.
        losses: [examples] for it; None: nothing is added that depends on a loss.

    Raises:
        ValueError: for no gradients, a first dimension that is not ``examples``, or a claim about
            sketched norms alone.
    """
    if isinstance(claim.clipping, RandomizedClipping) and claim.clipping.envelope == "hutch":
        raise ValueError(
            "the plan accounts for the 'hutch' envelope, which holds for sketched norms alone; "
            "contributions with exact norms need the 'mixed', 'convex' or 'hutch++' one"
        )
    single = examples is None
    count = 1 if examples is None else examples
    require_int("examples", count)
    require_at_least("examples", count, 0, "it is a number of records")
    if not gradients:
        raise ValueError(
            "gradients is empty; give one tensor for every trainable parameter, by name"
        )
    rows = {name: (g.detach()[None] if single else g.detach()) for name, g in gradients.items()}
    unreal = next((name for name, row in rows.items() if not row.is_floating_point()), None)
    if unreal is not None:
        raise ValueError(
            f"gradients[{unreal!r}] has the dtype {rows[unreal].dtype}; give real floating-point "
            "tensors (complex ones as real and imaginary parts)"
        )
    for name, row in rows.items():
        if not row.dim() or row.shape[0] != count:
            raise ValueError(
                f"gradients[{name!r}] does not have the number of records as first dimension; give "
                "[examples, *shape]"
            )
    wide = {name: row.to(torch.float64) for name, row in rows.items()}
    device = next(iter(wide.values())).device
    # Scaled by the largest entry first: squares of float64 overflow and underflow too.
    largest = torch.zeros(count, dtype=torch.float64, device=device)
    for row in wide.values():
        if row.numel():
            largest = torch.maximum(largest, _flat(row).abs().amax(dim=1).to(device))
    finite = torch.isfinite(largest)
    scale = torch.where(finite & (largest > 0), largest, torch.ones_like(largest))
    squares = torch.zeros_like(largest)
    for row in wide.values():
        squares = squares + (_flat(row) / scale[:, None].to(row.device)).square().sum(dim=1).to(
            device
        )
    norms = squares.sqrt() * scale
    limit = claim.max_grad_norm * MARGIN
    factors = torch.where(
        norms > limit, limit / norms.clamp_min(math.ulp(0.0)), torch.ones_like(norms)
    )
    sums = {}
    for name, row in wide.items():
        kept = torch.where(_as_column(finite, row), row, torch.zeros_like(row)) * _as_column(
            factors, row
        )
        sums[name] = kept.sum(dim=0).to(accumulation_dtype(rows[name].dtype))
    # What is not finite was measured as it if were: it is not below any norm.
    shares = torch.where(finite, norms / claim.max_grad_norm, torch.inf)
    known = None if losses is None else losses.detach().reshape(count)
    return ClippedSum(sums, claim, PrivateCounts.of(Observed(known, shares), beside))


def _flat(row: Tensor) -> Tensor:
    return row.reshape(row.shape[0], math.prod(row.shape[1:]))


def _as_column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device).reshape(-1, *[1] * (like.dim() - 1))
