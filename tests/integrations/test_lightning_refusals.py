"""What cannot be private is refused by name, with a remedy, before a release; and nothing private
is logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, callbacks
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from lightning_modules import (
    ADVICE,
    PRIVACY,
    Small,
    StopAt,
    loader,
    records,
    saving,
    trainer,
)
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from quietgrad import PrivacyConfig
from quietgrad.integrations.lightning.refusals import refuse_trainer
from quietgrad.integrations.reporting import shown_epsilon
from quietgrad.ledger import read_ledger

pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*leave it at 1"),
    ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0.*max_grad_norm"),
    ({"precision": "bf16-true"}, "precision='HalfPrecision'.*bf16-mixed"),
    ({"precision": "64-true"}, "precision='DoublePrecision'.*bf16-mixed"),
    ({"overfit_batches": 2}, "overfit_batches=2.*small data set"),
    ({"limit_train_batches": 2}, r"limit_train_batches=2.*PrivacyConfig\(epochs=\)"),
    ({"limit_train_batches": 0.5}, "limit_train_batches=0.5"),
    ({"fast_dev_run": True}, "fast_dev_run=True.*made-up records"),
    ({"detect_anomaly": True}, "detect_anomaly=True.*made-up records"),
    ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1"),
    ({"max_epochs": 3}, r"max_epochs=3\) would be 15 steps, and the plan has 10"),
    ({"max_steps": 3}, r"max_steps=3\), and the plan has 10 steps"),
    ({"callbacks": [callbacks.BatchSizeFinder()]}, "BatchSizeFinder.*batch_size"),
    ({"callbacks": [callbacks.LearningRateFinder()]}, "LearningRateFinder.*public data"),
    ({"callbacks": [callbacks.StochasticWeightAveraging(0.1)]}, "EMAWeightAveraging"),
    ({"callbacks": [callbacks.DeviceStatsMonitor()]}, "DeviceStatsMonitor.*leave it out"),
    ({"callbacks": [callbacks.ThroughputMonitor(len)]}, "ThroughputMonitor"),
    ({"callbacks": [SpikeDetection(warmup=1)]}, "SpikeDetection.*EarlyStopping"),
    ({"callbacks": [callbacks.GradientAccumulationScheduler({1: 2})]}, "expected_batch_size"),
    ({"profiler": "advanced"}, 'AdvancedProfiler.*profiler="simple"'),
    ({"profiler": "pytorch"}, 'PyTorchProfiler.*profiler="simple"'),
    ({"default_root_dir": "memory://x"}, "needs a local directory"),
]


@pytest.mark.parametrize(("changes", "said"), SETTINGS, ids=lambda v: str(v)[:40])
def test_settings_of_the_trainer(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    if "callbacks" in changes and "DeviceStats" in said:
        changes = changes | {"logger": CSVLogger(tmp_path)}
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, **changes).fit(Small(), records())
    assert not (tmp_path / "ledger.jsonl").exists()


def test_strategies_that_are_not_replicas(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"strategy='ddp_spawn'.*use strategy=\"ddp\""):
        refuse_trainer(trainer(tmp_path, strategy="ddp_spawn", devices=2))
    sharded: Any = SimpleNamespace(world_size=2, strategy=FSDPStrategy())
    said = r"2 devices and FSDPStrategy.*use strategy=\"ddp\".*ModelParallelStrategy"
    with pytest.raises(ValueError, match=said):
        refuse_trainer(sharded)


def test_shards_on_one_process() -> None:
    alone: Any = SimpleNamespace(world_size=1, strategy=ModelParallelStrategy(1, 1))
    with pytest.raises(ValueError, match=r"nothing to shard: leave strategy out.*devices=2"):
        refuse_trainer(alone)


def test_parts_that_torch_has_wrapped(tmp_path: Path) -> None:
    model = Small()
    model.net[0] = torch.nn.DataParallel(model.net[0])
    with pytest.raises(ValueError, match=r"layer 'net.0' is wrapped in DataParallel"):
        trainer(tmp_path).fit(model, loader(8))
    assert not list(tmp_path.glob("ledger*"))


@pytest.mark.parametrize("sizes", [(1, 2), ("auto", 1), (2, "auto")])
def test_layers_that_are_cut(sizes: Any) -> None:
    cut: Any = SimpleNamespace(world_size=2, strategy=ModelParallelStrategy(*sizes))
    with pytest.raises(ValueError, match="give data_parallel_size=2, tensor_parallel_size=1"):
        refuse_trainer(cut)


def test_a_gradient_scaler(tmp_path: Path) -> None:
    made = trainer(tmp_path, precision="bf16-mixed")
    made.precision_plugin.precision = "16-mixed"  # which Lightning makes bf16 without a GPU
    with pytest.raises(ValueError, match=r"precision='16-mixed'.*use 32-true or bf16-mixed"):
        refuse_trainer(made)


@pytest.mark.parametrize("tuned", ["lr_find", "scale_batch_size"])
def test_tuners(tmp_path: Path, tuned: str) -> None:
    model = Small()
    model.batch_size = model.lr = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="which no ledger counts"):
        getattr(Tuner(trainer(tmp_path)), tuned)(model, loader(8))


def test_another_version_of_lightning(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    del made.fit_loop.epoch_loop._batches_that_stepped
    with pytest.raises(ImportError, match=r"no Trainer.fit_loop.*_batches_that_stepped"):
        made.fit(Small(), records())


def released(folder: Path) -> int:
    ledger = folder / "ledger.jsonl"
    return read_ledger(ledger).releases if ledger.exists() else 0


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithoutLoss(Small):
    per_example_loss = None  # type: ignore[assignment]


class WithStep(Small):
    def training_step(self, batch: Any) -> Any:
        return self.per_example_loss(batch).mean()


class WithBackward(Small):
    def backward(self, loss: Any, *args: Any, **options: Any) -> None:
        loss.backward()


class WithTransfer(Small):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class WithoutPrivacy(Small):
    def __init__(self) -> None:
        super().__init__()
        del self.privacy


class Watched(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(print)


class WithLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class WithTwo(Small):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 4)]


class WithNone(Small):
    def configure_optimizers(self) -> Any:
        return None


class WithClipping(Small):
    def configure_gradient_clipping(self, optimizer: Any, *values: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, 0.5, "norm")


class Compiled(Small):
    def __init__(self) -> None:
        super().__init__()
        self._compiler_ctx = {"compiler": "dynamo"}


class Seeded(Small):
    def __init__(self, seed: int = 12345) -> None:
        super().__init__(
            privacy=PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, epochs=2, seed=seed)
        )
        self.save_hyperparameters()


class Logs(Small):
    def per_example_loss(self, batch: Any) -> Any:
        losses = super().per_example_loss(batch)
        self.log("train_loss", losses.mean())
        return losses


class LogsAtTheEnd(Small):
    def on_train_epoch_end(self) -> None:
        self.log_dict({"train_accuracy": 0.5})


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Manual, "automatic_optimization=False.*loops.md"),
        (WithoutLoss, r"WithoutLoss.per_example_loss=None is no method; write per_example_loss\("),
        (WithStep, "WithStep.training_step.*per_example_loss"),
        (WithBackward, "WithBackward.backward"),
        (WithTransfer, "on_after_batch_transfer would not see.*collate_fn"),
        (WithoutPrivacy, "privacy has to be a PrivacyConfig"),
        (Watched, "hooks on their gradients.*remove them"),
        (WithLBFGS, "LBFGS.*steps once a gradient"),
        (WithTwo, "several optimisers.*return one, with a group of parameters"),
        pytest.param(
            WithNone,
            "returned None.*train nothing",
            marks=pytest.mark.filterwarnings("ignore:.*will run with no optimizer"),
        ),
        (WithClipping, r"configure_gradient_clipping.*noisy mean.*PrivacyConfig\(max_grad_norm=\)"),
        (Compiled, "compiled as a whole"),
        (Seeded, "hyperparameter 'seed' of Seeded holds the seed"),
        (Logs, r"self.log\('train_loss'\) while training.*validation_step"),
    ],
)
def test_modules(tmp_path: Path, module: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=said):
        trainer(tmp_path).fit(module(), records())
    assert not released(tmp_path)


def test_nothing_is_logged_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"self.log\('train_accuracy'\) while training"):
        trainer(tmp_path).fit(LogsAtTheEnd(), records())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(records())


def weighted() -> Any:
    return DataLoader(records(), sampler=WeightedRandomSampler([1.0] * 100, 100))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Stream, "a stream.*map-style"),
        (lambda: DataLoader(Stream()), "a stream"),
        (lambda: [loader(8), loader(8)], "several training loaders"),
        (lambda: {"a": loader(8)}, "several training loaders"),
        (weighted, "WeightedRandomSampler.*leave sampler"),
        (lambda: DataLoader(records(), batch_size=8, drop_last=True), "drop_last=True"),
        (lambda: DataLoader(records(), batch_size=None), "leave sampler"),
    ],
)
def test_data(tmp_path: Path, data: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        trainer(tmp_path).fit(Small(), data())
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_data_module_that_moves_batches(tmp_path: Path) -> None:
    class Moves(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(8)

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

    with pytest.raises(ValueError, match=r"Moves.transfer_batch_to_device would not see"):
        trainer(tmp_path).fit(Small(), datamodule=Moves())


def test_the_training_records_are_not_validated_on(tmp_path: Path) -> None:
    data = records()
    with pytest.raises(ValueError, match="is the training data, or holds records of it"):
        trainer(tmp_path).fit(Small(), data, DataLoader(data, batch_size=10))
    assert not released(tmp_path)
    model, fit = Small(), trainer(tmp_path / "afterwards")
    fit.fit(model, data)
    with pytest.raises(ValueError, match="is the training data, or holds records of it"):
        fit.validate(model, DataLoader(data, batch_size=10))
    with pytest.raises(ValueError, match="is the training data, or holds records of it"):
        fit.test(model, DataLoader(data, batch_size=10))
    with pytest.raises(ValueError, match="is the training data, or holds records of it"):
        fit.predict(model, DataLoader(data, batch_size=10))


def test_another_trainer_does_not_look_at_the_training_records_either(tmp_path: Path) -> None:
    """Before: it did, since what looks at loaders was the first Trainer's alone."""
    data, model = records(), Small()
    trainer(tmp_path / "fit", limit_val_batches=0).fit(model, data)
    for door in ("validate", "test", "predict"):
        other = trainer(tmp_path / door)
        with pytest.raises(ValueError, match="is the training data, or holds records of it"):
            getattr(other, door)(model, DataLoader(data, batch_size=10))
    trainer(tmp_path / "public").validate(model, DataLoader(records(seed=9), batch_size=10))


