"""What every engine needs to know of a model, a loss and the settings, as one record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from quietgrad.beside.values import Observed
from quietgrad.clipping.capture.backward import Checkpointing, PerExampleLoss
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.engines.accumulator import Accumulator
from quietgrad.clipping.engines.thresholds import STABILITY, Scaling, Thresholds
from quietgrad.clipping.norms.choice import Policy
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import Norms, NormSums, of_this_process
from quietgrad.sending import sent

Engine = Literal["auto", "bookkeeping", "one-example"]
ENGINES: tuple[Engine, ...] = ("auto", "bookkeeping", "one-example")


@dataclass(frozen=True)
class Work:
    """What every engine needs to know; public settings and the user's own objects.

    Attributes:
        model, per_example_loss: the user's.
        layout: sites and trainable parameters.
        policies: parameter name -> how its estimator is chosen.
        thresholds: groups of parameters and their clipping norms.
        scaling: how a norm becomes a factor.
        projections: of this release, for sketches.
        sketched: whether any norm is an estimate; then none is measured again.
        checkpointing: what is known of the model's.
        twice: whether norms are taken once more after the backward pass, and compared.
        most_kept: entries of per-example gradients that are kept of all matrices together.
        scratch: memory for what passes.
        over_ranks: squared norms of this process to those of all that share the records.
        least_times: what least divisors are multiplied by (``norms.coarseness``).
    """

    model: nn.Module
    per_example_loss: PerExampleLoss
    layout: Layout
    policies: dict[str, Policy]
    thresholds: Thresholds
    scaling: Scaling
    projections: Projections
    sketched: bool = False
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    twice: bool = False
    most_kept: float = math.inf
    scratch: Scratch = field(default_factory=Scratch)
    over_ranks: Callable[[NormSums], NormSums] = of_this_process
    least_times: float = 1.0

    @property
    def device(self) -> torch.device:
        return next(iter(self.layout.parameters.values())).device

    @cached_property
    def limits(self) -> Tensor:
        """[groups] thresholds; not to be written to."""
        return sent(
            torch.tensor(self.thresholds.values, dtype=torch.float64, device="cpu"), self.device
        )

    def accumulator(self, groups: RowGroups, keep: bool) -> Accumulator:
        """An empty accumulator for one micro-batch."""
        return Accumulator(
            self.layout,
            groups,
            self.policies.__getitem__,
            self.thresholds.group_of.__getitem__,
            NormSums.empty(len(self.thresholds.values), len(groups.sizes), self.device),
            self.projections,
            self.scratch,
            keep,
            keep and self.twice,
            self.most_kept,
            self.over_ranks,
            self.least_times,
        )

    def observed(self, losses: Tensor | None, divisors: Tensor, groups: RowGroups) -> Observed:
        """What numbers beside the gradients are made of.

        Args:
            losses: [rows] as the forward pass gave them.
            divisors: [groups, b] what norms are divided by.
            groups: which rows are whose.
        """
        if losses is not None:
            losses = groups.means(losses.detach().to(torch.float64))
        return Observed(losses, (divisors / self.limits.unsqueeze(1)).amax(dim=0))

    def doubtful(self, norms: Norms) -> Tensor | None:
        """[b] examples to be taken alone; None for none."""
        if self.sketched:
            return None
        found = norms.doubtful(self.limits, STABILITY if self.scaling == "automatic" else 0.0)
        return found if bool(found.any()) else None
