"""Nothing private leaves a run of PrivateTrainer: no log, no file, no result holds it."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from private_trainers import PRIVACY, StopAt, classifier, records, trainer
from transformers import EvalPrediction, TrainerCallback
from transformers.integrations import integration_utils

from quietgrad import PrivacyConfig
from quietgrad.noise import BandedNoise

pytestmark = pytest.mark.usefixtures("examined_once")

PRIVATE = ("loss", "grad_norm", "train_loss", "total_flos", "num_tokens")
SECRET = PrivacyConfig(
    target_epsilon=3.0, expected_batch_size=20, epochs=2, noise=BandedNoise(2), seed=None
)


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


def test_no_private_number_is_logged_saved_or_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = Logs()
    trained = trainer(
        tmp_path,
        callbacks=[logs],
        logging_steps=1,
        save_strategy="epoch",
        eval_strategy="epoch",
        eval_dataset=records(20, seed=1),
    )
    done = trained.train()
    trained.save_state()
    trained.save_metrics("train", done.metrics)
    assert done.training_loss is None
    states = [json.loads(p.read_text()) for p in tmp_path.rglob("trainer_state.json")]
    assert len(states) == 3
    lines = [line for state in states for line in state["log_history"]]
    lines += [*logs.seen, done.metrics]
    lines += [json.loads(p.read_text()) for p in tmp_path.glob("*_results.json")]
    for line in lines:
        assert not set(PRIVATE) & set(line), line
    assert all(state["total_flos"] == state["num_input_tokens_seen"] == 0 for state in states)
    steps = [line for line in logs.seen if "learning_rate" in line]
    assert [line["epoch"] for line in steps][-1] == 2.0 and len(steps) == 10
    assert all(line["epsilon"] > 0 and line["data_declared_public"] for line in steps)
    assert any("eval_loss" in line for line in logs.seen)  # of public records
    out, err = capsys.readouterr()
    assert "epsilon" in out
    printed = re.sub(r"'eval_loss'", "", out + err)
    assert not re.search(r"'(loss|grad_norm|train_loss|total_flos)'", printed)


def test_a_printed_epsilon_is_never_below(tmp_path: Path) -> None:
    class Checks(Logs):
        def on_log(self, *args: Any, logs: Any = None, **options: Any) -> None:
            super().on_log(*args, logs=logs, **options)
            if "epsilon" in logs:
                assert float(f"{logs['epsilon']:.4g}") >= trained.epsilon() > 0

    checks = Checks()
    trained = trainer(tmp_path, callbacks=[checks], logging_steps=1)
    trained.train()
    assert len(checks.seen) == 11


def test_no_generators_state_is_saved_and_secrets_are_gone_at_the_end(tmp_path: Path) -> None:
    first = trainer(tmp_path, privacy=SECRET, callbacks=[StopAt(3)], save_strategy="steps")
    first.train()
    secrets = tmp_path / "secrets.json"
    assert stat.S_IMODE(os.stat(secrets).st_mode) == 0o600
    assert (tmp_path / "secrets.json.rows").exists()
    root = json.loads(secrets.read_text())["sessions"][0]["root"]
    files = [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith("secrets")]
    names = {p.name for p in files}
    assert "ledger.jsonl" in names and not any("rng" in name for name in names)
    for path in files:
        held = path.read_bytes()
        assert root.encode() not in held and bytes.fromhex(root) not in held, path
    saved = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert set(saved) == {"state", "param_groups"}
    with pytest.raises(RuntimeError, match="would be published"):
        first.push_to_hub()
    left = tmp_path / "secrets.json.tmp"  # by a kill while the roots were written
    kept, _ = secrets.rename(tmp_path / "elsewhere"), (tmp_path / "secrets.json.rows").unlink()
    (tmp_path / "secrets.json.places").unlink()
    left.write_text(kept.read_text())
    with pytest.raises(RuntimeError, match=r"secrets.json.tmp.*would be published"):
        first.push_to_hub()
    kept.rename(secrets)
    again = trainer(tmp_path, privacy=SECRET, save_strategy="steps")
    again.train(resume_from_checkpoint=True)
    assert again.epsilon() == again.plan.epsilon
    assert not list(tmp_path.glob("secrets.json*"))


def test_saved_weights_say_what_they_were_trained_on(tmp_path: Path) -> None:
    trained = trainer(tmp_path, save_strategy="steps", save_steps=4)
    trained.train()
    trained.save_model(str(tmp_path / "model"))
    trained.create_model_card()  # reads the history of the logs
    beside = json.loads((tmp_path / "model" / "quietgrad.json").read_text())
    said = beside["quietgrad_trained_on"]
    assert said["private"] and said["epsilon"] == trained.epsilon() and said["steps"] == 10
    early = json.loads((tmp_path / "checkpoint-4" / "quietgrad.json").read_text())
    assert early["quietgrad_trained_on"]["steps"] == 4
    assert type(trained.model).from_pretrained(tmp_path / "model").num_labels == 2


def test_reports_to_tensorboard_hold_no_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own writer in the place of TensorBoard's, which is not needed for that."""
    written: dict[str, list[float]] = {}

    class SummaryWriter:
        def __init__(self, log_dir: str | None = None) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.setdefault(name, []).append(value)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    trained = trainer(tmp_path, report_to=["tensorboard"], logging_steps=1)
    trained.train()
    assert len(written["train/epsilon"]) >= 10 and len(written["train/learning_rate"]) == 10
    assert not {f"train/{name}" for name in PRIVATE} & set(written)


def test_evaluation_and_prediction_are_trainers_own(tmp_path: Path) -> None:
    public = records(20, seed=1)
    trained = trainer(tmp_path, eval_dataset=public)
    trained.compute_metrics = accuracy
    trained.train()
    assert 0 <= trained.evaluate()["eval_accuracy"] <= 1
    assert trained.predict(public).predictions.shape == (20, 2)


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def test_the_guard_sees_public_records_first(tmp_path: Path) -> None:
    seen = []

    def loss(model: Any, batch: Any) -> Any:
        seen.append(batch["input_ids"].clone())
        logits = model(input_ids=batch["input_ids"]).logits.float()
        centred = logits - logits.mean(0)  # of the batch
        return torch.nn.functional.cross_entropy(centred, batch["labels"], reduction="none")

    public = records(20, seed=1)
    trained = trainer(
        tmp_path, model=classifier(0.0), per_example_loss=loss, eval_dataset=public, privacy=PRIVACY
    )
    with pytest.raises(ValueError, match="depends on"):
        trained.train()
    known = {tuple(record["input_ids"].tolist()) for record in public}
    assert {tuple(row.tolist()) for batch in seen for row in batch} <= known
    assert trained.epsilon() == 0.0
