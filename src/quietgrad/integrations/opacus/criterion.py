"""The criterion that goes with grad_sample_mode="ghost"."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class PerSequence:
    """A criterion as it was, and for sequences: with ``shape``, of [records x positions] losses the
    mean of every record's own is taken first.

    Args:
        criterion: a torch loss, with a ``reduction`` where sequences are used.
        loss_reduction: "mean" or "sum", over records.
    """

    def __init__(self, criterion: Any, loss_reduction: str) -> None:
        self.criterion = criterion
        self.loss_reduction = loss_reduction

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> Tensor:
        """The loss.

        Args:
            args, kwargs: the criterion's.
            shape: [records, positions, ...] of the outputs before they were flattened.
        """
        if shape is None:
            return self.criterion(*args, **kwargs)
        before = self.criterion.reduction
        try:
            self.criterion.reduction = "none"
            each = self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = before
        each = each.view(shape[0], shape[1])
        if self.loss_reduction == "sum":
            return each.sum()
        ignored = getattr(self.criterion, "ignore_index", None)
        if ignored is None:
            return each.mean(dim=1).mean()
        target: Any = kwargs.get("target", args[1] if len(args) > 1 else None)
        counted = (target.view(shape[0], shape[1]) != ignored).sum(dim=1).clamp(min=1)
        return (each.sum(dim=1) / counted).mean()
