"""One example at a time through plain autograd: its gradient is the per-example gradient.

Memory: one example's activations and one more gradient. Exact whatever the layers, and what is
measured is what is added. What it is a sum of is captured beside, for the least divisor
(``spreads``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from quietgrad.beside.values import Observed
from quietgrad.clipping.capture.backward import (
    forward_captured,
    gradients_of_batch,
    plain_gradients,
    with_any_checkpointing,
)
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.capture.layout.modules import tensors_in
from quietgrad.clipping.engines.accumulator import Sums
from quietgrad.clipping.engines.spreads import Spreads
from quietgrad.clipping.engines.thresholds import clip_factors
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.rounding import (
    Measured,
    Norms,
    NormSums,
    least_of,
    norm_gamma,
    squared_norms,
)
from quietgrad.sending import numbers_beside
from quietgrad.tensors import Batch, accumulation_dtype, batch_size_of, tensors_of


def add_one_by_one(work: Work, example: Examples, sums: Sums) -> Observed:
    """Adds one example's clipped gradient to ``sums``, if its norm is finite; returns its loss and
    norm, which are private.
    """
    gradients, spreads, loss = gradients_and_spreads(work, example)
    with torch.no_grad():
        norms = norms_of_each(work, gradients.items(), example.divisor, spreads)
        finite = norms.enlarged.isfinite().all(dim=0)
        if bool(finite):
            factors = clip_factors(norms.enlarged, work.limits, work.scaling)[:, 0].tolist()
            known = _addresses(work.model, example.records, gradients)
            for name in list(gradients):
                gradient = gradients.pop(name)
                # Nor kept by the user's code: a backward pass of its own may return a tensor that
                # it holds on to.
                kept = gradient is not None and (
                    sys.getrefcount(gradient) > 2 or gradient._is_view()
                )
                owned = (
                    gradient is not None
                    and not kept
                    and known[gradient.untyped_storage().data_ptr()] == 1
                )
                add_scaled(
                    sums,
                    {name: gradient},
                    factors[work.thresholds.group_of[name]] / example.divisor,
                    owned,
                )
        return work.observed(loss, norms.enlarged, example.groups)


def _addresses(
    model: nn.Module, records: Batch, gradients: dict[str, Tensor | None]
) -> Counter[int]:
    """How many of the gradients, the model's tensors and the batch's lie in each piece of memory:
    one of its own may be scaled in place.
    """
    tensors = [
        *(g for g in gradients.values() if g is not None),
        *{id(t): t for t in tensors_in(model)}.values(),
        *tensors_of(records),
    ]
    return Counter(t.untyped_storage().data_ptr() for t in tensors)


def norms_of_one(work: Work, gradients: Mapping[str, Tensor | None], divisor: int = 1) -> Norms:
    """[groups, 1] norms of one example's gradient, given as a sum that is divided by so many.
    Of what it is a sum of nothing is known: no norm is too small to divide. Private.
    """
    return norms_of_each(work, gradients.items(), divisor)


def norms_of_each(
    work: Work,
    gradients: Iterable[tuple[str, Tensor | None]],
    divisor: int = 1,
    spreads: Mapping[str, Tensor] = MappingProxyType({}),
) -> Norms:
    """``norms_of_one``, each parameter's gradient formed when it is asked for.

    ``spreads``: parameter name -> [2, rows] of what the sum is a sum of, where that is known.
    """
    found = NormSums.empty(len(work.thresholds.values), 1, work.device)
    scale = float(divisor) ** -2
    # A few numbers of each parameter, with which all go on together.
    groups: list[int] = []
    entries: list[int] = []
    squares: list[Tensor] = []
    errors: list[float] = []
    of_spread: list[Tensor] = []
    unknown = torch.zeros(2, dtype=torch.float64, device=work.device)
    for name, g in gradients:
        if g is not None:
            wide = g.detach().to(accumulation_dtype(g.dtype)).reshape(1, -1)
            squares.append(squared_norms(wide))
            errors.append(norm_gamma(wide, wide.dtype))
            spread = spreads.get(name)
            of_spread.append(unknown if spread is None else spread.sum(1))
            groups.append(work.thresholds.group_of[name])
            entries.append(g.numel())
    if groups:
        squared = torch.cat(squares).mul_(scale)
        slack = squared * numbers_beside(errors, squared)
        total, terms = torch.stack(of_spread, dim=1)
        least, terms = least_of(total / divisor), (terms / divisor**2).sqrt()
        measured = Measured(squared, slack, torch.zeros_like(squared), least, terms)
        found.add_several(groups, measured, entries)
    return work.over_ranks(found).norms(work.least_times)


def gradients_of_one(work: Work, example: Examples) -> dict[str, Tensor | None]:
    """Plain gradients of one example's loss, summed over its rows."""
    return with_any_checkpointing(
        work.checkpointing,
        lambda reentrant: gradients_of_batch(
            work.model, work.layout, work.per_example_loss, example.rows, reentrant
        ),
    )


def gradients_and_spreads(
    work: Work, example: Examples
) -> tuple[dict[str, Tensor | None], dict[str, Tensor], Tensor]:
    """Plain gradients of one example's loss, summed over its rows; parameter name -> [2, rows]
    spreads (``spreads_of``) where they are known; and [rows] losses. All of it private.

    Plain autograd computes the gradients. Calls of modules are captured beside, as many as can be:
    which ones follows from the model and the example alone.
    """

    def run(reentrant: bool) -> tuple[dict[str, Tensor | None], dict[str, Tensor], Tensor]:
        rows, single = batch_size_of(example.rows), example.groups.single
        spreads = Spreads(rows, single, work.projections, work.least_times)
        passes = forward_captured(
            work.model,
            work.layout,
            work.per_example_loss,
            example.rows,
            spreads.receive,
            reentrant,
            switch_off=False,
            row_watch=spreads.row_watch,
        )
        with passes as (losses, recording):
            spreads.recording = recording
            gradients = plain_gradients(losses.sum(), work.layout.parameters, reentrant)
        return gradients, spreads.found(), losses.detach()

    return with_any_checkpointing(work.checkpointing, run)


def add_scaled(
    sums: Sums, gradients: dict[str, Tensor | None], factor: float, owned: bool = False
) -> None:
    """Adds ``factor`` times one example's gradients to ``sums``; ``owned``: nobody else holds their
    memory, which may be used.
    """
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
