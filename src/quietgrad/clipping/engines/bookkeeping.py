"""Book-keeping: one backward pass without weight gradients, then one weighted product per
parameter. Memory: output gradients.

An example whose norm, taken from factors, is not certain to be an upper bound (``rounding``) is
left out of its micro-batch's product: its gradient is formed from the same factors, measured, and
added as
it is. With sketches its certified bound, if larger, is divided by instead, because which way a
record goes may depend on its projection but must not change the law of its estimate. One that
cancels is then formed apart too, and multiplied by the factor that it has anyway: in one product
with others its partial sums, far above what it adds, would round theirs.

(A second backward pass of weighted losses was removed: autograd sums records in the model's own
precision, and sums uses of a weight that the norms never saw.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.beside.values import Observed
from quietgrad.clipping.capture.backward import (
    forward_captured,
    require_gradient,
    visit_captured_calls,
    with_any_checkpointing,
)
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.engines.accumulator import Accumulator, Sums
from quietgrad.clipping.engines.one_example import add_scaled, norms_of_one
from quietgrad.clipping.engines.thresholds import clip_factors
from quietgrad.clipping.engines.work import Work


def accumulated(work: Work, batch: Examples, keep: bool) -> Accumulator:
    """One forward and one backward pass of a micro-batch."""

    def run(reentrant: bool) -> Accumulator:
        accumulator = work.accumulator(batch.groups, keep)
        passes = forward_captured(
            work.model,
            work.layout,
            work.per_example_loss,
            batch.rows,
            accumulator.receive,
            reentrant,
        )
        with passes as (losses, recording):
            if len(batch) > 1:  # LayerDrop's records come alone: others would decide for each other
                require_gradient(losses)
            losses_of_examples = batch.averaged(losses)
            accumulator.recording, accumulator.losses = recording, losses.detach()
            visit_captured_calls(losses_of_examples, recording, work.layout)
        return accumulator

    return with_any_checkpointing(work.checkpointing, run)


def group_norms(work: Work, batch: Examples) -> Tensor:
    """[groups, b] norms of a micro-batch's per-example gradients: estimates, and for those in doubt
    the norms of their own gradients. Private.
    """
    accumulator = accumulated(work, batch, keep=not work.sketched)
    norms = accumulator.finish()
    alone = work.doubtful(norms)
    estimates = norms.estimate
    if alone is not None:
        for i in torch.nonzero(alone).flatten().tolist():
            estimates[:, i : i + 1] = norms_of_one(work, accumulator.gradient_of(i)).estimate
    return estimates


def add_by_bookkeeping(work: Work, batch: Examples, sums: Sums) -> Observed:
    """Adds a micro-batch's clipped gradients to ``sums``; returns losses and norms, which are
    private. An example whose norm is not finite adds zero.
    """
    accumulator = accumulated(work, batch, keep=True)
    with torch.no_grad():
        shares = shares_of(work, accumulator)
        for i in shares.alone:
            least, gradient = shares.least[:, i : i + 1], accumulator.gradient_of(i)
            shares.divisors[:, i : i + 1] = _add_measured(work, gradient, least, sums)
        for i, factors in shares.apart.items():
            _add_gradient(work, accumulator.gradient_of(i), factors, sums)
        accumulator.add_weighted(sums, shares.factors, shares.left_out)
        return work.observed(accumulator.losses, shares.divisors, batch.groups)


@dataclass(frozen=True)
class Shares:
    """What the examples of a micro-batch are multiplied by. Private.

    Attributes:
        divisors: [groups, b] what norms are divided by; of examples taken alone, to be filled in.
        least: [groups, b] what those taken alone are divided by at least.
        factors: [groups, b] clip factors; 0 for examples taken alone or formed apart.
        left_out: [b] examples that add nothing to the weighted sum; None for none.
        alone: numbers of the examples that are measured and added each by itself.
        apart: numbers of those that are added each by itself, by these clip factors, [groups].
    """

    divisors: Tensor
    least: Tensor
    factors: Tensor
    left_out: Tensor | None
    alone: list[int]
    apart: dict[int, list[float]]


def shares_of(work: Work, accumulator: Accumulator) -> Shares:
    """Once the backward pass is over."""
    norms = accumulator.finish()
    divisors = norms.divisors() if work.sketched else norms.enlarged
    factors = clip_factors(divisors, work.limits, work.scaling)
    if work.sketched:
        apart = norms.apart(factors, work.limits)
        left_out = apart | ~divisors.isfinite().all(dim=0)
        if not bool(left_out.any()):
            return Shares(divisors, norms.least, factors, None, [], {})
        each = {i: factors[:, i].tolist() for i in torch.nonzero(apart).flatten().tolist()}
        rest = factors.masked_fill(apart, 0.0)
        return Shares(divisors, norms.least, rest, left_out, [], each)
    alone = work.doubtful(norms)
    if alone is None:
        return Shares(divisors, norms.least, factors, None, [], {})
    numbers = torch.nonzero(alone).flatten().tolist()
    rest = factors.masked_fill(alone, 0.0)
    return Shares(divisors, norms.least, rest, alone, numbers, {})


def _add_measured(work: Work, gradient: dict[str, Tensor], least: Tensor, sums: Sums) -> Tensor:
    """Adds one example's gradient, which is nobody else's, clipped by its own norm, or by ``least``
    where that is more; returns [groups, 1] what it was divided by.
    """
    norms = norms_of_one(work, gradient).above(least)
    finite = norms.enlarged.isfinite().all(dim=0)
    if bool(finite):
        factors = clip_factors(norms.enlarged, work.limits, work.scaling)[:, 0].tolist()
        _add_gradient(work, gradient, factors, sums)
    return norms.enlarged


def _add_gradient(
    work: Work, gradient: dict[str, Tensor], factors: list[float], sums: Sums
) -> None:
    """Adds one example's gradient by its clip factors, [groups]."""
    for name in list(gradient):
        factor = factors[work.thresholds.group_of[name]]
        add_scaled(sums, {name: gradient.pop(name)}, factor, owned=True)
