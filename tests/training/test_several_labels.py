"""Images with several labels: mean AUC, the loss, and runs and comparisons that score by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny_images import CHEST, SIZE, write_class_folders, write_findings
from tiny_runs import train
from torch import nn

from quietgrad.comparing.comparison import read_results
from quietgrad.comparing.table import load_comparison
from quietgrad.training.tasks.images.folder import load_image_folder
from quietgrad.training.tasks.images.models import load_image_classifier
from quietgrad.training.tasks.loaded import Tuning
from quietgrad.training.tasks.metrics import ACCURACY, MEAN_AUC, mean_auc, metric_for
from quietgrad.training.tasks.records import classification_loss

# ------------------------------------------------------------------------------------------------
# scores


def area_by_pairs(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs that are ordered rightly; ties count a half."""
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    return float(np.mean(pairs))


@given(st.data(), st.integers(2, 12), st.integers(1, 4))
@settings(deadline=None)
def test_mean_auc_counts_pairs(data: st.DataObject, records: int, labels: int) -> None:
    scores = data.draw(
        arrays(np.float32, (records, labels), elements=st.sampled_from([-1.5, 0.0, 0.25, 3.0]))
    )
    truth = data.draw(arrays(np.float32, (records, labels), elements=st.sampled_from([0.0, 1.0])))
    divided = [j for j in range(labels) if 0 < truth[:, j].sum() < records]
    assume(divided)
    expected = np.mean([area_by_pairs(scores[:, j], truth[:, j] > 0) for j in divided])
    assert mean_auc(scores, truth) == pytest.approx(expected, abs=1e-12)


def test_mean_auc_needs_a_label_that_divides_the_records() -> None:
    scores = np.zeros((3, 2), dtype=np.float32)
    with pytest.raises(ValueError, match="no label divides the records"):
        mean_auc(scores, np.array([[1.0, 0.0]] * 3))
    assert mean_auc(scores, np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])) == 0.5


def test_the_score_follows_the_form_of_the_labels() -> None:
    logits = np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]], dtype=np.float32)
    single, several = np.array([1, 0, 0]), np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert metric_for(single) is ACCURACY and metric_for(single)(logits, single) == pytest.approx(
        2 / 3
    )
    assert metric_for(several) is MEAN_AUC and metric_for(several)(logits, several) == 1.0


def test_the_loss_of_several_labels_is_the_mean_of_their_binary_cross_entropies() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    batch = {
        "x": torch.randn(4, 5),
        "labels": torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]]).float(),
    }
    probabilities = model(batch["x"]).sigmoid()
    wrong = torch.where(batch["labels"] > 0, probabilities, 1 - probabilities)
    found = classification_loss(model, batch)
    assert found.shape == (4,)
    torch.testing.assert_close(found, -wrong.log().mean(dim=1))
    one = {"x": batch["x"], "labels": torch.tensor([2, 0, 1, 1])}
    expected = F.cross_entropy(model(one["x"]), one["labels"], reduction="none")
    torch.testing.assert_close(classification_loss(model, one), expected)


# ------------------------------------------------------------------------------------------------
# runs


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_findings(tmp_path_factory.mktemp("findings"))


@pytest.fixture
def values(findings: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.name": "cnn:groupnorm",
        "model.tune": "full",
        "data.public": True,
        "data.source": str(findings),
        "data.text": "Image Index",
        "data.label": "Finding Labels",
        "data.label_separator": "|",
        "data.no_label": "No Finding",
        "data.image_size": SIZE,
        "data.validation_fraction": 0.25,
        "privacy.target_epsilon": 8.0,
        "optimizer.learning_rate": 1e-3,
        "training.expected_batch_size": 40,
        "training.steps": 4,
        "training.eval_every": 2,
        "training.precision": "float32",
        "training.seed": 0,
        "training.run_dir": str(tmp_path / "run"),
    }


