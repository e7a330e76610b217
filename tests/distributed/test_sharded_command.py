"""``quietgrad train`` with ``training.sharded``: every process holds a shard of the model, and what
it saves is whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_command import STEPS, on_processes, table

from quietgrad.ledger import read_ledger

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


def test_shards_stop_and_go_on_with_other_numbers_of_processes(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    (tmp_path / "alone").mkdir()
    table(tmp_path / "alone" / "people.csv")
    assert ended(on_processes(tmp_path / "alone", 1))
    first, second = on_processes(tmp_path, 2, stop_at=2, training__sharded=True)
    assert "stopped after step 2" in first and "step" not in second, (first, second)
    run = tmp_path / "run"
    assert read_ledger(run / "ledger.jsonl").releases == 2
    first, _, _ = on_processes(tmp_path, 3, "--resume", stop_at=4, training__sharded=True)
    assert "stopped after step 4" in first, first
    told = on_processes(tmp_path, 2, "--resume")  # replicas of what shards have left
    assert ended(told), told
    assert read_ledger(run / "ledger.jsonl").releases == STEPS
    # The seed is public: the same batches and noise, and sums that differ by rounding.
    torch.testing.assert_close(
        flat(saved(run)), flat(saved(tmp_path / "alone" / "run")), rtol=0, atol=1e-4
    )
