"""Three ways from one micro-batch to its share of the clipped sum. All give the same sum; they differ in time and memory.

bookkeeping   one backward pass without weight gradients, then one weighted product per parameter. Memory: output gradients.
two-pass      one backward pass for the norms, one of the weighted losses through the same graph. Time: input gradients twice.
one-example   examples one at a time through plain autograd: each gradient is the per-example gradient. Memory: one example's activations
              and one more gradient. Exact whatever the layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quietgrad.clipping.backward import (
    PerExampleLoss,
    forward_captured,
    gradients_of_batch,
    plain_gradients,
    visit_captured_calls,
    with_any_checkpointing,
)
from quietgrad.clipping.layout import Layout
from quietgrad.clipping.planner import Policy
from quietgrad.clipping.tally import Sums, Tally
from quietgrad.clipping.thresholds import Scaling, Thresholds, clip_factors
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of, tensors_of

Engine = Literal["auto", "bookkeeping", "two-pass", "one-example"]
ENGINES: tuple[Engine, ...] = ("auto", "bookkeeping", "two-pass", "one-example")


@dataclass(frozen=True)
class Work:
    """What every engine needs to know; public settings and the user's own objects.

    Attributes:
        model, per_example_loss: the user's.
        layout: sites and trainable parameters.
        policies: parameter name -> how its estimator is chosen.
        thresholds: groups of parameters and their clipping norms.
        scaling: how a norm becomes a factor.
        generator: source of random projections.
    """

    model: nn.Module
    per_example_loss: PerExampleLoss
    layout: Layout
    policies: dict[str, Policy]
    thresholds: Thresholds
    scaling: Scaling
    generator: torch.Generator | None

    @property
    def device(self) -> torch.device:
        return next(iter(self.layout.parameters.values())).device

    @property
    def norm_dtype(self) -> torch.dtype:
        wide = any(p.dtype == torch.float64 for p in self.layout.parameters.values())
        return torch.float64 if wide else torch.float32

    def limits(self, dtype: torch.dtype) -> Tensor:
        """[groups] thresholds."""
        return torch.tensor(self.thresholds.values, dtype=dtype, device=self.device)

    def tally(self, examples: int, keep: bool) -> Tally:
        """An empty tally of one micro-batch."""
        squared = torch.zeros(len(self.thresholds.values), examples, dtype=self.norm_dtype, device=self.device)
        return Tally(
            self.layout,
            examples,
            self.policies.__getitem__,
            self.thresholds.group_of.__getitem__,
            squared,
            self.generator,
            keep,
        )


def _tallied(work: Work, batch: Batch, keep: bool) -> Tally:
    """One forward and one backward pass of a micro-batch."""

    def run(reentrant: bool) -> Tally:
        tally = work.tally(batch_size_of(batch), keep)
        passes = forward_captured(work.model, work.layout, work.per_example_loss, batch, tally.receive, reentrant)
        with passes as (losses, recording):
            tally.recording = recording
            visit_captured_calls(losses, recording, work.layout)
        return tally

    return with_any_checkpointing(work.model, run)


def group_norms(work: Work, batch: Batch) -> Tensor:
    """[groups, b] norms of a micro-batch's per-example gradients. Private."""
    return _tallied(work, batch, keep=False).finish()


def add_by_bookkeeping(work: Work, batch: Batch, sums: Sums) -> Tensor:
    """Adds a micro-batch's clipped gradients to ``sums``; returns [b] whether each example's norm is finite."""
    return _add_kept(work, _tallied(work, batch, keep=True), sums)


def _add_kept(work: Work, tally: Tally, sums: Sums) -> Tensor:
    with torch.no_grad():
        norms = tally.finish()
        finite = norms.isfinite().all(dim=0)
        tally.add_weighted(sums, clip_factors(norms, work.limits(norms.dtype), work.scaling), finite)
    return finite


