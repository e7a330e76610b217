"""Whether what a sum is formed of is still what was measured.

Factors are kept as autograd left them, without a copy. Code that writes into a layer's output
gradient or input later in the same backward pass (a hook that works in place, an activation that
takes its input back) would change the sum and not the norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.norms.factors import Kept
from quietgrad.clipping.norms.rounding import Measured
from quietgrad.sending import read_together
from quietgrad.tensors import tensors_of

Versions = list[tuple[Tensor, int]]  # tensors, and how often each was written into
TOLERANCE = 0.02  # of squared norms that are taken twice


def versions_of(kept: Sequence[Kept]) -> Versions:
    """How often each tensor was written into so far: torch counts, for all views of one memory."""
    found: Versions = []
    for use in kept:
        for value in vars(use).values():
            if isinstance(value, Tensor):
                found.append((value, value._version))
            elif value:  # no empty tuple, no None: once a parameter and step
                found += [(x, x._version) for x in tensors_of(value)]
    return found


def require_untouched(name: str, measured: Versions) -> None:
    """Refuses what was written into since ``versions_of``.

    Raises:
        NotCaptured: naming the parameter.
    """
    for tensor, version in measured:
        if tensor._version != version:
            raise _written_into(name)


def are_same_norms(before: Measured, again: Measured) -> Tensor:
    """Whether factors have the norm after the backward pass that they had in it."""
    one, two = before.squared, again.squared
    allowed = torch.maximum(one, two) * TOLERANCE + before.slack + before.margin.square()
    alike = (one - two).abs() <= allowed
    return (alike | ~(one.isfinite() & two.isfinite())).all()


def require_same_norms(same: Mapping[str, Tensor]) -> None:
    """Refuses factors that have another norm after the backward pass than in it: what was written
    past torch's counters (``.data``, another library's kernel) is seen so.

    Args:
        same: parameter name -> ``are_same_norms``; a GPU is waited for once.

    Raises:
        NotCaptured: naming the first such parameter.
    """
    for name, found in zip(same, read_together(same.values()), strict=True):
        if not found:
            raise _written_into(name)


def _written_into(name: str) -> NotCaptured:
    return NotCaptured(
        f"parameter {name!r}: its layer's input or output gradient was written into after its "
        "per-example gradients were measured, by a hook or a backward pass that works in place, so "
        "that what would be added is not what was measured; return a new tensor there instead, or "
        "take one example at a time (engine='one-example')"
    )
