"""Callbacks of Lightning's package under its older name, pruning, and what is watched in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning.callbacks as twins
import torch
from lightning.pytorch import callbacks
from lightning_modules import ADVICE, RATE, Small, loader, records, trainer
from torch.utils.data import DataLoader

pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]
CALLBACKS: list[tuple[Any, str]] = [
    (callbacks.ModelPruning("l1_unstructured", amount=0.5), "ModelPruning: .*once fit has ended"),
    (twins.BatchSizeFinder(), "BatchSizeFinder.*batch_size"),
    (twins.LearningRateFinder(), "LearningRateFinder.*public data"),
    (twins.StochasticWeightAveraging(0.1), "StochasticWeightAveraging.*EMAWeightAveraging"),
    (twins.GradientAccumulationScheduler({1: 2}), "expected_batch_size"),
    (twins.EarlyStopping("train_loss"), "EarlyStopping.*private"),
    (callbacks.EarlyStopping("train_loss", strict=False), "EarlyStopping.*private"),
]


def fitted(folder: Path, module: Small, **changes: Any) -> None:
    public = DataLoader(records(20, seed=1), batch_size=10)
    trainer(folder, **changes).fit(module, loader(8), public)


@pytest.mark.parametrize(("one", "said"), CALLBACKS, ids=lambda v: str(v)[:40])
def test_callbacks_are_refused_by_name(tmp_path: Path, one: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fitted(tmp_path, Small(), callbacks=[one])
    assert not (tmp_path / "ledger.jsonl").exists()


class AfterSteps(Small):
    """A rate that is looked at after every step."""

    def __init__(self, watched: str, frequency: int = 1, strict: bool = True) -> None:
        super().__init__()
        self.watched, self.frequency, self.strict = watched, frequency, strict

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        told = {"monitor": self.watched, "frequency": self.frequency, "strict": self.strict}
        return [optimizer], [{"scheduler": schedule, "interval": "step", **told}]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (AfterSteps("val_loss"), r"logged after 5 steps.*val_check_interval=1\)"),
        (AfterSteps("val_loss", 3), r"frequency=3.*logged after 5 steps"),
        (AfterSteps("epsilon"), 'at ends of epochs; set interval="epoch"'),
        (AfterSteps("private_training_loss"), 'at ends of epochs; set interval="epoch"'),
        (AfterSteps("train_loss", strict=False), "ReduceLROnPlateau.*private"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_is_logged_later_is_not_watched_step_by_step(
    tmp_path: Path, module: Small, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        fitted(tmp_path, module)
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("every", [1, 5])
def test_validations_as_often_as_they_are_watched(tmp_path: Path, every: int) -> None:
    module = AfterSteps("val_loss", every)
    fitted(tmp_path, module, val_check_interval=every)
    assert module.epsilon() == pytest.approx(3.0, abs=0.01)
