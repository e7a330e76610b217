"""A small LightningModule with private steps, records for it, and the loop of docs/loops.md that it
has to be equal to.
"""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad import PrivacyConfig
from quietgrad.integrations.lightning import PrivateLightningModule

# What Lightning says of tests that are small, or go on, on purpose.
ADVICE = [
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
    ),  # more workers, a validation set
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
RATE = 1e-2
STEPS = 10  # two epochs of five
PRIVACY = PrivacyConfig(
    target_epsilon=3.0, expected_batch_size=20, epochs=2, seed=1, data_are_public=True
)


def records(n: int = 100, seed: int = 0) -> TensorDataset:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=draws)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Small(PrivateLightningModule):
    """The same weights at every call; dropout, AdamW, a rate that falls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"privacy": PRIVACY} | options))
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def per_example_loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).float(), y, reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer(folder: Path, **changes: Any) -> lightning.Trainer:
    """Small and quiet."""
    settings: dict[str, Any] = {
        "default_root_dir": str(folder),
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**(settings | changes))


def saving(folder: Path, every: int = 1) -> dict[str, Any]:
    """A checkpoint after every so many steps, the newest one as last.ckpt."""
    kept = ModelCheckpoint(folder / "kept", every_n_train_steps=every, save_last=True, save_top_k=1)
    return {"callbacks": [kept], "enable_checkpointing": True}


class StopAt(Callback):
    """Ends training after a step, in good order or as a crash would."""

    def __init__(self, step: int, crash: bool = False) -> None:
        self.step, self.crash = step, crash

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            if self.crash:
                raise InterruptedError
            trainer.should_stop = True


def loader(physical: int, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(records(), batch_size=physical, num_workers=workers, shuffle=True)


@cache
def plain_loop(physical: int = 8, workers: int = 0, bf16: bool = False) -> nn.Module:
    """The first loop of docs/loops.md, with generators keyed for dropout: seeded, so the same for
    every test.
    """
    model, data = Small(), records()
    plan = PRIVACY.build(len(data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)

    def per_example_loss(model: Any, batch: Any) -> Tensor:
        narrow = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()
        with narrow:
            return model.per_example_loss(batch)

    with plan.start() as run:
        batches = run.loader(data, physical_batch_size=physical, num_workers=workers)
        for _ in run.epochs():
            for batch in batches:
                run.backward(model, per_example_loss, batch)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return model


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    ones, others = one.state_dict(), other.state_dict()
    return ones.keys() == others.keys() and all(torch.equal(ones[k], others[k]) for k in ones)
