"""PrivateTrainer, PrivateLightningModule and the loop of docs/loops.md make the same clipped sums,
the same noise and the same weights, to the bit: in micro-batches, read by workers, under bfloat16
autocast, with dropout, and with a stop in the middle of an epoch, all at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning_modules
import private_trainers
import pytest
import torch
import torch.nn.functional as F
from lightning_modules import ADVICE
from private_trainers import arguments
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_scheduler

from quietgrad import PrivacyConfig
from quietgrad.integrations.lightning import PrivateLightningModule
from quietgrad.integrations.transformers import PrivateTrainer
from quietgrad.ledger import read_ledger
from quietgrad.noise import BandedNoise
from quietgrad.plan import PrivateRun

pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]

RATE, STEPS, PHYSICAL, STOP = 1e-2, 10, 3, 3
PRIVACY = PrivacyConfig(
    target_epsilon=3.0, expected_batch_size=20, epochs=2, seed=1, data_are_public=True
)
CORRELATED = replace(PRIVACY, noise=BandedNoise(bands=3))


def records() -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(6, generator=draws), "labels": i % 2} for i in range(100)]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
    )


class Named(nn.Module):
    """Its parameters have the names that they have in the Lightning module: noise goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.net(x)


def per_example_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["labels"], reduction="none")


def in_bfloat16(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return per_example_loss(model, batch)


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    return optimizer, get_scheduler("linear", optimizer, 0, STEPS)


def plain_loop(folder: Path, privacy: PrivacyConfig, until: int) -> nn.Module:
    model = Named()
    parts = [model, *optimizers(model)]
    saved = folder / "saved.pt"
    if saved.exists():
        for part, state in zip(parts, torch.load(saved), strict=True):
            part.load_state_dict(state)
    _, optimizer, schedule = parts
    plan = privacy.build(100)
    folder.mkdir(exist_ok=True)
    with plan.start(folder / "ledger.jsonl", keys=folder / "secrets.json") as run:
        loader = run.loader(records(), physical_batch_size=PHYSICAL, num_workers=1)
        for batch in (batch for _ in run.epochs() for batch in loader):
            run.backward(model, in_bfloat16, batch)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if run.released == until:
                run.keep_noise()
                break
    torch.save([part.state_dict() for part in parts], saved)
    return model


def hugging_face(folder: Path, privacy: PrivacyConfig, until: int) -> nn.Module:
    again = folder.exists()
    args = arguments(
        folder,
        per_device_train_batch_size=PHYSICAL,
        dataloader_num_workers=1,
        bf16=True,
        save_strategy="steps",
        save_steps=STOP,
        learning_rate=RATE,
    )
    trainer = PrivateTrainer(
        Named(),
        args,
        train_dataset=records(),
        privacy=privacy,
        per_example_loss=per_example_loss,
        callbacks=[private_trainers.StopAt(until)] if until < STEPS else [],
    )
    trainer.train(resume_from_checkpoint=again)
    return trainer.model


class Module(PrivateLightningModule):
    def __init__(self, privacy: PrivacyConfig) -> None:
        super().__init__(privacy=privacy)
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def per_example_loss(self, batch: Any) -> Tensor:
        return per_example_loss(self, batch)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizers(self)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def in_lightning(folder: Path, privacy: PrivacyConfig, until: int) -> nn.Module:
    last = folder / "kept" / "last.ckpt"
    options = lightning_modules.saving(folder) | {"limit_val_batches": 0}
    if until < STEPS:
        options["callbacks"].insert(0, lightning_modules.StopAt(until))
    module = Module(privacy)
    lightning_modules.trainer(folder, precision="bf16-mixed", **options).fit(
        module,
        DataLoader(records(), batch_size=PHYSICAL, num_workers=1, shuffle=True),
        ckpt_path=str(last) if last.exists() else None,
    )
    return module


Released = list[dict[str, Tensor]]
Door = Callable[[Path, PrivacyConfig, int], nn.Module]


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(clipped sums, noisy sums) of every release that is made inside."""
    release, found = PrivateRun._release, ([], [])

    def noted(run: PrivateRun, clipped: Any) -> Any:
        found[0].append({name: g.clone() for name, g in clipped.gradients.items()})
        noisy = release(run, clipped)
        found[1].append({name: g.clone() for name, g in noisy.gradients.items()})
        return noisy

    with monkeypatch.context() as patch:
        patch.setattr(PrivateRun, "_release", noted)
        yield found


def made_by(
    door: Door, folder: Path, privacy: PrivacyConfig, stop: bool, monkeypatch: Any
) -> tuple[Released, Released, Released]:
    """Clipped sums, noisy sums and the weights at the end."""
    with watched(monkeypatch) as (clipped, noisy):
        for until in (STOP, STEPS) if stop else (STEPS,):
            model = door(folder, privacy, until)
            assert len(clipped) == until == read_ledger(folder / "ledger.jsonl").releases
    return clipped, noisy, [{name: p.detach() for name, p in model.named_parameters()}]


@pytest.mark.parametrize("privacy", [PRIVACY, CORRELATED], ids=["independent", "correlated"])
def test_doors_release_the_same(
    tmp_path: Path, privacy: PrivacyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made_by(plain_loop, tmp_path / "whole", privacy, False, monkeypatch)
    for door in (plain_loop, hugging_face, in_lightning):
        made = made_by(door, tmp_path / door.__name__, privacy, True, monkeypatch)
        for ours, theirs in zip(made, whole, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[name], other[name]) for name in one), door.__name__
