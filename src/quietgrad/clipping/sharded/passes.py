"""One micro-batch of each rank: all make the pass together, those without a record with one that
counts nothing, and scatter what their records add.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quietgrad.beside.values import Observed
from quietgrad.clipping.capture.backward import forward_captured, visit_captured_calls
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.engines.accumulator import Accumulator, Sums
from quietgrad.clipping.engines.bookkeeping import Shares, accumulated, shares_of
from quietgrad.clipping.engines.one_example import add_scaled, norms_of_each
from quietgrad.clipping.engines.thresholds import clip_factors
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.sharded.sums import ScatteredSums
from quietgrad.tensors import Batch


def keep_company(work: Work, stand_in: Batch, sums: ScatteredSums) -> None:
    """The pass of a rank that has no micro-batch left while others have: on a record that is
    captured nowhere and adds nothing.
    """
    passes = forward_captured(
        work.model, work.layout, work.per_example_loss, stand_in, None, reentrant=False
    )
    with passes as (losses, recording):
        visit_captured_calls(losses, recording, work.layout)
    for name in sums.parameters:
        sums.add(name, None)
    sums.finish()


def add_scattered(work: Work, batch: Examples, sums: ScatteredSums, plain: Sums) -> Observed:
    """``add_by_bookkeeping`` with sums that are scattered: one parameter's whole product at a time,
    formed by the same operations in the same order.

    Args:
        work: model, loss and settings.
        batch: this rank's micro-batch.
        sums: of the parameters that are sharded.
        plain: of those that every rank holds whole.
    """
    accumulator = accumulated(work, batch, keep=True)
    with torch.no_grad():
        shares = shares_of(work, accumulator)
        own: dict[int, list[float] | None] = {**shares.apart}
        own |= {i: _measured_alone(work, accumulator, shares, i) for i in shares.alone}
        for name in work.layout.parameters:
            total: Sums = plain if name not in sums.parameters else {}
            if name in accumulator.kept:
                _add(work, accumulator, shares, own, name, total)
            if name in sums.parameters:
                sums.add(name, total.pop(name, None))
        sums.finish()
        return work.observed(accumulator.losses, shares.divisors, batch.groups)


def _measured_alone(
    work: Work, accumulator: Accumulator, shares: Shares, example: int
) -> list[float] | None:
    """Clip factors of one example by its own gradient's norm, [groups]; None where it is not finite
    and adds nothing. The gradient is formed parameter by parameter, and once more when it is added.
    """

    def each() -> Iterator[tuple[str, Tensor]]:
        for name in accumulator.kept:
            yield name, accumulator.gradient_at(name, example)

    norms = norms_of_each(work, each()).above(shares.least[:, example : example + 1])
    shares.divisors[:, example : example + 1] = norms.enlarged
    if not bool(norms.enlarged.isfinite().all()):
        return None
    factors: list[float] = clip_factors(norms.enlarged, work.limits, work.scaling)[:, 0].tolist()
    return factors


def _add(
    work: Work,
    accumulator: Accumulator,
    shares: Shares,
    own: dict[int, list[float] | None],
    name: str,
    total: Sums,
) -> None:
    group = work.thresholds.group_of[name]
    for example, factors in own.items():
        if factors is not None:
            gradient = accumulator.gradient_at(name, example)
            add_scaled(total, {name: gradient}, factors[group], owned=True)
    accumulator.add_weighted_of(name, total, shares.factors, shares.left_out)