def test_another_run_in_the_directory(tmp_path: Path) -> None:
    def small() -> Small:
        return Small(privacy=replace(PRIVACY, seed=None, data_are_public=False))

    trainer(tmp_path, **saving(tmp_path)).fit(small(), records())
    last = tmp_path / "kept" / "last.ckpt"
    with pytest.raises(ValueError, match="holds a private run already; go on with it by"):
        trainer(tmp_path).fit(small(), records())
    elsewhere = tmp_path / "other"
    with pytest.raises(ValueError, match="holds no ledger, so there is no private run to go on"):
        trainer(elsewhere, **saving(tmp_path)).fit(small(), records(), ckpt_path=str(last))
    trainer(elsewhere, callbacks=[StopAt(4)]).fit(small(), records())
    before = (elsewhere / "ledger.jsonl").read_bytes()
    with pytest.raises(ValueError, match="ckpt_path is no checkpoint of the private run"):
        trainer(elsewhere, **saving(tmp_path)).fit(small(), records(), ckpt_path=str(last))
    assert (elsewhere / "ledger.jsonl").read_bytes() == before  # no start is counted


def test_weights_of_an_earlier_run_are_no_silent_start(tmp_path: Path) -> None:
    privacy = PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, epochs=1)
    model = Small(privacy=privacy)
    trainer(tmp_path / "one", **saving(tmp_path)).fit(model, records())
    loaded = Small.load_from_checkpoint(tmp_path / "kept" / "last.ckpt", privacy=privacy)
    for start in (model, loaded):
        with pytest.raises(ValueError, match="whose epsilon adds to this one's"):
            trainer(tmp_path / "two").fit(start, records())
    loaded.accept_start = "epsilons-add"
    trainer(tmp_path / "two").fit(loaded, records())
    with pytest.raises(TypeError, match="has to be a PrivacyConfig"):
        trainer(tmp_path / "three").fit(WithoutPrivacy(), records())


