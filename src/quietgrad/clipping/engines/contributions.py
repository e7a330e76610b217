"""What one captured call adds to the per-example gradients of its module's own parameters: by the
module's rule, or by the fallback.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.fallback import fallback_contributions, fallback_spreads
from quietgrad.clipping.norms.checked_rule import CheckedRule
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import Contribution, DirectGradients
from quietgrad.clipping.norms.rounding import squared_norms
from quietgrad.clipping.norms.signs import OF_SQUARES, Signs
from quietgrad.clipping.norms.spread import spread_of
from quietgrad.tensors import accumulation_dtype, full_precision


def contributions_of(
    use: Use, rows: int, recording: Recording | None, projections: Projections | None = None
) -> dict[str, Contribution]:
    """Parameter name -> per-example gradients of one call.

    Args:
        use: the call.
        rows: of the batch.
        recording: of the pass, whose hooks rest while a module runs again.
        projections: of the release, for the spreads of gradients that come formed; None leaves
            those unknown.
    """
    site = use.site
    signs = None if projections is None else Signs(projections, site.name)
    if site.rule is not None:
        found = _by_rule(use, signs)
    else:
        with contextlib.nullcontext() if recording is None else recording.pause():
            found = dict(fallback_contributions(use, rows, signs))
    return {site.parameters[local]: contribution for local, contribution in found.items()}


def spreads_of(
    use: Use, rows: int, recording: Recording, projections: Projections
) -> dict[str, Tensor]:
    """Parameter name -> [2, rows] float64, spreads of the per-example gradients of one call, where
    they are known, and squares of their ``Spread.terms``, or zeros; no gradient of a matrix is
    formed. Arguments: ``contributions_of``.
    """
    site, signs = use.site, Signs(projections, use.site.name)
    spreads: dict[str, Tensor | None]
    if site.rule is None:
        with recording.pause():
            found = fallback_spreads(use, rows, signs)
        spreads = {local: torch.stack([s, torch.zeros_like(s)]) for local, s in found.items()}
    else:
        with full_precision():
            spreads = {local: _spread(one) for local, one in _by_rule(use, signs).items()}
    return {site.parameters[local]: s for local, s in spreads.items() if s is not None}


def _spread(one: Contribution) -> Tensor | None:
    if isinstance(one, DirectGradients):
        s = one.spread_b
        return None if s is None else torch.stack([s, torch.zeros_like(s)])
    spread = spread_of([one], accumulation_dtype(one.like.dtype))
    return torch.stack([spread.plain, spread.terms.square()])


def _by_rule(use: Use, signs: Signs | None) -> dict[str, Contribution]:
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
    return found | {name: _with_spread(found[name], signed[name]) for name in formed}


def _with_spread(one: Contribution, signed: Contribution) -> Contribution:
    assert isinstance(one, DirectGradients)
    values = signed.values_bn if isinstance(signed, DirectGradients) else None
    if values is None:
        return one
    wide = values.to(accumulation_dtype(values.dtype))
    return DirectGradients(one.values_bn, squared_norms(wide).sqrt() * OF_SQUARES)
