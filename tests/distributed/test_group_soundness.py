"""What one record adds on four processes, two and two with the same records: at most C over all
parts and shards together; and what breaks that is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cutting import PLANS, cut, model_named
from distributed.sharding import whole
from distributed.test_cut_soundness import COUNT, what_is_wrong
from distributed.world import loss, on_ranks, plan_of, records_of
from torch import Tensor

from quietgrad.clipping.capture.cut import Cut
from quietgrad.clipping.norms.rounding import NormSums
from quietgrad.distributed.circles import Circles
from quietgrad.distributed.cut.ranks import WITHIN, CutRanks
from quietgrad.noise.sources.keyed import KeyedSource

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("no_looks"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


def sum_of(sharded: bool, first: int, last: int, scale: float = 1.0) -> Tensor:
    """The sum over some records, every one of them in the batch; no noise."""
    KeyedSource.stretch = lambda self, like, *a, **k: torch.zeros_like(like)  # type: ignore[method-assign]
    records = records_of(COUNT)[first:last]
    records = [{"x": r["x"], "y": r["y"] * scale} if i == 0 else r for i, r in enumerate(records)]
    plan = plan_of(len(records), sample_rate=1.0, expected_batch_size=None, steps=1)
    model = cut(model_named("bottleneck"), PLANS["bottleneck"], 2, sharded)
    with plan.start(tensor_parallel=2) as run:
        for batch in run.loader(records, steps=1, physical_batch_size=2):
            return whole(run.backward(model, loss, batch).gradients)
    raise AssertionError


def neighbours(rank: int, sharded: bool) -> list[Tensor]:
    """Sums with all records, without the first (all others then change micro-batches and groups),
    of it alone, and where its loss is far larger.
    """
    return [
        sum_of(sharded, 0, COUNT),
        sum_of(sharded, 1, COUNT),
        sum_of(sharded, 0, 1),
        sum_of(sharded, 0, COUNT, scale=1e6),
    ]


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "copied"])
def test_one_record_adds_its_own_and_at_most_c(sharded: bool, tmp_path: Path) -> None:
    found = on_ranks(4, tmp_path, neighbours, sharded)
    assert isinstance(found[0], list), found[0]
    assert what_is_wrong(found[0]) == []
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def norms_not_summed_over_neighbours(rank: int, sharded: bool) -> list[Tensor]:
    NormSums.of_all = lambda self, added: self  # type: ignore[method-assign,assignment]
    return neighbours(rank, sharded)


def copies_counted_on_every_rank(rank: int, sharded: bool) -> list[Tensor]:
    Cut.counts = lambda self, name: True  # type: ignore[method-assign]
    return neighbours(rank, sharded)


def records_not_split(rank: int, sharded: bool) -> list[Tensor]:
    """Both groups clip the whole batch, and nobody counts what they hold together."""
    CutRanks.share = property(lambda self: (0, 1))  # type: ignore[assignment]
    CutRanks.agree = lambda self, *a: self.agreed(*a)[0] if a[2:] else 0  # type: ignore
    return neighbours(rank, sharded)


def records_counted_twice(rank: int, sharded: bool) -> list[Tensor]:
    CutRanks.share = property(lambda self: (0, 1))  # type: ignore[assignment]
    return neighbours(rank, sharded)


def groups_not_added(rank: int, sharded: bool) -> list[Tensor]:
    Circles.summed = lambda self, sums: self.owned(sums)  # type: ignore[method-assign]
    return neighbours(rank, sharded)


def copies_kept_apart(rank: int, sharded: bool) -> list[Tensor]:
    """Of what neighbours hold alike each covers its own sum, which one of them has."""
    own = CutRanks._circle_of

    def found(self: CutRanks, tensor: Tensor) -> str | None:
        circle = own(self, tensor)
        return None if circle == WITHIN else circle

    CutRanks._circle_of = found  # type: ignore[method-assign]
    return [sum_of(sharded, 0, COUNT)]


BROKEN: dict[Any, tuple[bool, str]] = {
    norms_not_summed_over_neighbours: (True, "loud above C"),
    copies_counted_on_every_rank: (True, "loud above C"),
    records_not_split: (False, "loud above C"),
    groups_not_added: (False, "others"),
}


@pytest.mark.parametrize("broken", list(BROKEN), ids=lambda f: f.__name__)
def test_wrong_sums_of_groups_are_seen(broken: Any, tmp_path: Path) -> None:
    sharded, text = BROKEN[broken]
    found = on_ranks(4, tmp_path, broken, sharded)
    assert isinstance(found[0], list), found[0]
    assert text in what_is_wrong(found[0]), what_is_wrong(found[0])


def test_records_that_both_groups_clip_are_refused(tmp_path: Path) -> None:
    for found in on_ranks(4, tmp_path, records_counted_twice, False):
        assert "do not hold as many records as the batch" in str(found), found


def test_copies_that_are_kept_apart_are_seen(tmp_path: Path) -> None:
    one, two, *_ = on_ranks(4, tmp_path, copies_kept_apart, True)
    assert isinstance(one, list) and isinstance(two, list), (one, two)
    assert not all(map(torch.equal, one, two))