class Watches(Callback):
    """Everything that a callback is told of a step."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        self.told.append((out, trainer.callback_metrics.keys(), trainer.progress_bar_metrics))


def test_nothing_private_is_logged_saved_or_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watches = Watches()
    changes = saving(tmp_path) | {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    changes["callbacks"] += [watches, callbacks.LearningRateMonitor(), callbacks.Timer()]
    changes |= {"profiler": "simple", "enable_progress_bar": True}
    public = DataLoader(records(20, seed=1), batch_size=10)
    model = Small()
    trainer(tmp_path, **changes).fit(model, loader(8), public)
    allowed = {"epsilon", "data_declared_public", "val_loss"}
    for out, metrics, bar in watches.told:
        assert (
            [*out] == ["loss"]
            and out["loss"] != out["loss"]
            and set(metrics) <= allowed | {"lr-AdamW", "eps"}
        )
        assert {k: v for k, v in bar.items() if k not in ("v_num", "eps")} == {}
    written = next(tmp_path.rglob("metrics.csv")).read_text()
    assert set(written.splitlines()[0].split(",")) == {"epoch", "step", "lr-AdamW"} | allowed
    checkpoint = torch.load(tmp_path / "kept" / "last.ckpt", weights_only=False)
    assert set(checkpoint) == {
        "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks",
        "optimizer_states", "lr_schedulers", "quietgrad",
    }  # fmt: skip
    mark = checkpoint["quietgrad"]
    assert mark["releases"] == 10
    assert mark["quietgrad_trained_on"]["epsilon"] == model.epsilon()
    out = capsys.readouterr()
    assert "loss" not in (out.out + out.err).replace("val_loss", "")
    columns = written.splitlines()[0].split(",")
    shown = {
        float(row.split(",")[columns.index("epsilon")])
        for row in written.splitlines()[1:]
        if row.split(",")[columns.index("epsilon")]
    }
    assert max(shown) >= model.epsilon() == PRIVACY.build(100).epsilon


@pytest.mark.parametrize("epsilon", [2.87299999, 2.873, 0.1, 1e-8, 123456.7])
def test_a_shown_epsilon_is_never_below(epsilon: float) -> None:
    shown = shown_epsilon(epsilon)
    assert epsilon <= shown <= epsilon * 1.002
    assert float(torch.tensor(shown)) >= epsilon  # as a float32, too


class ReplacesGradients(Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 9.0)


class BackwardBeforeTheStep(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.net(torch.ones(4, 6)).sum().backward()


class StepsTwice(Small):
    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        self.net(torch.ones(4, 6)).sum().backward()
        self.trainer.optimizers[0].step()


@pytest.mark.parametrize("callback", [ReplacesGradients, BackwardBeforeTheStep, None])
def test_gradients_that_were_not_released_are_not_stepped_on(
    callback: type[Callback] | None, tmp_path: Path
) -> None:
    """Before: they were, and epsilon said nothing of it."""
    model = StepsTwice() if callback is None else Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    callbacks = [] if callback is None else [callback()]
    with pytest.raises(RuntimeError, match="not released"):
        trainer(tmp_path, limit_val_batches=0, callbacks=callbacks).fit(model, records())
    if callback is not None:
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_part_of_the_training_data_is_no_validation_data(tmp_path: Path) -> None:
    data = records()
    part = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(10)))
    with pytest.raises(ValueError, match="holds records of it"):
        trainer(tmp_path).fit(Small(), data, part)


class OnPlateau(Small):
    watched = "train_loss"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": self.watched},
        }


WATCHED: list[tuple[type[Small], dict[str, Any], str]] = [
    (Small, {"callbacks": [callbacks.EarlyStopping("train_loss")]}, "EarlyStopping.*private"),
    (Small, {"callbacks": [callbacks.EarlyStopping("loss")]}, "validation logs val_loss alone"),
    (
        Small,
        {"callbacks": [callbacks.ModelCheckpoint(monitor="loss/train")]},
        r"ModelCheckpoint.*private.*PrivacyConfig\(training_loss=\)",
    ),
    (OnPlateau, {}, "ReduceLROnPlateau.*private"),
]


@pytest.mark.parametrize(("kind", "changes", "said"), WATCHED, ids=lambda v: str(v)[:40])
def test_metrics_that_nobody_may_log(
    tmp_path: Path, kind: type[Small], changes: dict[str, Any], said: str
) -> None:
    if said.startswith("Model"):
        changes = changes | {"enable_checkpointing": True}
    public = DataLoader(records(20, seed=1), batch_size=10)
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, **changes).fit(kind(), loader(8), public)
    assert not (tmp_path / "ledger.jsonl").exists()
    trainer(tmp_path).fit(Small(), loader(8))  # nothing stands in the way of the next
    assert released(tmp_path) == 10


def test_a_metric_without_a_validation(tmp_path: Path) -> None:
    stop = callbacks.EarlyStopping("val_loss")
    with pytest.raises(ValueError, match="there is none; give fit a loader of public records"):
        trainer(tmp_path, callbacks=[stop]).fit(Small(), loader(8))
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("tried", [0, 2])
def test_what_is_logged_may_be_watched(tmp_path: Path, tried: int) -> None:
    class Watching(OnPlateau):
        watched = "val_loss"

    kept = callbacks.ModelCheckpoint(tmp_path / "kept", monitor="epsilon", mode="max")
    stop = callbacks.EarlyStopping("val_loss", patience=5)
    public = DataLoader(records(20, seed=1), batch_size=10)
    made = trainer(
        tmp_path, callbacks=[stop, kept], enable_checkpointing=True, num_sanity_val_steps=tried
    )
    model = Watching()
    made.fit(model, loader(8), public)
    assert released(tmp_path) == 10 and float(stop.best_score) < 10
    assert model.epsilon() <= 3.0
    made.fit(Watching(), loader(8), public, ckpt_path=kept.best_model_path)  # it goes on
