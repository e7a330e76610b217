"""A private training loss and an adaptive clipping norm through the Trainers: the same weights as
in a loop of one's own, and logs that say "private".
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning_modules
import private_trainers
import pytest
import torch
from lightning.pytorch import Callback
from lightning_modules import ADVICE

from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.ledger import read_ledger

pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]
LOGGED = {"private_training_loss", "private_training_loss_noise_std", "clipping_norm"}


def with_both(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration that the module's loop and trainer use."""
    both = replace(
        module.PRIVACY, training_loss=TrainingLoss(high=2.0), adaptive_clipping=AdaptiveClipping()
    )
    monkeypatch.setattr(module, "PRIVACY", both)


def test_the_trainer_logs_what_was_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_both(private_trainers, monkeypatch)
    trained = private_trainers.trainer(tmp_path, logging_steps=1)
    trained.train()
    lines = [line for line in trained.state.log_history if "learning_rate" in line]
    assert len(lines) == private_trainers.STEPS
    assert all(line.keys() >= LOGGED and "loss" not in line for line in lines)
    assert len({line["clipping_norm"] for line in lines}) == private_trainers.STEPS
    again = private_trainers.plain_loop(private_trainers.classifier())
    ones, others = trained.model.state_dict(), again.state_dict()
    assert all(torch.equal(ones[name], others[name]) for name in others)
    contents = read_ledger(tmp_path)
    assert contents.max_grad_norm == lines[-1]["clipping_norm"]
    trained.save_model(str(tmp_path / "model"))
    saved = json.loads((tmp_path / "model" / "quietgrad.json").read_text())
    assert "records-below-the-clipping-norm" in json.dumps(saved)


def test_lightning_logs_what_was_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Callback):
        seen: list[set[str]]

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen = [*getattr(self, "seen", []), set(trainer.callback_metrics)]

    with_both(lightning_modules, monkeypatch)
    told = Told()
    model = lightning_modules.Small(privacy=lightning_modules.PRIVACY)
    fit = lightning_modules.trainer(tmp_path, callbacks=[told])
    fit.fit(model, lightning_modules.loader(8))
    assert len(told.seen) == 2 and all(seen >= LOGGED | {"epsilon"} for seen in told.seen)
    assert "loss" not in fit.callback_metrics and "train_loss" not in fit.callback_metrics
    again = lightning_modules.Small(privacy=lightning_modules.PRIVACY)
    monkeypatch.setattr(lightning_modules, "Small", lambda: again)
    assert lightning_modules.same_weights(model, lightning_modules.plain_loop.__wrapped__())
