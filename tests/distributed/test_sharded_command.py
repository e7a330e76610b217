"""``quietgrad train`` with ``training.sharded``: every process holds a shard of the model, and what
it saves is whole.
"""

from __future__ import annotations

import multiprocessing
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_command import STEPS, command, on_processes, run_command, table

from quietgrad.distributed import ranks
from quietgrad.ledger import read_ledger
from quietgrad.training.tasks import task

pytestmark = pytest.mark.distributed


def ended(told: list[str]) -> bool:
    return all("left with 0" in one for one in told)


def saved(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", weights_only=True)
    return state


def flat(state: dict[str, Any]) -> torch.Tensor:
    """Weights, moments and averages of a checkpoint."""
    moments = [
        value
        for held in state["optimizer"]["state"].values()
        for value in held.values()
        if isinstance(value, torch.Tensor)
    ]
    parts = [*state["trainable"].values(), *moments, *state["average"]["averages"].values()]
    return torch.cat([part.reshape(-1).double() for part in parts])


def test_shards_stop_and_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    (tmp_path / "alone").mkdir()
    table(tmp_path / "alone" / "people.csv")
    assert ended(on_processes(tmp_path / "alone", 1))
    first, second = on_processes(tmp_path, 2, stop_at=2, training__sharded=True)
    assert "stopped after step 2" in first and "step" not in second, (first, second)
    run = tmp_path / "run"
    assert read_ledger(run / "ledger.jsonl").releases == 2
    told = on_processes(tmp_path, 3, "--resume", training__sharded=True)
    assert ended(told), told
    assert read_ledger(run / "ledger.jsonl").releases == STEPS
    # The seed is public: the same batches and noise, and sums that differ by rounding.
    torch.testing.assert_close(
        flat(saved(run)), flat(saved(tmp_path / "alone" / "run")), rtol=0, atol=1e-4
    )


def failing_alone(rank: int, port: int, words: list[str]) -> None:
    """The second process's loss fails in the middle of a pass, which the first then waits in."""
    ranks.PATIENCE = timedelta(seconds=1)
    own, ledger = task.classification_loss, Path(words[-1]).parent / "run" / "ledger.jsonl"

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if rank == 1 and ledger.exists() and read_ledger(ledger).releases:
            raise RuntimeError("a card fell out")
        return own(model, batch)

    task.classification_loss = loss
    run_command(rank, 2, port, words, None)


def test_a_process_that_fails_alone_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The interpreter would wait, at its end, for what it was about to tell the others."""
    table(tmp_path / "people.csv")
    words = [*command(tmp_path, training__sharded=True), "--log", str(tmp_path / "log")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forking = multiprocessing.get_context("fork")
    both = [forking.Process(target=failing_alone, args=(i, port, words)) for i in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(120)
    assert [one.exitcode for one in both] == [1, 1]
    assert "a card fell out" in (tmp_path / "log.1").read_text()
    # The second release was not made; the first one stands.
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").releases == 1
