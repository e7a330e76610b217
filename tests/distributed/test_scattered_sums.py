"""Every rank's shards of sums, in one process: what is sent off, bucket by bucket, and what is made
of it when it arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from quietgrad.clipping.engines import summing
from quietgrad.clipping.sharded import sums
from quietgrad.clipping.sharded.sums import ScatteredSums, buckets_of, rows_of_each

SHAPES = {
    "even": (8, 3),
    "fewer rows than ranks": (2, 5),
    "one row": (1,),
    "a remainder": (7, 2, 2),
    "large": (40, 6),
    "no columns": (4, 0),
    "last": (5,),
}


def shard_of(whole: Tensor, rank: int, ranks: int) -> Tensor:
    rows = rows_of_each(whole.shape[0], ranks)
    return whole[rank * rows : (rank + 1) * rows]


@dataclass
class Company:
    """The other ranks add what they are told to; nothing arrives before it is waited for."""

    rank: int
    size: int
    others: float = 0.0
    sent: list[Tensor] = field(default_factory=list)
    away: int = 0
    most_away: int = 0

    def scattered(self, sums_wn: Tensor) -> Callable[[], Tensor]:
        self.sent.append(sums_wn)
        self.away += 1
        self.most_away = max(self.most_away, self.away)

        def arrived() -> Tensor:
            self.away -= 1
            return sums_wn[self.rank] + self.others

        return arrived


@pytest.fixture
def dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds what others left there."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))


def made(
    rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch, **told: Any
) -> tuple[ScatteredSums, Company, dict[str, Tensor]]:
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    monkeypatch.setattr(sums, "BUCKET_BYTES", 300)
    monkeypatch.setattr(sums, "local_of", lambda p: shard_of(p, rank, ranks))
    company = Company(rank, ranks, **told)
    return ScatteredSums(company, parameters), company, parameters  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_are_rows_of_the_sums_of_all_rounds(
    ranks: int, monkeypatch: pytest.MonkeyPatch, dirty: None
) -> None:
    for rank in range(ranks):
        found, company, parameters = made(rank, ranks, monkeypatch)
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for present in (True, False, True):
            for name, p in parameters.items():
                whole = torch.randn(p.shape) if present else None
                total[name] += 0 if whole is None else whole
                found.add(name, whole)
            found.finish()
            assert company.away == 0
        for name, shard in found.all_shards().items():
            assert torch.equal(shard, shard_of(total[name], rank, ranks)), name
        for sent in company.sent:
            assert bool(sent.isfinite().all())  # nothing of what lay in memory is sent
        # One on its way while the next is filled, and no more.
        assert company.most_away == 1
        assert len(company.sent) == 3 * len(buckets_of(parameters, ranks)) > 3


def test_rows_that_no_rank_has_are_no_part_of_a_shard(
    monkeypatch: pytest.MonkeyPatch, dirty: None
) -> None:
    found, _, parameters = made(2, 4, monkeypatch, others=1.0)
    for name, p in parameters.items():
        found.add(name, torch.ones_like(p))
    found.finish()
    for name, shard in found.all_shards().items():
        wanted = shard_of(parameters[name], 2, 4)
        assert torch.equal(shard, torch.full_like(wanted, 2.0)), name


def test_buckets_are_small_and_of_one_dtype() -> None:
    megabyte = 2**18
    parameters = {
        "a": torch.empty(2, megabyte // 2, device="meta"),
        "b": torch.empty(2, megabyte // 2, device="meta"),
        "large": torch.empty(2, 8 * megabyte, device="meta"),
        "c": torch.empty(2, megabyte // 2, device="meta"),
        "half": torch.empty(2, 4, device="meta", dtype=torch.bfloat16),
        "wide": torch.empty(2, 4, device="meta", dtype=torch.float64),
    }
    found = buckets_of(parameters, 2)
    assert [list(bucket.widths) for bucket in found] == [
        ["a", "b"],
        ["large"],
        ["c", "half"],
        ["wide"],
    ]
    assert [bucket.dtype for bucket in found] == [torch.float32] * 3 + [torch.float64]


def test_sums_in_units_are_brought_to_units_before_they_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums, "local_of", lambda p: shard_of(p, 0, 2))
    company = Company(0, 2)
    unit = summing.unit_of(1.0, 64.0)
    parameters = {"p": torch.zeros(3, 2, dtype=torch.float64)}
    found = ScatteredSums(company, parameters, unit)  # type: ignore[arg-type]
    found.add("p", torch.rand(3, 2, dtype=torch.float64))
    found.finish()
    units = company.sent[0] / unit
    assert bool((units == units.round()).all()) and bool((units != 0).any())
