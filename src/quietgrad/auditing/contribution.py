"""Given gradients as records' contributions to the open release."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.plan import PrivateRun


def contribution(run: PrivateRun, gradients: Mapping[str, Tensor]) -> ClippedSum:
    """Gradients of some records, each clipped to the plan's C, as their sum. Zeros are the
    contribution of a record that is absent, though its index was drawn.

    Args:
        run: with its batch open.
        gradients: parameter name -> [examples, *shape].
    """
    return run.contribution(gradients, examples=len(next(iter(gradients.values()))))
