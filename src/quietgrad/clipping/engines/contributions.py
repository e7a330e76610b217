"""What one captured call adds to the per-example gradients of its module's own parameters: by the
module's rule, or by the fallback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.fallback import fallback_contributions, fallback_spreads
from quietgrad.clipping.capture.routines.again import maps_of
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import (
    ConvolutionFactors,
    DenseFactors,
    DirectGradients,
    Given,
    MatrixFactors,
    SummedRows,
    by_extent,
)
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.norms.rounding import squared_norms
from quietgrad.clipping.norms.rules.checked import CheckedRule
from quietgrad.clipping.norms.signs import OF_SQUARES, Signs
from quietgrad.clipping.norms.spread import spread_of
from quietgrad.tensors import accumulation_dtype, full_precision


def contributions_of(
    use: Use, rows: int, recording: Recording | None, projections: Projections | None = None
) -> dict[str, Given]:
    """Parameter name -> per-example gradients of one call, as the module's rule gives them.

    Args:
        use: the call.
        rows: of the batch.
        recording: of the pass, whose hooks rest while a module runs again.
        projections: of the release, for the spreads of gradients that come formed; None leaves
            those unknown.
    """
    site = use.site
    signs = None if projections is None else Signs(projections, site.name)
    found: Mapping[str, Given]
    if site.rule is not None:
        found = _by_rule(use, signs)
    else:
        with contextlib.nullcontext() if recording is None else recording.pause():
            found = fallback_contributions(use, rows, signs)
    return {site.parameters[local]: contribution for local, contribution in found.items()}


@dataclass(frozen=True)
class Unsummed:
    """What the spread of a matrix' one use is a sum of: the rows of its factors. Private."""

    factors: DenseFactors


def spreads_of(
    use: Use, rows: int, recording: Recording, projections: Projections, single: bool
) -> list[tuple[str, Tensor | Unsummed]]:
    """Parameter names and [2, rows] float64, spreads of the per-example gradients of one call,
    where they are known, and squares of their ``Spread.terms``, or zeros; of most matrices their
    factors, whose spreads are found together. No gradient of a matrix is formed, nor any sum of
    rows. Those of a parameter that several maps of the call use add up.
    Arguments: ``contributions_of``; ``single``: ``RowGroups.single``. Of several rows that are
    measured together as one matrix the first has what is of all.
    """
    site, signs = use.site, Signs(projections, use.site.name)
    found: Mapping[str, Tensor | Unsummed | None]
    if site.rule is None:
        with recording.pause():
            maps = maps_of(use, rows)
            spreads = {} if maps else fallback_spreads(use, rows, signs)
        if maps:
            each = [spreads_of(part, rows, recording, projections, single) for part in maps]
            return [one for part in each for one in part]
        found = {local: torch.stack([s, torch.zeros_like(s)]) for local, s in spreads.items()}
    else:
        with full_precision():
            found = {local: _spread(one, single) for local, one in _by_rule(use, signs).items()}
    return [(site.parameters[local], s) for local, s in found.items() if s is not None]


def _spread(one: Given, single: bool) -> Tensor | Unsummed | None:
    """As where several examples are measured: maps at the size that a record has itself, rows of
    one example as positions of one matrix.
    """
    if isinstance(one, DirectGradients | SummedRows):
        s = one.spread() if isinstance(one, SummedRows) else one.spread_b
        return None if s is None else torch.stack([s, torch.zeros_like(s)])
    if not single and isinstance(one, ConvolutionFactors):
        one = one.unfolded()
    sizes = one.sizes
    if isinstance(one, DenseFactors) and sizes.g == 1:
        return Unsummed(one)
    numbers = one.like.new_zeros(2, sizes.b, dtype=torch.float64)
    if not single and isinstance(one, DenseFactors):
        numbers[:, :1] = _numbers([one.merged(RowGroups((sizes.b,)))])
        return numbers
    parts = by_extent([one])
    if parts is None:
        return _numbers([one])
    for places, part in parts:
        numbers[:, places] = _numbers(part)
    return numbers


def _numbers(uses: Sequence[MatrixFactors]) -> Tensor:
    spread = spread_of(uses, accumulation_dtype(uses[0].like.dtype))
    return torch.stack([spread.plain, spread.terms.square()])


def _by_rule(use: Use, signs: Signs | None) -> Mapping[str, Given]:
    site = use.site
    assert site.rule is not None
    x, gradient = use.input, use.output_gradients[0]
    found = site.rule(site.module, x, gradient, site.parameters)
    if signs is None or not isinstance(site.rule, CheckedRule):
        return found
    formed = [
        name
        for name, one in found.items()
        if isinstance(one, DirectGradients) and one.spread_b is None
    ]
    if not formed:
        return found
    # Linear in the gradient: a user's rule gives the signed sum as it gives the sum.
    signed = site.rule(site.module, x, signs.times(gradient, 0), formed)
    return {**found, **{name: _with_spread(found[name], signed[name]) for name in formed}}


def _with_spread(one: Given, signed: Given) -> Given:
    assert isinstance(one, DirectGradients)
    values = signed.values_bn if isinstance(signed, DirectGradients) else None
    if values is None:
        return one
    wide = values.to(accumulation_dtype(values.dtype))
    return DirectGradients(one.values_bn, squared_norms(wide).sqrt() * OF_SQUARES)
