"""Workers that stay between passes, and that the system kills: a run goes on with new ones."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.ledger import read_ledger

STEPS = 6
# So that two runs are the same, number for number, where the same records are drawn once each.
PLAN = PrivacyConfig(
    noise_multiplier=1.0, expected_batch_size=20, steps=STEPS, seed=1, data_are_public=True
)


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def kill_one_of(loader: Any) -> None:
    """As for want of memory. DataLoader raises in the process's own thread, wherever it is."""
    worker = loader._reader._iterator._workers[0]
    with pytest.raises(RuntimeError, match="killed by signal"):
        os.kill(worker.pid, signal.SIGKILL)
        for _ in range(200):  # which the signal of its end breaks off
            time.sleep(0.05)


def trained(ledger: Path, killing: str = "", workers: int = 2) -> Tensor:
    """The weights after all releases, of a loop that goes on where workers died."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=draws)
    data = list(zip(x, (x[:, 0] > 0).long(), strict=True))
    torch.manual_seed(7)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stays = {"num_workers": workers, "persistent_workers": workers > 0}
    with PLAN.build(len(data)).start(ledger) as run:
        loader = run.loader(data, physical_batch_size=4, **stays)
        for epoch in run.epochs():
            for batch in loader:
                if killing == "within" and run.released == 4:
                    killing = ""
                    parts = iter(batch)
                    run.clip(model, loss, next(parts))  # a part of the batch, and then no more
                    kill_one_of(loader)
                    break
                run.backward(model, loss, batch)
                optimizer.step()
            if killing == "between" and epoch == 0:
                kill_one_of(loader)
        assert run.released == STEPS
    return model.weight.detach().clone()


@pytest.mark.parametrize("killing", ["between", "within"])
def test_a_run_goes_on_where_the_system_killed_a_worker(killing: str, tmp_path: Path) -> None:
    """Before: every later pass over the loader raised: "exited unexpectedly"."""
    undisturbed = trained(tmp_path / "one.jsonl", workers=0)
    assert torch.equal(trained(tmp_path / "two.jsonl", killing), undisturbed)
    assert read_ledger(tmp_path / "two.jsonl").releases == STEPS


def test_without_new_workers_no_later_pass_reads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietgrad.loading.loader.let_go_of_dead_workers", lambda _: None)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        trained(tmp_path / "one.jsonl", "between")
