"""One rank fails, or ends, where the others wait for it: they end within seconds, with its number
and what it may say of its error. (They waited until the group's timeout.)
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.test_command import free_port
from distributed.world import SECONDS, loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor, nn

from quietgrad.distributed.groups import loops, news, waiting
from quietgrad.distributed.together import Together
from quietgrad.ledger import read_ledger
from quietgrad.noise.sources.keyed import KeyedSource

pytestmark = pytest.mark.distributed

SOON = SECONDS / 3
SECRET = "a name that is in a record"
Said = tuple[str, float]


def said(what: Callable[[], Any]) -> Said:
    """What it ended with, and after how many seconds."""
    began = time.monotonic()
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def impatient() -> None:
    loops.BETWEEN = waiting.BETWEEN = 0.1
    loops.PATIENCE = news.PATIENCE = 1.0


def alive(folder: str, what: Callable[[], Any], rank: int, size: int = 2) -> Said:
    """The process of the last rank lives on until the others have ended, or for long."""
    found, others = said(what), [Path(folder, f"ended{r}") for r in range(size - 1)]
    if rank < size - 1:
        others[rank].touch()
    until = time.monotonic() + SOON
    while not all(other.exists() for other in others) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def mixing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) - loss(model, batch).mean().detach()


def refused_check(rank: int, folder: str) -> Said:
    impatient()
    public = {name: torch.stack([r[name] for r in records_of(8)]) for name in ("x", "y")}

    def train() -> None:
        run, model = plan_of().start(), model_of()
        run.check(model, mixing if rank else loss, public)
        for batch in run.loader(records_of(), physical_batch_size=3):
            run.backward(model, loss, batch)

    return alive(folder, train, rank)


def test_what_a_check_refuses_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, refused_check, str(tmp_path))
    assert "depends on other examples" in second[0]
    assert "rank 1 stopped after an error of its own, which it has shown (Mixes: " in first[0]
    assert "depends on other examples" in first[0] and first[1] < SOON, first


def failing_release(rank: int, folder: str, size: int) -> Said:
    """The noise of the last rank cannot be drawn; its process lives on."""
    impatient()
    draw = KeyedSource.normal

    def no_memory(self: Any, like: Any, key: Any, step: int, *more: Any, **named: Any) -> Tensor:
        if rank == size - 1 and step == 1:
            raise MemoryError(SECRET)
        return draw(self, like, key, step, *more, **named)

    KeyedSource.normal = no_memory  # type: ignore[method-assign]

    def train() -> None:
        with plan_of().start(Path(folder, "ledger.jsonl")) as run:
            model = model_of()
            for batch in run.loader(records_of(), physical_batch_size=3):
                run.backward(model, loss, batch)

    return alive(folder, train, rank, size)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_fails_in_a_release_and_lives_on_stops_the_others(
    size: int, tmp_path: Path
) -> None:
    *others, last = on_ranks(size, tmp_path, failing_release, str(tmp_path), size)
    assert last[0] == f"MemoryError: {SECRET}"
    for told, seconds in others:
        assert "lost another rank" in told and seconds < SOON, others
        assert f"rank {size - 1} stopped after an error of its own" in told, others
        assert "(MemoryError)" in told and SECRET not in told
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 2  # with the one that broke off


def fewer_batches(rank: int) -> Said:
    """The loop of the second rank ends by itself before the first one's; then it waits."""
    impatient()

    def train() -> None:
        run, model = plan_of().start(), model_of()
        for indices in run.batches(4 - 2 * rank):
            rows = [records_of()[int(i)] for i in indices]
            names = ("x", "y")
            batch = {n: torch.stack([row[n] for row in rows]) for n in names} if rows else None
            batch = batch or {n: t[None][:0] for n, t in records_of(1)[0].items()}
            run.backward(model, loss, batch)
        if rank:
            dist.barrier()  # evaluates, say

    return said(train)


def test_a_rank_whose_loop_ends_before_the_others_is_named(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, fewer_batches)
    assert "rank 1 left its loop over the run's batches after release 2" in first[0], first
    assert first[1] < SOON and second[1] < SOON


def between_two_meetings(rank: int, folder: str) -> list[Said]:
    """As in a command or a trainer, which the second rank's process outlives."""
    impatient()
    together = Together(rank, 2)

    @news.telling
    def work() -> None:
        if rank:
            raise KeyError(SECRET)

    def meet() -> None:
        work()
        together.of_first(None)

    found = [alive(folder, meet, rank)]
    # The others meet again, once all have begun anew.
    anew = Together(rank, 2)
    return [*found, said(lambda: anew.all_of(lambda: None, "nothing"))]


def test_who_fails_between_two_meetings_is_not_waited_for(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, between_two_meetings, str(tmp_path))
    assert SECRET in second[0][0]
    assert "rank 1 failed (KeyError), and this rank would wait for it" in first[0][0], first
    assert first[0][1] < SOON
    assert first[1][0] == second[1][0] == ""


SCRIPT = """
import sys
import torch, torch.distributed as dist
from quietgrad.plan import PrivacyConfig

dist.init_process_group("gloo")
plan = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=10, steps=4).build(40)
if {before} and dist.get_rank():
    raise KeyError({secret!r})
with plan.start() as run:
    if dist.get_rank():
        raise KeyError({secret!r})
    dist.barrier()
"""


@pytest.mark.parametrize("before", [True, False], ids=["before the run", "in the run"])
def test_a_script_that_ends_is_named_at_once(before: bool, tmp_path: Path) -> None:
    """In the run, the first rank waits for it in an operation of torch's own."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(secret=SECRET, before=before))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | place | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first, second = (process.communicate(timeout=2 * SOON)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert SECRET in second and SECRET not in first
    assert time.monotonic() - began < 2 * SOON
    if before:
        assert "rank 1 ended (KeyError), and this rank would wait for it" in first, first
    else:
        assert "losed by peer" in first or "reset by peer" in first, first
        if sys.version_info >= (3, 11):  # notes
            assert (
                "rank 1 stopped after an error of its own, which it has shown (KeyError)" in first
            )


def started_alone(rank: int, folder: str) -> str:
    """What the first rank says while it alone starts the run, and the other comes late."""
    impatient()
    waiting.IN_SILENCE = 0.3
    if rank:
        time.sleep(2.0)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        plan_of().start().close()
    return told.getvalue()


def test_a_rank_that_waits_for_long_says_for_whom(tmp_path: Path) -> None:
    """`if rank == 0:` before ``plan.start`` was half an hour without a word."""
    first, second = on_ranks(2, tmp_path, started_alone, str(tmp_path))
    assert "rank 0 has waited" in first and "for rank 1" in first and "plan.start" in first
    assert first.count("\n") == 1 and second == ""
