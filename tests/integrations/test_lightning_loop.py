"""A private LightningModule is the loop of docs/loops.md: the same weights to the bit, also after a
stop.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning_modules import (
    ADVICE,
    PRIVACY,
    RATE,
    STEPS,
    Small,
    StopAt,
    loader,
    plain_loop,
    records,
    same_weights,
    saving,
    trainer,
)
from torch.utils.data import DataLoader

from quietgrad import PrivacyConfig
from quietgrad.beside.adaptive import AdaptiveClipping
from quietgrad.beside.training_loss import TrainingLoss
from quietgrad.checks import RoundingWarning
from quietgrad.denoising import HardThreshold, OnMomentum
from quietgrad.ledger import read_ledger
from quietgrad.noise.methods import BandedNoise
from quietgrad.sampling.users import Users
from quietgrad.schedules import Cosine, Phase

pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]


@pytest.mark.grid(3, "settings of one loop")
@pytest.mark.parametrize(
    ("physical", "workers", "changes", "bf16"),
    [(8, 0, {}, False), (3, 0, {}, False), (8, 1, {}, False), (8, 0, "bf16-mixed", True)],
    ids=["plain", "micro-batches", "workers", "bf16"],
)
def test_the_weights_are_those_of_the_plain_loop(
    tmp_path: Path, physical: int, workers: int, changes: Any, bf16: bool
) -> None:
    model, fit = Small(), trainer(tmp_path, **({"precision": changes} if changes else {}))
    fit.fit(model, loader(physical, workers))
    assert fit.global_step == STEPS and fit.current_epoch == 2
    assert same_weights(model, plain_loop(physical, workers, bf16))
    assert not same_weights(model, Small())
    assert model.epsilon() == PRIVACY.build(100).epsilon


def test_half_precision_on_private_records_is_warned_of(tmp_path: Path) -> None:
    model = Small(privacy=PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, steps=1))
    fit = trainer(tmp_path, precision="bf16-mixed")
    with pytest.warns(RoundingWarning, match=r"'bf16-mixed'\) rounds coarsely.*'32-true' has a"):
        fit.fit(model, loader(8))


class Records(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(8)

    def val_dataloader(self) -> Any:
        return DataLoader(records(20, seed=1), batch_size=10)


@pytest.mark.parametrize("given", ["data set", "data module"])
def test_data_come_as_a_set_or_a_module(tmp_path: Path, given: str) -> None:
    model = Small()
    data: Any = records() if given == "data set" else Records()
    changes = saving(tmp_path, every=3) | {"max_epochs": 2}
    if given == "data set":
        changes["limit_val_batches"] = 0
    trainer(tmp_path, **changes).fit(model, data)
    physical = 64 if given == "data set" else 8
    assert same_weights(model, plain_loop(physical))  # validation in between changes nothing


def test_the_public_generator_is_left_where_it_was(tmp_path: Path) -> None:
    """Whatever the run's secret numbers, and however large its batches were."""
    drawn = []
    for seed in (1, 2):
        model = Small(privacy=replace(PRIVACY, seed=seed))
        torch.manual_seed(11)
        trainer(tmp_path / str(seed), limit_val_batches=0).fit(model, records(100))
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


class Seen(Callback):
    """Rate, epoch and place after each step."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[float, int, int]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps[trainer.global_step] = rate, trainer.current_epoch, i


@pytest.mark.grid(3, "places of the stop")
@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("stop", [3, 5, 7], ids=["in an epoch", "between epochs", "in the next"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stop: int, validated: bool) -> None:
    changes = saving(tmp_path) if validated else saving(tmp_path) | {"limit_val_batches": 0}
    first = Small()
    changes["callbacks"].insert(0, StopAt(stop))
    trainer(tmp_path, **changes).fit(first, datamodule=Records())
    assert 0 < first.epsilon() < PRIVACY.build(100).epsilon
    again, seen = Small(), Seen()
    changes["callbacks"] = [seen, *saving(tmp_path)["callbacks"]]
    fit = trainer(tmp_path, **changes)
    fit.fit(again, datamodule=Records(), ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    assert fit.global_step == STEPS and fit.current_epoch == 2
    assert [(s, e, i) for s, (_, e, i) in seen.steps.items()] == [
        (step + 1, *divmod(step, 5)) for step in range(stop, STEPS)
    ]
    assert same_weights(again, plain_loop())
    assert read_ledger(tmp_path / "ledger.jsonl").releases == STEPS
    assert again.epsilon() == PRIVACY.build(100).epsilon
    assert not (tmp_path / "secrets.json").exists()


class Told(Callback):
    """What callbacks are given of a step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        self.losses.append(float(out["loss"]))


