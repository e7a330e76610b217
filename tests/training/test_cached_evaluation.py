"""Evaluation starts from cached states where training does: the same scores, and the frozen part
runs once a record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import config_of, train

from quietgrad.training.evaluation import Evaluator, score_of
from quietgrad.training.prepare import Prepared, prepare
from quietgrad.training.tasks.records import outputs, spread

HEAD = {"model.tune": "head"}
TOP = {"model.tune": "full", "model.train_layers": 1}


def off_zero(prepared: Prepared) -> None:
    head: Any = prepared.model.classifier.head
    with torch.no_grad():
        head.weight.normal_()
        head.bias.normal_()


def agree(prepared: Prepared) -> None:
    off_zero(prepared)
    cached, whole = Evaluator(prepared, True), Evaluator(prepared, False)
    assert cached._cache is not None and whole._cache is None
    for name in ("between_steps", "on_validation"):
        assert getattr(cached, name)() == pytest.approx(getattr(whole, name)(), abs=0.02)
    found, expected = cached.final_scores(), whole.final_scores()
    assert found.metrics.keys() == expected.metrics.keys()
    for key, value in expected.metrics.items():
        assert found.metrics[key] == pytest.approx(value, abs=0.02)
    # Scores of classes could agree by chance; logits do not.
    records, device = prepared.validation, prepared.device
    logits = outputs(prepared.model.classifier, records, 7, device)
    again = outputs(cached._cache.upper, records, 7, device, source=cached._cache)
    np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-4)
    assert np.ptp(logits, axis=0).max() > 0.1


@pytest.mark.parametrize("tuning", [HEAD, TOP], ids=["head", "top"])
def test_texts_score_the_same_from_cached_states(tuning: dict, settings: dict) -> None:
    agree(prepare(config_of(settings | tuning)))


def test_images_score_the_same_from_cached_states(values: dict, vit: Any) -> None:
    agree(prepare(config_of(values | {"model.name": f"image:{vit}", "model.tune": "head"})))


def test_the_frozen_part_runs_once_a_validation_record(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    build = Prepared.prefix_cache

    def counted(self: Prepared, records: Any = None) -> Any:
        asked.append("train" if records is None else len(records))
        return build(self, records)

    monkeypatch.setattr(Prepared, "prefix_cache", counted)
    often = {"training.eval_every": 1, "training.averaging": 0.9, "training.eval_records": 10}
    prepared, outcome, run_dir = train(settings | HEAD | often)
    assert asked == ["train", len(prepared.validation)]
    metrics = run_dir.read_metrics()
    assert [m["validation_records"] for m in metrics] == [10] * 6
    # What is written is what the whole model scores.
    chosen = spread(prepared.validation, 10)
    classifier = prepared.model.classifier
    assert outcome.result["weights"] in ("averaged", "last")
    key = "averaged_validation_accuracy" if outcome.result["weights"] == "averaged" else None
    found = score_of(prepared, classifier, prepared.validation, chosen)
    assert metrics[-1][key or "validation_accuracy"] == pytest.approx(found)


def test_nothing_is_cached_for_evaluation_where_training_has_no_cache(settings: dict) -> None:
    without = settings | HEAD | {"training.cache_frozen_layers": False}
    assert Evaluator(prepare(config_of(without)), True)._cache is None
    assert Evaluator(prepare(config_of(settings | HEAD)), False)._cache is None
