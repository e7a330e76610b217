"""A run whose model or loss is refused at its first batch has released nothing, and leaves nothing
that would keep the mended script out of its directory.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning_modules
import private_trainers
import pytest
import torch
from lightning_modules import ADVICE, Small
from processes import on_processes
from torch import Tensor, nn

from quietgrad.ledger import read_ledger

pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]

OWN = replace(private_trainers.PRIVACY, seed=None, data_are_public=False)
OTHER = replace(OWN, target_epsilon=2.0)  # who mends a script may change more than the model


def meaned(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return private_trainers.bert_loss(model, batch).mean()


class Meaned(Small):
    def per_example_loss(self, batch: Any) -> Tensor:
        return super().per_example_loss(batch).mean()


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def by_trainer(folder: Path, wrong: bool, privacy: Any, **options: Any) -> None:
    loss = {"per_example_loss": meaned} if wrong else {}
    private_trainers.trainer(folder, privacy=privacy, **loss, **options).train()


def by_lightning(folder: Path, wrong: bool, privacy: Any, **options: Any) -> None:
    module = (Meaned if wrong else Small)(privacy=privacy)
    lightning_modules.trainer(folder, **options).fit(module, lightning_modules.records())


@pytest.mark.parametrize("fit", [by_trainer, by_lightning])
def test_a_refused_model_leaves_its_directory_to_the_mended_one(tmp_path: Path, fit: Any) -> None:
    """Before: a ledger without a release stayed, and kept the mended script out."""
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="one loss per example"):
        fit(folder, True, OWN)
    assert files_in(folder) <= {".lock"}
    fit(folder, False, OTHER)
    assert read_ledger(folder / "ledger.jsonl").releases == 10


@pytest.mark.parametrize(
    ("fit", "stop", "raised"),
    [
        (by_trainer, private_trainers.StopAt(1, crash=True), KeyboardInterrupt),
        (by_lightning, lightning_modules.StopAt(1, crash=True), InterruptedError),
    ],
)
def test_a_run_that_released_once_keeps_its_directory(
    tmp_path: Path, fit: Any, stop: Any, raised: type[BaseException]
) -> None:
    with pytest.raises(raised):
        fit(tmp_path, False, OWN, callbacks=[stop])
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 1
    with pytest.raises(ValueError, match="holds a private run already"):
        fit(tmp_path, False, OWN)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 1


def refused_and_mended(folder: str) -> str:
    with pytest.raises(ValueError, match="one loss per example"):
        by_trainer(Path(folder), True, OWN)
    left = sorted(files_in(Path(folder)))
    by_trainer(Path(folder), False, OTHER)
    return str(left)


@pytest.mark.distributed
def test_on_two_processes_the_first_leaves_nothing_either(tmp_path: Path) -> None:
    first, other = on_processes(2, tmp_path / "work", refused_and_mended, str(tmp_path / "run"))
    assert "ledger" not in first and "secrets" not in first, first
    assert "Error" not in other, other
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").releases == 10


SHARDS = {"fsdp": True, "fsdp_config": {"fsdp_version": 2}}


def meaned_by_one(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same code on both ranks: another function would be refused as such."""
    found = private_trainers.bert_loss(model, batch)
    return found.mean() if os.environ["RANK"] == "1" else found


def looked_at_by_one(folder: str) -> None:
    """Rank 1 alone has a loss that is refused, and stays: its process does not end."""
    rank, place = int(os.environ["RANK"]), Path(folder)
    began = time.monotonic()
    found = "trained"
    try:
        public = private_trainers.records(16, 1)
        private_trainers.trainer(
            place,
            privacy=OWN,
            per_example_loss=meaned_by_one,
            ddp_timeout=60,
            eval_dataset=public,
            **SHARDS,
        ).train()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    torch.save(f"{took:.0f} s, {found}", place.parent / "work" / f"found{rank}.pt")
    other = place.parent / "work" / f"found{1 - rank}.pt"
    while not other.exists() and time.monotonic() < began + 90:
        time.sleep(0.1)
    os._exit(0)  # groups whose connections were closed meet nobody any more


@pytest.mark.distributed
def test_a_look_that_one_rank_of_shards_refuses_alone_stops_the_other(tmp_path: Path) -> None:
    """In a pass of the look, before anything is released: the directory is free again."""
    output = tmp_path / "run"
    first, second = on_processes(2, tmp_path / "work", looked_at_by_one, str(output))
    assert "one loss per example" in second, (first, second)
    assert "rank 0 lost another rank" in first and "gloo" not in first, first
    assert all(int(told.split()[0]) < 40 for told in (first, second)), (first, second)
    assert files_in(output) <= {".lock"}