def add_by_two_passes(work: Work, batch: Batch, sums: Sums) -> Tensor:
    """As ``add_by_bookkeeping``, by a second backward pass of the weighted losses.

    Raises:
        ValueError: for several groups (each would need a pass of its own) and for reentrant gradient checkpointing.
    """
    if len(work.thresholds.values) > 1:
        raise ValueError(
            "engine='two-pass' weights whole losses, so it cannot clip several groups of parameters; use engine='bookkeeping'"
        )

    def run(reentrant: bool) -> Tensor:
        if reentrant:
            raise ValueError(
                "engine='two-pass' needs to go through the graph twice, which reentrant gradient checkpointing forbids; use "
                "engine='bookkeeping', or checkpoint with use_reentrant=False"
            )
        tally = work.tally(batch_size_of(batch), keep=False)
        with forward_captured(work.model, work.layout, work.per_example_loss, batch, tally.receive, reentrant) as (
            losses,
            recording,
        ):
            tally.recording = recording
            visit_captured_calls(losses, recording, work.layout, retain_graph=True)
            norms = tally.finish()
            finite = norms.isfinite().all(dim=0)
            if not bool(finite.all()):
                # Zero times an infinite loss is not a number: the dropped examples are cut out of the factors instead.
                again = work.tally(batch_size_of(batch), keep=True)
                again.recording, recording.receive = recording, again.receive
                visit_captured_calls(losses, recording, work.layout)
                return _add_kept(work, again, sums)
            recording.receive = None
            factors = clip_factors(norms, work.limits(norms.dtype), work.scaling)[0]
            weighted = (losses * factors.to(losses.dtype)).sum()
            _add(sums, plain_gradients(weighted, work.layout.parameters, reentrant=False), 1.0)
            return finite

    return with_any_checkpointing(work.model, run)


def add_one_by_one(work: Work, example: Batch, sums: Sums) -> Tensor:
    """Adds one example's clipped gradient to ``sums``; returns [1] whether its norm is finite."""

    gradients = gradients_of_one(work, example)
    with torch.no_grad():
        norms = norms_of_one(work, gradients)
        finite = norms.isfinite().all(dim=0)
        if bool(finite):
            factors = clip_factors(norms, work.limits(norms.dtype), work.scaling)[:, 0].tolist()
            known = _addresses(work.model, example, gradients)
            for name in list(gradients):
                gradient = gradients.pop(name)
                owned = gradient is not None and known[gradient.untyped_storage().data_ptr()] == 1
                _add(sums, {name: gradient}, factors[work.thresholds.group_of[name]], owned)
    return finite


def _addresses(model: nn.Module, example: Batch, gradients: dict[str, Tensor | None]) -> Counter[int]:
    """How many of the gradients, the model's tensors and the batch's lie in each piece of memory: one of its own may be scaled in place."""
    tensors = [
        *(g for g in gradients.values() if g is not None),
        *model.parameters(),
        *model.buffers(),
        *tensors_of(example),
    ]
    return Counter(t.untyped_storage().data_ptr() for t in tensors)


def norms_of_one(work: Work, gradients: dict[str, Tensor | None]) -> Tensor:
    """[groups, 1] norms of one example's gradient. Private."""
    squared = torch.zeros(len(work.thresholds.values), 1, dtype=work.norm_dtype, device=work.device)
    for name, g in gradients.items():
        if g is not None:
            norm = torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype))
            squared[work.thresholds.group_of[name]] += norm.square()
    return squared.sqrt_()


def gradients_of_one(work: Work, example: Batch) -> dict[str, Tensor | None]:
    """Plain gradients of one example's loss."""

    return with_any_checkpointing(
        work.model,
        lambda reentrant: gradients_of_batch(work.model, work.layout, work.per_example_loss, example, reentrant),
    )


def _add(sums: Sums, gradients: dict[str, Tensor | None], factor: float, owned: bool = False) -> None:
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        wide = accumulation_dtype(gradient.dtype)
        if name in sums:
            sums[name].add_(gradient, alpha=factor)
        elif owned and gradient.dtype == wide and gradient.is_contiguous():
            sums[name] = gradient.mul_(factor)
        else:
            sums[name] = torch.mul(gradient.to(wide), factor).contiguous()