def test_callbacks_are_given_no_loss(tmp_path: Path) -> None:
    """Zero would be taken for one."""
    told = Told()
    trainer(tmp_path, callbacks=[told], limit_val_batches=0).fit(Small(), loader(8))
    assert len(told.losses) == STEPS and all(loss != loss for loss in told.losses)


def test_steps_lost_in_a_crash_are_spent(tmp_path: Path) -> None:
    changes = saving(tmp_path, every=3)
    changes["callbacks"].insert(0, StopAt(5, crash=True))
    with pytest.raises(InterruptedError):
        trainer(tmp_path, **changes).fit(Small(), datamodule=Records())
    whole = Seen()
    trainer(tmp_path / "whole", callbacks=[whole]).fit(Small(), datamodule=Records())
    seen = Seen()
    changes = saving(tmp_path, every=3)
    changes["callbacks"].append(seen)
    fit = trainer(tmp_path, **changes)
    again = Small()
    fit.fit(again, datamodule=Records(), ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    assert fit.global_step == STEPS
    assert seen.steps.keys() == {6, 7, 8, 9, 10}
    for step, (rate, *place) in seen.steps.items():  # rate and epoch count releases
        assert rate == pytest.approx(whole.steps[step][0], abs=1e-4 * RATE)
        assert tuple(place) == whole.steps[step][1:]
    assert again.epsilon() == PRIVACY.build(100).epsilon


def test_a_finished_run_has_nothing_left_to_release(tmp_path: Path) -> None:
    first = Small()
    trainer(tmp_path, **saving(tmp_path)).fit(first, datamodule=Records())
    again = Small()
    last = str(tmp_path / "kept" / "last.ckpt")
    trainer(tmp_path, **saving(tmp_path)).fit(again, datamodule=Records(), ckpt_path=last)
    assert same_weights(again, first)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == STEPS


def test_workers_that_stay_are_let_go_at_the_end(tmp_path: Path) -> None:
    def staying() -> DataLoader[Any]:
        return DataLoader(records(), batch_size=8, num_workers=1, persistent_workers=True)

    changes = saving(tmp_path) | {"limit_val_batches": 0}
    changes["callbacks"].insert(0, StopAt(7))
    trainer(tmp_path, **changes).fit(Small(), staying())
    changes["callbacks"] = saving(tmp_path)["callbacks"]
    again = trainer(tmp_path, **changes)  # the first one's would hold the lock
    again.fit(Small(), staying(), ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    assert again.global_step == STEPS


class Falling(Small):
    """A rate that falls to zero in as many epochs as the Trainer says."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.told = self.trainer.max_epochs, self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.told[0])
        self.rates: list[float] = []
        return [optimizer], [schedule]

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("steps", "given"), [(10, {"max_epochs": 2}), (10, {}), (8, {})], ids=["said", "left", "part"]
)
def test_schedules_are_told_how_many_epochs_there_are(
    tmp_path: Path, steps: int, given: dict[str, Any]
) -> None:
    model = Falling(privacy=replace(PRIVACY, epochs=None, steps=steps))
    fit = trainer(tmp_path, limit_val_batches=0, **given)
    fit.fit(model, records())
    assert model.told == (2, steps) and fit.global_step == steps
    assert model.rates == pytest.approx([1.0, 0.5])
    assert fit.max_epochs == given.get("max_epochs", -1)


class Remembers(Small):
    def __init__(self, width: int = 8, privacy: Any = None) -> None:
        super().__init__(privacy=privacy)
        self.save_hyperparameters()


def test_privacy_among_the_hyperparameters_loads_and_goes_on(tmp_path: Path) -> None:
    """Before: neither did, since torch.load takes no classes that it was not told of."""
    parts = [
        Phase(epochs=1, noise=Cosine(1.0, 0.5)),
        BandedNoise(bands=2),
        OnMomentum(HardThreshold()),
        TrainingLoss(),
        AdaptiveClipping(),
        Users(),
    ]
    torch.save(parts, tmp_path / "parts.pt")
    assert torch.load(tmp_path / "parts.pt") == parts
    model = Remembers(privacy=replace(PRIVACY, seed=None, data_are_public=False))
    stopped = saving(tmp_path, every=2)
    stopped["callbacks"] += [StopAt(4)]
    trainer(tmp_path, limit_val_batches=0, **stopped).fit(model, records())
    last = tmp_path / "kept" / "last.ckpt"
    assert Remembers.load_from_checkpoint(last).hparams["privacy"] == model.privacy
    fit = trainer(tmp_path, limit_val_batches=0, **saving(tmp_path, every=2))
    again = Remembers(privacy=model.privacy)
    fit.fit(again, records(), ckpt_path=str(last))
    assert fit.global_step == STEPS and again.epsilon() == model.privacy.build(100).epsilon
