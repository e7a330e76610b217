"""Scores of each class: against scikit-learn, and where they are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.training.tasks.class_scores import LARGEST_MATRIX, class_scores

NAMES = ("a", "b", "c", "never")


def test_against_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draws = np.random.default_rng(0)
    logits = draws.normal(size=(200, 4)).astype(np.float32)
    logits[:, 3] = -9
    labels = draws.choice(3, 200, p=[0.75, 0.2, 0.05])
    found = class_scores(logits, labels, NAMES)
    says = logits.argmax(1)
    assert found["confusion"] == metrics.confusion_matrix(labels, says, labels=range(4)).tolist()
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(labels, says, average="macro"))
    wanted = metrics.precision_recall_fscore_support(labels, says, labels=range(3))
    for i, name in enumerate(NAMES[:3]):
        one = found["classes"][name]
        assert [one["precision"], one["recall"], one["f1"], one["records"]] == pytest.approx(
            [column[i] for column in wanted]
        )
    several = (draws.random((200, 4)) < 0.3).astype(np.float32)
    found = class_scores(logits[:, :3], several[:, :3], NAMES[:3])
    assert found["macro_f1"] == pytest.approx(
        metrics.f1_score(several[:, :3] > 0, logits[:, :3] > 0, average="macro")
    )
    assert "confusion" not in found


def test_a_rare_class_that_is_never_found_shows() -> None:
    labels = np.array([0] * 95 + [1] * 5)
    logits = np.tile(np.array([[1.0, 0.0]], dtype=np.float32), (100, 1))
    found = class_scores(logits, labels, ("often", "rare"))
    assert found["macro_f1"] < 0.5 and found["classes"]["rare"]["recall"] == 0
    assert found["confusion"] == [[95, 0], [5, 0]]
    many = class_scores(np.eye(60, dtype=np.float32), np.arange(60), [str(i) for i in range(60)])
    assert "confusion" not in many and many["macro_f1"] == 1 and LARGEST_MATRIX < 60


def test_train_reports_them(settings: dict[str, Any], quietgrad: Any, write_config: Any) -> None:
    config = write_config(settings | {"training.steps": 1, "training.eval_every": 0})
    code, said, err = quietgrad("train", config)
    assert code == 0 and "test macro F1" in said and "Classes of the test records" in said, err
    result = json.loads(Path(settings["training.run_dir"], "result.json").read_text())
    for part in ("test", "validation"):
        scores = result["class_scores"][part]
        assert list(scores["classes"]) == ["bad", "good"]
        assert np.sum(scores["confusion"]) == result["records"][part]
    confusion = np.array(result["class_scores"]["test"]["confusion"])
    assert np.trace(confusion) / confusion.sum() == pytest.approx(result["metrics"]["accuracy"])
