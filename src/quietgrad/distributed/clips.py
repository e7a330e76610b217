"""From the micro-batches of a share to its clipped sum, on one process or in company of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from torch import nn

from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.cut.bound import CutClipper
from quietgrad.clipping.cut.company import CutCompany
from quietgrad.clipping.cut.sharded import CutShardedClipper
from quietgrad.clipping.engines.summing import Summing
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.sharded.bound import ShardedClipper
from quietgrad.clipping.sharded.company import Company
from quietgrad.distributed.sharded import ShardedCompany, clipping_on
from quietgrad.distributed.team import Team
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Batch


def clip_parts(
    bound: BoundClipper,
    parts: Iterator[Batch],
    key: RandomKey,
    release: int,
    summing: Summing,
    company: Company | CutCompany | None,
    stamped: Callable[[ClippedSum], ClippedSum],
) -> ClippedSum:
    """Clipped sum of all parts, stamped. Private.

    Args:
        bound: model and loss.
        parts: micro-batches, one alone of which is held.
        key, release: of the projections.
        summing: how micro-batches are added up.
        company: the ranks, where the model is sharded or cut over them.
        stamped: marks a sum as the run's.

    Raises:
        ValueError: for no micro-batch at all, and what the clipper refuses.
    """
    if isinstance(bound, CutClipper):
        bound.company = cast(CutCompany, company)
    elif company is not None:
        assert isinstance(bound, ShardedClipper)
        _share(bound, company)
        company = cast(Company, company)
        drawn = Projections(key, release)
        return stamped(bound.clip_together(parts, drawn, release, summing, company))
    total: ClippedSum | None = None
    for part in parts:
        clipped = stamped(bound.clip(part, Projections(key, release), release, summing))
        total = clipped if total is None else total + clipped
    if total is None:
        raise ValueError(
            "batch is an iterator that gave no micro-batch; for a batch without records give "
            "one empty micro-batch, whose sum is zero"
        )
    return total


def check_public(team: Team, bound: BoundClipper, model: nn.Module, public: Batch) -> None:
    """``BoundClipper.check``, where a model is cut in the company of the other ranks."""
    if not isinstance(bound, CutClipper | CutShardedClipper):
        bound.check(public)
        return
    with clipping_on(team, model) as company:
        if isinstance(bound, CutClipper):
            bound.company = cast(CutCompany, company)
        _share(bound, company)
        bound.check(public)


def _share(bound: BoundClipper, company: Company | CutCompany | None) -> None:
    if isinstance(bound, CutShardedClipper):
        assert isinstance(company, ShardedCompany)
        bound.sharing = company.sharing
