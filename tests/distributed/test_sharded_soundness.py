"""Which rank a record lands on changes nothing of what any record contributes to a sharded model's
sum, and the passes that a rank makes without records add nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.sharding import sharded, whole
from distributed.world import loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor

from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.sharded import bound
from quietgrad.clipping.sharded.passes import add_scattered
from quietgrad.noise.sources.keyed import KeyedSource

pytestmark = pytest.mark.distributed

COUNT = 5


def sum_of(first: int, last: int, scale: float = 1.0) -> Tensor:
    """The sum of all ranks over some records, every one of them in the batch; no noise."""
    KeyedSource.stretch = lambda self, like, *a, **k: torch.zeros_like(like)  # type: ignore[method-assign]
    records = records_of(COUNT)[first:last]
    records = [{"x": r["x"] * scale, "y": r["y"]} if i == 0 else r for i, r in enumerate(records)]
    plan = plan_of(len(records), sample_rate=1.0, expected_batch_size=None, steps=1)
    model = sharded(model_of())
    with plan.start() as run:
        for batch in run.loader(records, steps=1, physical_batch_size=1):
            return whole(run.backward(model, loss, batch).gradients)
    raise AssertionError


def neighbours(rank: int) -> list[Tensor]:
    """Sums with all records, without the first (all others then change ranks), of it alone, and
    where it is a million times as large.
    """
    return [sum_of(0, COUNT), sum_of(1, COUNT), sum_of(0, 1), sum_of(0, COUNT, scale=1e6)]


def test_one_record_more_changes_nothing_of_the_others_on_any_rank(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, neighbours):
        assert isinstance(found, list), found
        with_all, without, alone, loud = found
        # Sums are whole multiples of a unit, so the difference is the record's own contribution.
        assert float((with_all - without - alone).abs().max()) < 1e-10
        assert 0.1 < float((with_all - without).norm()) <= 1 + 1e-9
        assert 0.1 < float((loud - without).norm()) <= 1 + 1e-9


def counting_company(rank: int) -> list[Tensor]:
    """A rank without records adds the one that it makes its passes with."""

    def counted(work: Any, stand_in: Any, sums: Any) -> None:
        add_scattered(work, Examples.each(stand_in, 1), sums, {})

    bound.keep_company = counted  # type: ignore[assignment]
    return neighbours(rank)


def test_a_pass_without_records_that_adds_something_is_seen(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, counting_company):
        assert isinstance(found, list), found
        _, without, _, loud = found
        assert float((loud - without).norm()) > 1.9
