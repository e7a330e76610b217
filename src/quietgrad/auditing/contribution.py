"""Given gradients as records' contributions to the open release."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.plan import PrivateRun


def contribution(run: PrivateRun, gradients: Mapping[str, Tensor]) -> ClippedSum:
    """Gradients of some records, each clipped to the plan's C, as their sum; their losses are
    endless, so that a private training loss gets the most that a record can give.

    Args:
        run: with its batch open.
        gradients: parameter name -> [examples, *shape].
    """
    some = next(iter(gradients.values()))
    losses = torch.full((len(some),), math.inf, device=some.device)
    return run.contribution(gradients, len(some), losses)


def absence(run: PrivateRun, like: Mapping[str, Tensor], count: int) -> ClippedSum:
    """The contribution of records that are absent, though their index was drawn: nothing.

    Args:
        run: with its batch open.
        like: parameter name -> a tensor in the parameter's shape.
        count: how many.
    """
    zeros = {name: g.new_zeros(count, *g.shape) for name, g in like.items()}
    return run.contribution(zeros, count, absent=True)
