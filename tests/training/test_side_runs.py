"""`quietgrad train` with a private training loss and an adaptive clipping norm: settings, progress,
metrics, card, and a resume in the middle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import interrupt_at, train, weights

from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.ledger import read_ledger
from quietgrad.training.settings.config import TrainConfig, config_from
from quietgrad.training.settings.overrides import read_toml
from quietgrad.training.settings.resume import require_same_settings

BOTH = {
    "training_loss.method": "clipped-mean",
    "training_loss.high": 2.0,
    "adaptive_clipping.method": "quantile",
    "adaptive_clipping.quantile": 0.6,
}


def test_both_are_tables_that_are_off_by_default(tmp_path: Path) -> None:
    assert TrainConfig().training_loss is None and TrainConfig().adaptive_clipping is None
    tree = {
        "training_loss": {"method": "clipped-mean", "high": 3, "every": 2},
        "adaptive_clipping": {"method": "quantile", "share": 0.02},
    }
    config = config_from(tree)
    assert config.training_loss == TrainingLoss(high=3.0, every=2)
    assert config.adaptive_clipping == AdaptiveClipping(share=0.02)
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert config_from(read_toml(tmp_path / "c.toml")) == config
    with pytest.raises(ValueError, match=r"training_loss.high=-1.0|low=0.0 and high=-1.0"):
        config_from({"training_loss": {"method": "clipped-mean", "high": -1}})
    with pytest.raises(ValueError, match="high"):  # the table is off
        config_from({"training_loss": {"high": 3}})


def test_a_run_shows_the_estimate_and_resumes_to_the_same_weights(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    values = settings | BOTH | {
        "training.seed": 3, "data.public": True, "training.steps": 7, "training.eval_every": 1,
    }  # fmt: skip
    shown: list[str] = []
    elsewhere = values | {"training.run_dir": settings["training.run_dir"] + "-whole"}
    whole, outcome, run_dir = train(elsewhere, report=lambda p: shown.append(str(p.training_loss)))
    assert len(shown) == 7 and all("(private estimate)" in line for line in shown)
    metrics = run_dir.read_metrics()
    assert all(0 < m["private_training_loss_noise_std"] < 1 for m in metrics)
    assert len({m["clipping_norm"] for m in metrics}) == 7
    assert not any("loss" in key for m in metrics for key in m if not key.startswith("private_"))
    names = [side["name"] for side in outcome.result["beside"]]
    assert names == [TrainingLoss.name, AdaptiveClipping.name]
    cards = [path.read_text() for path in run_dir.path.rglob("README.md")]
    assert cards and all("Released beside the gradients" in card for card in cards)
    assert read_ledger(run_dir.path).event == whole.plan.event
    assert outcome.result["epsilon"] == whole.plan.epsilon <= 4.0

    train(values, report=interrupt_at(3))
    prepared, second, stopped = train(values, resume=True)
    assert second.result["steps"] == 7
    assert [m["clipping_norm"] for m in stopped.read_metrics()] == [
        m["clipping_norm"] for m in metrics
    ]
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(prepared).items())


@pytest.mark.parametrize(
    "change", [{"adaptive_clipping.quantile": 0.5}, {"training_loss.every": 2}]
)
def test_a_resume_with_other_settings_is_refused(change: dict[str, Any]) -> None:
    def of(values: dict[str, Any]) -> TrainConfig:
        tree: dict[str, Any] = {}
        for name, value in values.items():
            table, key = name.split(".")
            tree.setdefault(table, {})[key] = value
        return config_from(tree)

    with pytest.raises(ValueError, match="resume with a changed privacy setting"):
        require_same_settings(of(BOTH), of(BOTH | change))
    with pytest.raises(ValueError, match="resume with a changed privacy setting"):
        require_same_settings(of({}), of(BOTH))


def test_the_plan_says_what_is_released(
    settings: dict[str, Any], write_config: Any, quietgrad: Any
) -> None:
    config = write_config(settings | BOTH)
    code, out, _ = quietgrad("plan", config, "--json")
    assert code == 0
    assert [side["every"] for side in json.loads(out)["beside"]] == [1, 1]
    text = " ".join(quietgrad("plan", config)[1].replace("│", " ").split())
    assert "private estimate at every step: mean of losses clipped to 0 .. 2" in text
    assert "towards the 0.6 quantile" in text


def test_the_ledgers_epsilon_names_them(settings: dict[str, Any], quietgrad: Any) -> None:
    _, outcome, run_dir = train(settings | BOTH | {"training.steps": 3})
    code, out, _ = quietgrad("epsilon", "--ledger", run_dir.path)
    assert code == 0 and "beside the gradients" in out and TrainingLoss.name in out
    record = json.loads(quietgrad("epsilon", "--ledger", run_dir.path, "--json")[1])
    assert record["epsilon"] == pytest.approx(outcome.result["epsilon"])
    assert len(record["beside"]) == 2
