"""Runs that a notebook loses: a cell that runs twice, a run that is deleted, a cell that ends with
an error in the middle of a step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.accounting import epsilon
from quietgrad.ledger import read_ledger
from quietgrad.plan import PrivateRun

PLAN = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.2, steps=8).build(40)
RECORDS = [torch.full((3,), float(i)) for i in range(40)]
pytestmark = pytest.mark.usefixtures("examined_once")


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch)[:, 0]


def cell(run: PrivateRun, model: nn.Module, fails: bool = False) -> None:
    """Two steps, as a cell has them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in run.loader(RECORDS, steps=2):
        run.backward(model, loss, batch)
        if fails:
            raise KeyError("a name of the cell's own")
        optimizer.step()
        optimizer.zero_grad()


def test_a_cell_that_runs_twice_is_told_to_close_its_run(tmp_path: Path) -> None:
    """Before: "use another run directory", whose epsilon the careless would have read alone."""
    run = PLAN.start(tmp_path / "ledger.jsonl")
    cell(run, nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"run\.close\(\).*another ledger.*epsilon adds"):
        PLAN.start(tmp_path / "ledger.jsonl")
    cell(run, nn.Linear(3, 1))  # the run of before goes on
    run.close()
    assert read_ledger(tmp_path).releases == 4


def test_a_run_that_was_deleted_keeps_nobody_out(tmp_path: Path) -> None:
    """Before: its lock stayed as long as the process, and nothing could close it."""
    model = nn.Linear(3, 1)

    def lost(begun: int) -> None:
        run = PLAN.start(tmp_path / "ledger.jsonl")
        assert run.released == begun
        cell(run, model)

    for begun in (0, 2, 4):
        lost(begun)
    assert read_ledger(tmp_path).releases == 6


def test_a_cell_that_ended_within_a_step_has_counted_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    run = PLAN.start(tmp_path / "ledger.jsonl")
    with pytest.raises(KeyError):
        cell(run, model, fails=True)
    assert read_ledger(tmp_path).releases == 1
    cell(run, model)  # the cell again
    run.close()
    found = read_ledger(tmp_path)
    assert found.releases == run.released == 3 and found.event is not None
    assert run.epsilon() == pytest.approx(epsilon(found.event, PLAN.delta))


def test_a_copy_of_a_run_in_a_fork_takes_no_file_of_its_process(tmp_path: Path) -> None:
    run = PLAN.start(tmp_path / "ledger.jsonl")
    child = os.fork()
    if not child:
        del run
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ValueError, match="in use"):
        PLAN.start(tmp_path / "ledger.jsonl")
    cell(run, nn.Linear(3, 1))
    run.close()
