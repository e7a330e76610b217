"""What files of TensorBoard, W&B and MLflow hold of a private run: epsilon, rates, public
scores.
"""

from __future__ import annotations

import importlib
import os
import re
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning_modules import Small
from lightning_modules import records as tensors
from lightning_modules import trainer as lightning_trainer
from private_trainers import records, trainer
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from quietgrad import PrivacyConfig
from quietgrad.integrations.monitors import of_training
from quietgrad.integrations.reporting import (
    NO_SYSTEM_METRICS,
    SYSTEM_METRICS,
    epsilon_for_bars,
    refuse_measuring,
    without_system_metrics,
)

TOLD = {
    "train/learning_rate", "train/epsilon", "train/epoch", "train/data_declared_public",
    "train/train_runtime", "train/train_samples_per_second", "train/train_steps_per_second",
    "eval/loss", "eval/runtime", "eval/samples_per_second", "eval/steps_per_second",
}  # fmt: skip

NAMES_OF_MLFLOW = {name.removeprefix("train/").replace("eval/", "eval_") for name in TOLD}


@pytest.mark.usefixtures("examined_once")
def test_tensorboard_is_told_nothing_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trained = trainer(
        tmp_path / "run",
        report_to=["tensorboard"],
        logging_steps=1,
        eval_strategy="epoch",
        eval_dataset=records(20, seed=1),
    )
    trained.train()
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) == TOLD
    assert not tags["histograms"] and set(tags["tensors"]) <= {
        "args/text_summary",
        "model_config/text_summary",
    }
    shown = [event.value for event in events.Scalars("train/epsilon")]
    # As the float32 that the file holds, never below what was spent.
    spent = [trained.plan.event.after(step) for step in range(1, 11)]
    from quietgrad.accounting import epsilon_report

    least = [epsilon_report(event, trained.plan.delta).epsilon for event in spent]
    assert len(shown) == 11 and all(s >= e for s, e in zip(shown, [*least, least[-1]], strict=True))
    assert shown == sorted(shown)


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_round_no_epsilon_down(
    kind: type[Callback], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Before: both were given 0.7104, and showed 0.710 for an epsilon of 0.71037.
    plan = PrivacyConfig(noise_multiplier=1.52, expected_batch_size=20, steps=5)
    module = Small(privacy=plan)
    bar = {"enable_progress_bar": True, "callbacks": [kind()]}
    public = DataLoader(tensors(20, seed=1), batch_size=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # more workers
        lightning_trainer(tmp_path, **bar).fit(module, DataLoader(tensors()), public)
    out = capsys.readouterr()
    shown = re.findall(r"\beps[:=]\s*([0-9.]+)", out.out + out.err)
    assert float(f"{module.epsilon():.3g}") < module.epsilon() <= float(shown[-1])


@pytest.mark.parametrize("epsilon", [1.9142, 0.4464, 12.345, 123.4, 0.00012, 1234.0, 0.0, 1.0])
def test_what_bars_show_is_never_below(epsilon: float) -> None:
    held = float(torch.tensor(epsilon_for_bars(epsilon)))  # metrics are float32
    assert min(float(f"{held:.3g}"), float(f"{held:.3f}")) >= epsilon


# A process of its own: both leave threads and services behind.
TRAINS = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from private_trainers import records, trainer

trainer(Path({folder!r}) / "run", report_to=[{reporter!r}], logging_steps=1, save_strategy="epoch",
        eval_strategy="epoch", eval_dataset=records(20, seed=1)).train()
"""
CHECKPOINT = {
    "config.json", "model.safetensors", "optimizer.pt", "quietgrad.json", "quietgrad_release.json",
    "scheduler.pt", "trainer_state.json", "training_args.bin",
}  # fmt: skip


def trained_apart(reporter: str, folder: Path, **environment: str) -> None:
    code = TRAINS.format(here=str(Path(__file__).parent), folder=str(folder), reporter=reporter)
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, cwd=folder,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]


def written_by_wandb(path: Path) -> Iterator[Any]:
    """Records of its file: LevelDB's log, whose blocks are 32 KiB, after seven bytes."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        if kind == 0:  # after the last
            return
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            record = messages.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


@pytest.mark.distributed
@pytest.mark.slow("imports and trains in a process of its own")
def test_wandb_is_told_nothing_private(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    trained_apart(
        "wandb",
        tmp_path,
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
        WANDB_SILENT="true",
        WANDB_LOG_MODEL="checkpoint",
        WANDB_X_DISABLE_STATS="false",
    )
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    kinds, names, uploaded = set(), set(), set()
    for record in written_by_wandb(file):
        kinds.add(record.WhichOneof("record_type"))
        for items in (record.history.item, record.summary.update):
            names |= {item.key or "/".join(item.nested_key) for item in items}
        uploaded |= {entry.path for entry in record.artifact.manifest.contents}
    assert {"history", "artifact", "exit"} <= kinds
    assert not kinds & {"stats", "alert", "tbrecord"}  # the memory of the process is among "stats"
    own = {"_runtime", "_step", "_timestamp", "_wandb/runtime", "train/global_step"}
    # Trainer writes the last line's names otherwise.
    told = {name.replace("train_", "train/train_", 1) for name in names} - own
    assert {"train/epsilon", "eval/loss"} <= told <= TOLD
    assert uploaded and {Path(name).name for name in uploaded} <= CHECKPOINT | {
        "quietgrad_start.json", "README.md", "model_architecture.txt",
    }  # fmt: skip


@pytest.mark.distributed
@pytest.mark.slow("imports and trains in a process of its own")
def test_a_store_of_mlflow_holds_nothing_private(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    trained_apart(
        "mlflow",
        tmp_path,
        MLFLOW_TRACKING_URI=(tmp_path / "store").as_uri(),
        MLFLOW_ALLOW_FILE_STORE="true",
        MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING="true",
        MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL="1",
        HF_MLFLOW_LOG_ARTIFACTS="1",
    )
    (folder,) = {path.parent for path in tmp_path.glob("store/*/*/metrics") if any(path.iterdir())}
    names = {
        str(path.relative_to(folder / "metrics"))
        for path in (folder / "metrics").rglob("*")
        if path.is_file()
    }
    assert {"epsilon", "eval_loss"} <= names <= NAMES_OF_MLFLOW
    kept = {path.name for path in tmp_path.glob("store/**/checkpoint-*/*")}
    assert kept and kept <= CHECKPOINT


def test_a_run_of_wandb_that_measures_the_process_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun(quiet: bool) -> Any:
        return SimpleNamespace(run=SimpleNamespace(settings=SimpleNamespace(x_disable_stats=quiet)))

    monkeypatch.setenv(NO_SYSTEM_METRICS, "false")
    monkeypatch.setenv(SYSTEM_METRICS, "true")
    monkeypatch.setitem(sys.modules, "wandb", begun(True))
    without_system_metrics()
    assert os.environ[NO_SYSTEM_METRICS] == "true"
    monkeypatch.setitem(sys.modules, "wandb", begun(False))
    with pytest.raises(ValueError, match="W&B's run has begun and measures the memory"):
        without_system_metrics()


def test_a_run_of_mlflow_that_measures_the_process_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NO_SYSTEM_METRICS, "false")
    monkeypatch.setenv(SYSTEM_METRICS, "true")
    monitors: dict[str, Any] = {}
    fluent = SimpleNamespace(run_id_to_system_metrics_monitor=monitors)
    monkeypatch.setitem(sys.modules, "mlflow.tracking.fluent", fluent)
    without_system_metrics()
    assert os.environ[SYSTEM_METRICS] == "false"  # what a run that begins now reads
    monitors["run"] = object()
    with pytest.raises(ValueError, match="MLflow's run has begun and measures the memory"):
        without_system_metrics()


class Recorded(ModuleType):
    """In the place of the package mlflow: what Trainer's own callback calls, written down."""

    __version__ = "3.0.0"

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = ModuleSpec("mlflow", None)
        limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
        self.utils = SimpleNamespace(validation=limits)
        self.parameters: dict[str, Any] = {}
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.run: Any = None

    def is_tracking_uri_set(self) -> bool:
        return True

    def get_tracking_uri(self) -> str:
        return "nowhere"

    def active_run(self) -> Any:
        return self.run

    def start_run(self, **_: Any) -> None:
        self.run = SimpleNamespace(info=SimpleNamespace(run_id="one"))

    def end_run(self) -> None:
        self.run = None

    def log_params(self, given: dict[str, Any], synchronous: bool) -> None:
        self.parameters |= given

    def log_metrics(self, metrics: dict[str, float], step: int, synchronous: bool) -> None:
        self.metrics.append((step, metrics))


@pytest.mark.usefixtures("examined_once")
def test_mlflow_is_told_nothing_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is played; the callback is the library's own."""
    mlflow = Recorded()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setenv(SYSTEM_METRICS, "true")
    monkeypatch.setenv(NO_SYSTEM_METRICS, "false")
    trained = trainer(
        tmp_path / "run",
        report_to=["mlflow"],
        logging_steps=1,
        eval_strategy="epoch",
        eval_dataset=records(20, seed=1),
    )
    trained.train()
    assert os.environ[SYSTEM_METRICS] == "false" and mlflow.run is None
    names = {name for _, metrics in mlflow.metrics for name in metrics}
    assert "epsilon" in names and names <= NAMES_OF_MLFLOW


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("train_loss", True),
        ("loss/train", True),
        ("Training.Accuracy", True),
        ("val_loss", False),
        ("trained_tokens", False),
        ("val_loss_of_training_day", False),
        ("private_training_loss", False),
    ],
)
def test_metrics_of_training_records_by_their_names(name: str, private: bool) -> None:
    assert of_training(name) is private


@pytest.mark.parametrize("name", ["clearml", "codecarbon", "comet_ml", "neptune", "swanlab"])
def test_reporters_that_measure_the_machine_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} measures the memory and the load"):
        trainer(tmp_path / "run", report_to=[name])
    assert not (tmp_path / "run").exists()


def test_callbacks_and_loggers_that_measure_the_machine_are_refused(tmp_path: Path) -> None:
    class CometCallback(TrainerCallback):
        pass

    class Own(CometCallback):
        pass

    trained = trainer(tmp_path)
    trained.add_callback(Own())
    with pytest.raises(ValueError, match="comet_ml measures the memory and the load"):
        trained.train()
    refuse_measuring([TrainerCallback(), "tensorboard"])
    with pytest.raises(ValueError, match="neptune measures"):
        refuse_measuring([type("NeptuneLogger", (), {})()])


def test_trackio_measures_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refuse_measuring(["trackio"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match="trackio measures"):
        refuse_measuring(["trackio"])
