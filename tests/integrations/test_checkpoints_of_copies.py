"""A run's directory that is copied, and both go on: a checkpoint of one beside the ledger of the
other has seen releases that this ledger does not count.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.integrations.lightning.session import Session
from quietgrad.integrations.transformers.session import STATE, TrainerSession
from quietgrad.ledger import read_ledger

RECORDS = 12


def plan() -> Any:
    return PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=6).build(RECORDS)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def release(run: Any, count: int) -> None:
    x, y = torch.randn(RECORDS, 4), torch.arange(RECORDS) % 3
    model = nn.Linear(4, 3)
    for indices in run.batches(count):
        rows = torch.as_tensor(indices)
        run.backward(model, loss, (x[rows], y[rows]))


def with_transformers(folder: Path, resume: bool | str) -> Path:
    """Two releases more, and the checkpoint after them."""
    session = TrainerSession(plan(), str(folder))
    with session.open(resume):
        assert session.run is not None
        release(session.run, 2)
        made = folder / f"checkpoint-{session.run.released}"
        session.mark(made, session.run.released)
        (made / STATE).write_text("{}")
    return made


def with_lightning(folder: Path, mark: dict[str, Any] | None) -> dict[str, Any]:
    session = Session(plan(), str(folder))
    session.open(mark, None, "")
    assert session.run is not None
    release(session.run, 2)
    made = session.mark(session.run.released)
    session.run.close()
    session.close()
    return made


def test_of_transformers(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with_transformers(one, False)
    shutil.copytree(one, other)
    of_one, of_other = with_transformers(one, True), with_transformers(other, True)
    ledger = (other / "ledger.jsonl").read_bytes()
    with pytest.raises(ValueError, match="no whole checkpoint of the private run"):
        with_transformers(other, str(of_one))
    assert (other / "ledger.jsonl").read_bytes() == ledger
    shutil.rmtree(of_other)
    shutil.copytree(of_one, of_other)
    session = TrainerSession(plan(), str(other))
    with session.open(True) as found:  # the one before the copy was made
        assert found == str(other / "checkpoint-2")


def test_of_lightning(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    common = with_lightning(one, None)
    shutil.copytree(one, other)
    of_one, of_other = with_lightning(one, common), with_lightning(other, common)
    ledger = (other / "ledger.jsonl").read_bytes()
    with pytest.raises(ValueError, match="a copy of this run that went on by itself"):
        with_lightning(other, of_one)
    assert (other / "ledger.jsonl").read_bytes() == ledger
    assert with_lightning(other, of_other)["releases"] == 6


def test_a_mark_without_starts_is_one_of_an_earlier_version(tmp_path: Path) -> None:
    made = with_transformers(tmp_path, False)
    mark = json.loads((made / "quietgrad_release.json").read_text())
    assert mark.pop("starts") == [read_ledger(tmp_path).sessions[0].name]
    (made / "quietgrad_release.json").write_text(json.dumps(mark))
    assert with_transformers(tmp_path, str(made)).name == "checkpoint-4"


def test_starts_that_made_nothing_are_none(tmp_path: Path) -> None:
    with_transformers(tmp_path, False)
    for _ in range(2):
        with TrainerSession(plan(), str(tmp_path)).open(True):
            pass
    with_transformers(tmp_path, True)
    ledger = read_ledger(tmp_path)
    names = [start.name for start in ledger.sessions]
    assert len(names) == 4 and ledger.releases == 4
    assert ledger.makers(4) == (names[0], names[3])
    assert ledger.makers(2) == ledger.makers(1) == (names[0],) and ledger.makers(0) == ()
    assert pickle.loads(pickle.dumps(ledger)) == ledger  # what the first process tells the others
