"""A rank that leaves its loop, or the run, where the others go on: they end within seconds, with a
line that names the rank and what to do. (They waited for it until the group's timeout.)
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.sharding import language, next_words, sharded, texts
from distributed.world import RECORDS, loss, model_of, on_ranks, plan_of, records_of

from quietgrad.distributed.groups import loops

pytestmark = pytest.mark.distributed

SOON = 30.0  # seconds, half of the group's timeout in these tests


def leaving(rank: int, how: str, shards: bool) -> tuple[str, float]:
    """The second rank leaves after two of four releases; what it says where it ended, and when."""
    loops.BETWEEN, loops.PATIENCE = 0.1, 1.0
    model: Any = sharded(language()) if shards else model_of()
    data, of = (texts(RECORDS), next_words) if shards else (records_of(), loss)
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            run = plan_of().start()
            if how == "run":
                stack.enter_context(run)
            for batch in run.loader(data, steps=4, physical_batch_size=3):
                run.backward(model, of, batch)
                began = time.monotonic()
                if run.released == 2 and rank == 1:
                    break
            if how == "loop" and rank == 1:
                dist.barrier()  # evaluates alone, say, and waits then
        if rank == 1:
            dist.barrier()
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return f"after {run.released}", time.monotonic() - began


@pytest.mark.parametrize("shards", [False, True], ids=["replicas", "shards"])
@pytest.mark.parametrize("how", ["loop", "run"])
def test_who_leaves_alone_is_named_within_seconds(how: str, shards: bool, tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, leaving, how, shards)
    said = "left its loop over" if how == "loop" else "closed the run after"
    assert said in first[0] and "rank 1 " in first[0], first
    assert "release 2" in first[0] and "all_reduce of a flag" in first[0]
    assert first[1] < SOON and second[1] < SOON, (first, second)


def alike(rank: int) -> int:
    """All leave together, wait for one of them, and go on in another loop."""
    loops.BETWEEN, loops.PATIENCE = 0.05, 0.1
    model = model_of()
    with plan_of().start() as run:
        for until in (1, 3):
            for batch in run.loader(records_of(), steps=4, physical_batch_size=3):
                run.backward(model, loss, batch)
                if run.released == until:
                    break
            if rank == 1:
                time.sleep(1.0)
    return run.released


def test_ranks_that_leave_alike_wait_for_each_other(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, alike) == [3, 3]


def other_loops(rank: int) -> int:
    """One rank begins a loop for every release; the other keeps one."""
    loops.BETWEEN, loops.PATIENCE = 0.05, 0.1
    model = model_of()
    with plan_of().start() as run:
        loader = run.loader(records_of(), steps=4, physical_batch_size=3)
        while run.released < 4:
            for batch in loader:
                run.backward(model, loss, batch)
                if rank == 1:
                    break
    return run.released


def test_a_rank_that_begins_another_loop_is_not_gone(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, other_loops) == [4, 4]