def test_a_run_with_several_labels_reports_its_mean_auc(
    quietgrad: Any, values: dict, write_config: Any
) -> None:
    code, out, err = quietgrad("train", write_config(values), "--json")
    assert code == 0, err
    result, folder = json.loads(out), Path(values["training.run_dir"])
    assert (
        set(result["metrics"]) == {"mean_auc", "validation_mean_auc"}
        and "majority_accuracy" not in result
    )
    _, test = load_image_folder(values["data.source"], CHEST, SIZE)
    weights = str(folder / "model" / "model.safetensors")
    model = load_image_classifier(
        "cnn:groupnorm", (1, SIZE, SIZE), 2, Tuning("full"), weights
    ).eval()
    scores = (
        model(test.collate(np.arange(len(test)), torch.device("cpu"))["pixels"]).detach().numpy()
    )
    areas = [area_by_pairs(scores[:, j], test.labels[:, j] > 0) for j in range(2)]
    assert (
        result["metrics"]["mean_auc"] == pytest.approx(np.mean(areas), abs=1e-3) and min(areas) < 1
    )
    assert result["private"] and result["epsilon"] <= 8.0
    said = " ".join(err.split())
    assert "test mean AUC" in said and "accuracy" not in said.lower().replace("accuracy.png", "")
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve] == [2, 4] and all(
        "validation_mean_auc" in line for line in curve
    )
    described = json.loads(next((folder / "model").glob("*.json")).read_text())
    assert described["labels"] == ["Across", "Down"]


def test_labels_that_can_be_seen_are_learnt(values: dict) -> None:
    changes = {"privacy.enabled": False, "training.steps": 40, "optimizer.learning_rate": 0.01}
    _, outcome, _ = train(
        {k: v for k, v in values.items() if k != "privacy.target_epsilon"} | changes
    )
    assert outcome.result["metrics"]["mean_auc"] > 0.95  # guessing: 0.5
    assert "majority_accuracy" not in outcome.result and not outcome.result["private"]


def test_a_comparison_scores_several_labels_as_a_run_does(
    quietgrad: Any, values: dict, tmp_path: Path
) -> None:
    keys = {
        k: v
        for k, v in values.items()
        if k not in ("privacy.target_epsilon", "training.run_dir", "training.seed")
    }
    lines = [
        "[comparison]",
        "epsilons = [8.0]",
        "seeds = 1",
        "tuning_seeds = 1",
        "learning_rates = [1e-3]",
    ]
    lines += ["protocol_rate = 1e-3", "eval_every = 2", "[variants.baseline]"]
    for table in sorted({k.partition(".")[0] for k in keys}):
        lines.append(f"[{table}]")
        lines += [
            f"{k.partition('.')[2]} = {json.dumps(v)}"
            for k, v in keys.items()
            if k.startswith(f"{table}.")
        ]
    path = tmp_path / "comparison.toml"
    path.write_text("\n".join(lines) + "\n")
    code, out, err = quietgrad("compare", path, "--json")
    assert code == 0, err
    assert "test mean AUC" in json.loads(out)["tables"]["one rate"]
    (record,) = read_results(load_comparison(path)).values()
    _, outcome, _ = train(values)
    metrics = outcome.result["metrics"]
    assert 0 < record["test"] < 1
    assert record["test"] == pytest.approx(metrics["mean_auc"], abs=1e-6)
    assert record["curve"][-1] == [4, pytest.approx(metrics["validation_mean_auc"], abs=1e-6)]


def test_class_folders_are_trained_on(
    quietgrad: Any, values: dict, write_config: Any, tmp_path: Path
) -> None:
    source = write_class_folders(tmp_path / "classes", 60, 20)
    for path in [
        *sorted((source / "test" / "down").iterdir())[:5],
        *sorted((source / "train" / "down").iterdir())[:15],
    ]:
        path.unlink()
    keys = {k: v for k, v in values.items() if not k.startswith("data.")}
    keys |= {
        "data.public": True,
        "data.source": str(source),
        "data.image_size": 10,
        "data.validation_fraction": 0.25,
    }
    keys |= {"training.expected_batch_size": 12, "training.steps": 2}
    code, out, err = quietgrad("train", write_config(keys), "--json")
    assert code == 0, err
    result = json.loads(out)
    assert set(result["metrics"]) == {"accuracy", "validation_accuracy"}
    assert result["majority_accuracy"] == pytest.approx(10 / 15) and result["records"]["test"] == 15
