"""The guard's looks at a sharded model are made by all ranks together, whatever one rank's loss
keeps or reaches: none makes a pass that another does not, and each rank's own batch is looked for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.sharding import sharded
from distributed.world import loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor, nn

pytestmark = pytest.mark.distributed

COUNT = 6
Records = dict[str, Tensor]


def stacked(count: int) -> Records:
    records = records_of(count)
    return {name: torch.stack([r[name] for r in records]) for name in ("x", "y")}


def logging_on_the_first(rank: int) -> int:
    """A log of losses on one rank, as training scripts keep it."""
    log: list[float] = []

    def logged(model: nn.Module, batch: Records) -> Tensor:
        found = loss(model, batch)
        if dist.get_rank() == 0:
            log.append(float(found.detach().sum()))
        return found

    model = sharded(model_of())
    with plan_of().start() as run:
        for batch in run.loader(records_of(), steps=3, physical_batch_size=4):
            run.backward(model, logged, batch)
    return len(log)


def test_a_log_on_one_rank_keeps_no_rank_waiting(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, logging_on_the_first)
    assert isinstance(first, int) and first > 0, first
    assert second == 0


def reading_the_batch(rank: int, public: bool, reads: int | None) -> int:
    """Releases that are made with a loss that holds on to the batch; ``reads``: on which rank."""
    held = {"x": torch.ones(2)}

    def closed(model: nn.Module, batch: Records) -> Tensor:
        level = held["x"].mean()
        own = loss(model, batch)
        return own * (1 + level.detach().square()) if reads in (None, rank) else own

    model = sharded(model_of())
    plan = plan_of(COUNT, sample_rate=1.0, expected_batch_size=None, steps=4)
    with plan.start() as run:
        if public:
            run.check(model, closed, stacked(8))
        for indices in run.batches():
            held["x"] = (batch := {n: t[indices] for n, t in stacked(COUNT).items()})["x"]
            run.backward(model, closed, batch)
        return run.released


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("reads", [None, 0, 1])
def test_a_loss_that_reads_a_rank_s_own_batch_is_refused(
    tmp_path: Path, public: bool, reads: int | None
) -> None:
    for found in on_ranks(2, tmp_path, reading_the_batch, public, reads):
        assert "it reads the batch itself" in str(found), found


def test_a_loss_that_holds_the_batch_and_does_not_read_it_goes_on(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, reading_the_batch, False, 7) == [4, 4]


def checked(rank: int, ranks: tuple[int, ...]) -> int:
    """Public records that are others on each rank; ``ranks``: which of them look at some."""
    model = sharded(model_of())
    with plan_of(COUNT, sample_rate=1.0, expected_batch_size=None, steps=2).start() as run:
        if rank in ranks:
            run.check(model, loss, stacked(8 - 4 * rank))
        for batch in run.loader(records_of(COUNT), steps=2, physical_batch_size=2):
            run.backward(model, loss, batch)
        return run.released


def test_public_records_are_the_first_rank_s_on_all(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, checked, (0, 1)) == [2, 2]


def test_public_records_that_one_rank_looks_at_are_refused(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, checked, (0,)):
        assert "at different places" in str(found), found
