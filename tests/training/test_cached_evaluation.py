"""Evaluation starts from cached states where training does: the same scores, and the frozen part
runs once a record.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import config_of, train, write_records

from quietgrad.training.evaluation import Evaluator, score_of
from quietgrad.training.prepare import Prepared, prepare
from quietgrad.training.tasks.records import outputs, spread

HEAD = {"model.tune": "head"}
LAYERS = HEAD | {"model.head": "layers"}
TOP = {"model.tune": "full", "model.train_layers": 1}


def off_zero(prepared: Prepared) -> None:
    head: Any = prepared.model.classifier.head
    with torch.no_grad():
        head.weight.normal_()
        if head.bias is not None:
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


@pytest.mark.parametrize("tuning", [HEAD, LAYERS, TOP], ids=["head", "layers", "top"])
def test_texts_score_the_same_from_cached_states(tuning: dict, settings: dict) -> None:
    agree(prepare(config_of(settings | tuning)))


def test_images_score_the_same_from_cached_states(values: dict, vit: Any) -> None:
    agree(prepare(config_of(values | {"model.name": f"image:{vit}", "model.tune": "head"})))


def test_the_frozen_part_runs_once_a_validation_record(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    build = Prepared.prefix_cache

    def counted(self: Prepared, records: Any = None, **more: Any) -> Any:
        asked.append("train" if records is None else len(records))
        return build(self, records, **more)

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


def test_a_message_that_was_passed_on_counts_once(
    settings: dict, csv_file: Path, tmp_path: Path
) -> None:
    """Copies weigh nothing: they change no score, wherever they come to lie."""
    records = list(csv.reader(csv_file.read_text().splitlines()))[1:]
    first = prepare(config_of(settings | HEAD))
    copied = first.task.splits.validation.texts[0]
    label = next(label for text, label in records if text == copied)
    lines = [*records, *[(copied, label)] * 40]
    write_records(tmp_path / "copies.csv", [(text, label) for text, label in lines])
    second = prepare(config_of(settings | HEAD | {"data.source": str(tmp_path / "copies.csv")}))
    assert len(second.validation) == len(first.validation) + 40
    found = []
    for prepared in (first, second):
        torch.manual_seed(3)
        off_zero(prepared)
        evaluator = Evaluator(prepared, True)
        scores = evaluator.final_scores()
        found.append((scores, evaluator.on_validation(), evaluator.scheduled_records))
    assert found[0] == found[1]
    assert found[0][0].counted["validation"] == len(first.validation)
    whole = [score_of(p, p.model.classifier, p.validation) for p in (first, second)]
    assert whole[0] != whole[1]  # where copies count, they are seen


def test_nothing_is_cached_for_evaluation_where_training_has_no_cache(settings: dict) -> None:
    without = settings | HEAD | {"training.cache_frozen_layers": False}
    assert Evaluator(prepare(config_of(without)), True)._cache is None
    assert Evaluator(prepare(config_of(settings | HEAD)), False)._cache is None


def test_rows_of_a_table_that_are_alike_are_different_people(tmp_path: Path) -> None:
    lines = ["age,label"] + [f"{20 + i % 30},{('low', 'high')[i % 2]}" for i in range(90)]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    values = {
        "model.name": "table:mlp",
        "model.tune": "full",
        "data.source": str(tmp_path / "people.csv"),
        "data.validation_fraction": 0.3,
        "data.test_fraction": 0.3,
        "data.public": True,
        "privacy.target_epsilon": 8.0,
        "optimizer.learning_rate": 0.1,
        "training.expected_batch_size": 5,
        "training.steps": 2,
        "training.run_dir": str(tmp_path / "run"),
    }
    prepared = prepare(config_of(values))
    evaluator = Evaluator(prepared, False)
    assert len(evaluator.validation) == len(prepared.validation)
    assert len(evaluator.test) == len(prepared.test)
