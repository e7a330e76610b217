"""A ledger under which nothing was released goes, and no other: between the look and the removal
somebody else may open it and release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.ledger import removing
from quietgrad.ledger.reader import scan
from quietgrad.training.files.noise_state import remove_unreleased
from quietgrad.training.files.run_dir import RunDir

PLAN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=5, steps=3).build(20)


def loss(model: Any, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch[:, :1], reduction="none").sum(dim=1)


def releases(run: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(20, 3)
    run.backward(model, loss, x[next(iter(run.batches()))])


def begun(folder: Path) -> RunDir:
    """A run that ended before its first release."""
    files = RunDir(folder)
    PLAN.start(files.ledger, files.secrets).close()
    return files


def test_a_run_without_a_release_leaves_nothing(tmp_path: Path) -> None:
    files = begun(tmp_path)
    remove_unreleased(files)
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_with_a_release_stays(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    with PLAN.start(files.ledger) as run:
        releases(run)
    remove_unreleased(files)
    assert scan(files.ledger).contents.releases == 1


def test_a_ledger_that_another_run_has_opened_stays(tmp_path: Path) -> None:
    # Before: it was removed under the run that went on with it; where that had looked at its path
    # already, what it released next was counted in a file that nobody would find again.
    files = begun(tmp_path)
    with PLAN.start(files.ledger, files.secrets) as run:
        remove_unreleased(files)
        assert files.ledger.exists()
        releases(run)
    assert scan(files.ledger).contents.releases == 1


def test_nobody_opens_a_ledger_between_the_look_and_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = begun(tmp_path)

    def looking(path: Path) -> Any:
        found = scan(path)
        with pytest.raises(ValueError, match="is in use"):
            PLAN.start(files.ledger, files.secrets)
        return found

    monkeypatch.setattr(removing, "scan", looking)
    remove_unreleased(files)
    assert not files.ledger.exists()
    with PLAN.start(files.ledger) as run:  # a new one
        releases(run)


def test_a_start_that_opened_it_before_finds_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no lock, so it has the file open and looks at its name under the lock."""
    files = begun(tmp_path)
    real = removing.lock

    def lock_after_removal(*given: Any) -> None:
        remove_unreleased(files)
        real(*given)

    monkeypatch.setattr("quietgrad.ledger.writer.lock", lock_after_removal)
    with pytest.raises((ValueError, RuntimeError), match="is gone"):
        PLAN.start(files.ledger)


def test_without_its_lock_a_release_would_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = begun(tmp_path)
    monkeypatch.setattr(removing, "lock", lambda *_: None)
    run = PLAN.start(files.ledger)
    remove_unreleased(files)
    assert not files.ledger.exists()  # under the run that has it open
    run.close()
