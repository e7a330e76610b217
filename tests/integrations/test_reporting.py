"""What the files of TensorBoard and W&B hold of a private run: epsilon, rates, public scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from private_trainers import records, trainer

from quietgrad.integrations.reporting import (
    NO_SYSTEM_METRICS,
    SYSTEM_METRICS,
    without_system_metrics,
)

TOLD = {
    "train/learning_rate", "train/epsilon", "train/epoch", "train/data_declared_public",
    "train/train_runtime", "train/train_samples_per_second", "train/train_steps_per_second",
    "eval/loss", "eval/runtime", "eval/samples_per_second", "eval/steps_per_second",
}  # fmt: skip


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


# A process of its own: W&B leaves threads and a service behind.
OFFLINE = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from private_trainers import records, trainer

trainer(Path({folder!r}) / "run", report_to=["wandb"], logging_steps=1, eval_strategy="epoch",
        eval_dataset=records(20, seed=1)).train()
import json, wandb
settings = wandb.run.settings
print("told:", json.dumps([settings.x_disable_stats, sorted(dict(wandb.run.summary))]))
wandb.finish()
"""


@pytest.mark.distributed
@pytest.mark.slow("imports and trains in a process of its own")
def test_wandb_is_told_nothing_private(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "w").mkdir()
    code = OFFLINE.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path / "w"),
             "WANDB_SILENT": "true"},
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    line = next(line for line in told.stdout.splitlines() if line.startswith("told: "))
    no_statistics, names = json.loads(line.removeprefix("told: "))
    own = {"_runtime", "_step", "_timestamp", "_wandb", "train/global_step"}
    assert no_statistics is True
    # Trainer writes the last line's names otherwise.
    assert {name.replace("train_", "train/train_", 1) for name in names} - own <= TOLD


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
    known = {name.partition("/")[2] for name in TOLD if name.startswith("train/")}
    known |= {name.replace("/", "_") for name in TOLD if name.startswith("eval/")}
    assert "epsilon" in names and names <= known
