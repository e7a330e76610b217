"""Losses of ghost clipping under Opacus' names. Here every loss is clipped record by record, so
these are the losses themselves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quietgrad.checks import require_word
from quietgrad.integrations.opacus.criterion import PerSequence


class DPLossFastGradientClipping(PerSequence):
    """A criterion; with ``shape=`` for sequences.

    Args:
        module, optimizer: as ``make_private`` returned them; not used.
        criterion: a torch loss.
        loss_reduction: "mean" or "sum", over records.
    """

    def __init__(
        self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean"
    ) -> None:
        super().__init__(criterion, loss_reduction)


def DPTensorFastGradientClipping(  # a class of Opacus'
    module: Any, optimizer: Any, loss_per_sample: Tensor, loss_reduction: str = "mean"
) -> Tensor:
    """The mean or sum of the records' losses, to call ``backward()`` on.

    Args:
        module, optimizer: as ``make_private`` returned them; not used.
        loss_per_sample: [records].
        loss_reduction: "mean" or "sum", over records.
    """
    require_word("loss_reduction", loss_reduction, ("mean", "sum"))
    return loss_per_sample.mean() if loss_reduction == "mean" else loss_per_sample.sum()
