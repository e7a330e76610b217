"""Which rank a record lands on changes nothing of what any record contributes; and what the checks
between ranks are there for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from distributed.world import flat, loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor

from quietgrad.clipping.engines import summing
from quietgrad.distributed import ranks, shares
from quietgrad.distributed.shares import share_of
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.sampling.users import UserIndices

pytestmark = pytest.mark.distributed

COUNT = 9


def sum_of(first: int, last: int, estimator: str, scale: float = 1.0) -> Tensor:
    """The sum of all ranks over some records, every one of them in the batch; no noise."""
    KeyedSource.normal = lambda self, like, *a, **k: torch.zeros_like(like)  # type: ignore[method-assign]
    records = records_of(COUNT)[first:last]
    records = [{"x": r["x"] * scale, "y": r["y"]} if i == 0 else r for i, r in enumerate(records)]
    plan = plan_of(
        len(records), estimator=estimator, sample_rate=1.0, expected_batch_size=None, steps=1
    )
    with plan.start() as run:
        for batch in run.loader(records, steps=1, physical_batch_size=1):
            return flat(run.backward(model_of(), loss, batch).gradients)
    raise AssertionError


def neighbours(rank: int, estimator: str) -> list[Tensor]:
    """Sums with all records, without the first (all others then change ranks), and of it alone."""
    return [
        sum_of(0, COUNT, estimator),
        sum_of(1, COUNT, estimator),
        sum_of(0, 1, estimator),
        sum_of(0, COUNT, estimator, scale=1e6),
    ]


@pytest.mark.parametrize("estimator", ["exact", "hutch"])
def test_one_record_more_changes_nothing_of_the_others_on_any_rank(
    estimator: str, tmp_path: Path
) -> None:
    for whole, without, alone, loud in on_ranks(2, tmp_path, neighbours, estimator):
        # Sums are whole multiples of a unit, so the difference is the record's own contribution.
        assert float((whole - without - alone).abs().max()) < 1e-10
        if estimator == "exact":
            assert float((whole - without).norm()) <= 1 + 1e-9
            assert float((loud - without).norm()) <= 1 + 1e-9
        assert float((loud - without).norm()) > 0.1


def counted_twice(rank: int) -> float:
    """Every rank clips the whole batch, and the checks of counts are off: a record counts twice."""
    own = ranks.Ranks.agree
    halved = lambda self, place, facts, n=0: own(self, place, facts, n) // 2  # noqa: E731
    ranks.Ranks.agree = halved  # type: ignore[method-assign]
    shares.share_of = lambda whole, *_: whole
    return float((sum_of(0, COUNT, "exact", 1e6) - sum_of(1, COUNT, "exact")).norm())


def test_without_the_check_of_counts_a_record_contributes_twice(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, counted_twice):
        assert isinstance(found, float) and found > 1.9


def sums_as_they_come(rank: int) -> Tensor:
    """Many records without units: the order of additions shows."""
    from quietgrad.plan import run

    run.summing_of = lambda norm, size, over: summing.Summing(over_ranks=over)
    return sum_of(0, COUNT, "exact")


def test_without_units_the_number_of_ranks_shows_in_the_last_bits(tmp_path: Path) -> None:
    found = [on_ranks(size, tmp_path / str(size), sums_as_they_come)[0] for size in (1, 2)]
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("block", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 6, 23])
def test_shares_hold_every_record_once(size: int, block: int, count: int) -> None:
    whole = np.arange(count) * 3
    parts = [share_of(whole, rank, size, block) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == whole.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= block
    # Cut into micro-batches by each rank, they are the micro-batches of the whole.
    cut = {
        tuple(part[i : i + block].tolist()) for part in parts for i in range(0, len(part), block)
    }
    assert cut == {tuple(whole[i : i + block].tolist()) for i in range(0, count, block)}
    users = UserIndices(np.arange(count), np.arange(2 * count), (2,) * count)
    of_users = [share_of(users, rank, size, block) for rank in range(size)]
    assert sorted(u for part in of_users for u in part.users.tolist()) == list(range(count))
    for part in of_users:
        assert part.records.tolist() == [r for u in part.users.tolist() for r in (2 * u, 2 * u + 1)]


def test_units_are_exact_in_any_order_and_far_below_the_noise() -> None:
    unit = summing.unit_of(1.0, 64)
    assert unit < 1e-12
    source = torch.Generator().manual_seed(0)
    values = [torch.randn(100, generator=source, dtype=torch.float64) for _ in range(50)]
    whole = [summing.settled(value.clone(), unit) for value in values]
    assert all(float((a - b).abs().max()) <= unit / 2 for a, b in zip(values, whole, strict=True))
    forwards, backwards = sum(whole), sum(reversed(whole))
    assert torch.equal(forwards, backwards)  # type: ignore[arg-type]
    assert not torch.equal(sum(values), sum(reversed(values)))  # type: ignore[arg-type]
    single = torch.randn(5)
    assert torch.equal(summing.settled(single.clone(), unit), single)


def moved_by_one_more(expected: int, entries: int) -> float:
    """How far, in norm and in units of C, the sum of records moves by a record of zero that comes
    first: the worst ones, whose sums two by two round up, and shifted by one round down.
    """
    how = summing.summing_of(1.0, expected)
    fractions = [0.25]
    for k in range(1, expected):
        fractions.append(((0.51 if k % 2 else 0.49) - fractions[-1]) % 1.0)
    records = torch.tensor(fractions, dtype=torch.float64) * summing.unit_of(1.0, expected)

    def summed(values: Tensor) -> float:
        total: dict[str, Tensor] = {"w": torch.zeros((), dtype=torch.float64)}
        like = torch.zeros(1, dtype=torch.float64).expand(entries)
        for pair in values.split(2):
            part = {"w": pair.sum()}
            if how.apart([like]):
                how.add(total, part)
            else:
                total["w"] += part["w"]
        return float(total["w"])

    first = torch.cat([torch.zeros(1, dtype=torch.float64), records])
    return abs(summed(first) - summed(records)) * float(np.sqrt(entries))


@pytest.mark.parametrize(("expected", "entries"), [(64, 10**9), (4096, 10**8), (16384, 10**6)])
def test_units_do_not_move_a_sum_beyond_the_slack_of_norms(expected: int, entries: int) -> None:
    assert moved_by_one_more(expected, entries) <= 2.0**-11


def test_units_are_there_at_usual_sizes() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    assert summing.summing_of(1.0, 64).apart([like.expand(10**9)])
    assert summing.summing_of(1.0, 4096).apart([like.expand(10**7)])
    assert not summing.summing_of(1.0, 65536).apart([like.expand(10**6)])
    assert not summing.summing_of(1.0, 64).apart([torch.zeros(3)])
