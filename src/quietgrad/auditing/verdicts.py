"""One verdict of the clipper's guard for all runs of an audit: model and loss are the same in each,
and examining them thousands of times would take nearly all of its time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quietgrad.auditing.stage import Stage
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.clipper import Clipper
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.tensors import Batch, map_tensors

EXAMINED = 8  # records that the guard looks at


class SharedVerdict:
    """Model and loss, examined before the first run; later looks come as if all runs were one long
    one.
    """

    def __init__(self, plan: PrivacyPlan, stage: Stage) -> None:
        some = torch.arange(min(stage.known, EXAMINED), device="cpu")
        records = (
            stage.choose(some, True) if len(some) else map_tensors(stage.canary, _with_another)
        )
        self._bound = plan.clipper.bind(stage.model, stage.per_example_loss)
        self._bound.check(records)
        self._steps = plan.steps
        self._runs = 0

    def serve(self, run: PrivateRun) -> None:
        """Puts the bound clipper into a run that begins. Everything else of
        the run stays its own.
        """
        bindings: Any = _Numbered(self._bound, self._runs * self._steps, run.plan.clipper)
        run.bindings = bindings
        self._runs += 1


def _with_another(canary: Tensor) -> Tensor:
    """The only record and one like it: of two that are equal nothing can be told."""
    return torch.cat([canary, canary * 1.5 if canary.is_floating_point() else canary])


class _Numbered:
    """What a run asks for a bound clipper, with releases numbered from ``first`` for the guard."""

    def __init__(self, bound: Any, first: int, clipper: Clipper) -> None:
        self._bound, self._first, self.clipper = bound, first, clipper

    def of(self, *_: object) -> _Numbered:
        self._bound.clipper = self.clipper  # its clipping norm may follow what was released
        return self

    def clip(self, batch: Batch, projections: Any, step: int, *how: Any) -> ClippedSum:
        clipped: ClippedSum = self._bound.clip(batch, projections, self._first + step, *how)
        return clipped
