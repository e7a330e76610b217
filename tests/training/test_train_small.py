"""``quietgrad train`` from end to end on a tiny model: what it writes, what it trains, and that
nothing private leaves it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import config_of, train, weights

from quietgrad.accounting import epsilon
from quietgrad.clipping import per_example_norms
from quietgrad.ledger import read_ledger
from quietgrad.training import runner
from quietgrad.training.files.run_dir import open_run_dir
from quietgrad.training.optimizers import build_optimizer
from quietgrad.training.prepare import prepare
from quietgrad.training.tasks.records import predictions
from quietgrad.training.tasks.text.batches import tokenise
from quietgrad.training.tasks.text.saved import load_saved

RESULT_KEYS = {
    "epsilon", "delta", "private", "steps", "planned_steps", "metrics", "run_dir",
    "majority_accuracy",
    "metric", "trainable_parameters",
    "records", "noise_multiplier", "sample_rate", "neighbouring", "data_declared_public",
    "seed_warning", "class_scores", "scored_records",
}  # fmt: skip
METRICS_KEYS = {
    "step",
    "validation_accuracy",
    "validation_records",
    "epsilon",
    "data_declared_public",
}
SEED = "0f2e4d6c8b1a39577e93d5c1f4a6b802"  # of the length that private data ask for
# No generator's state; "learnt" is of labels and scales, which the saved model states.
CHECKPOINT_KEYS = {"fixed_head", "step", "trainable", "optimizer", "starts", "learnt"}


def test_command_line_from_plan_to_epsilon(quietgrad, settings, write_config) -> None:
    config, folder = write_config(settings), Path(settings["training.run_dir"])
    code, out, _ = quietgrad("plan", config, "--json")
    planned = json.loads(out)
    assert code == 0 and planned["private"] and planned["steps"] == 6 and planned["epsilon"] <= 4.0
    assert planned["predicted_seconds"] > 0 and planned["layers"]
    assert not folder.exists()  # it trains nothing and writes nothing

    code, out, err = quietgrad("train", config, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["epsilon"] <= 4.0 and result["delta"] < 1 / 60 and result["steps"] == 6
    assert 0 <= result["metrics"]["accuracy"] <= 1
    assert result["run_dir"] == str(folder)
    assert (
        result["epsilon"] == planned["epsilon"]
        and result["noise_multiplier"] == planned["noise_multiplier"]
    )
    assert "epsilon" in err  # progress and guarantee, for people

    written = {p.name for p in folder.iterdir()}
    assert {
        "config.toml",
        "ledger.jsonl",
        "metrics.jsonl",
        "result.json",
        "environment.json",
        "forecast.json",
        "accuracy.png",
        "model",
    } <= written
    # What was expected from public records; what it took tells of private batch sizes.
    kept = json.loads((folder / "forecast.json").read_text())
    assert set(kept) == {
        "engine",
        "layers",
        "cached_frozen_layers",
        "predicted_seconds",
        "predicted_memory_mib",
    }
    told = [
        {key: layer[key] for key in ("shape", "count", "estimator", "kept")}
        for layer in planned["layers"]
    ]
    assert sorted(kept["layers"], key=str) == sorted(told, key=str)
    assert all("seconds" not in line for line in (folder / "result.json").read_text().split())
    assert not [name for name in written if name.endswith(".tmp")]
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "environment.json").read_text())["packages"]["torch"]
    assert json.loads((folder / "result.json").read_text()).items() <= result.items()

    code, out, _ = quietgrad("epsilon", "--ledger", folder, "--json")
    assert code == 0
    assert json.loads(out)["epsilon"] == result["epsilon"] and json.loads(out)["releases"] == 6


def test_output_for_people_shows_the_guarantee(quietgrad, settings, write_config) -> None:
    config = write_config(settings | {"training.steps": 2})
    code, out, err = quietgrad("plan", config)
    assert code == 0 and "guarantee" in out and err == ""
    code, out, err = quietgrad("train", config)
    assert code == 0 and err == ""
    words = " ".join(out.replace("│", " ").split())  # the table wraps
    assert "add or remove one record" in words and "test accuracy" in words


def test_nothing_private_is_written(settings) -> None:
    prepared, outcome, run_dir = train(
        settings | {"training.seed": SEED, "data.public": False, "training.checkpoint_every": 2}
    )
    assert set(outcome.result) <= RESULT_KEYS
    assert set(json.loads(run_dir.result.read_text())) <= RESULT_KEYS
    metrics = run_dir.read_metrics()
    assert [m["step"] for m in metrics] == [3, 6]
    assert all(set(m) <= METRICS_KEYS for m in metrics)
    saved = torch.load(run_dir.checkpoint, weights_only=True)
    assert set(saved) == CHECKPOINT_KEYS
    assert len(saved["learnt"]) == 32
    assert saved["fixed_head"] == {}  # of a head that trains there is one copy, among the trainable
    known = {
        "config.toml",
        "ledger.jsonl",
        "metrics.jsonl",
        "result.json",
        "environment.json",
        "checkpoint.pt",
        "checkpoint.previous.pt",
        "ledger.jsonl.count",
        ".lock",
        "model",
    }
    known.add("events.out.tfevents.0000000000.quietgrad")
    assert {p.name for p in run_dir.path.iterdir()} <= known
    private_words = (
        "loss",
        "batch_sizes",
        "realised",
        "clip_rate",
        "clipped",
        "grad_norms",
        "nonfinite",
        "indices",
    )
    for path in run_dir.path.rglob("*.json*"):
        if "tokenizer" not in path.name:
            assert not [word for word in private_words if f'"{word}' in path.read_text()], path
        assert SEED not in path.read_text()
    assert SEED not in run_dir.config.read_text() and '"seeded": true' in run_dir.ledger.read_text()
    assert prepared.plan is not None and outcome.result["epsilon"] == prepared.plan.epsilon


def test_reported_numbers_do_not_come_from_private_labels(settings) -> None:
    # Which class is the more frequent one in training is private; the comparison value has to come
    # from public records.
    reported, changing = [], ("metrics", "class_scores", "run_dir")
    for label in (0, 1):
        prepared = prepare(config_of(settings | {"training.steps": 1}))
        private = replace(prepared.train, labels=np.full_like(prepared.train.labels, label))
        public = replace(prepared.test, labels=np.zeros_like(prepared.test.labels))
        prepared = replace(prepared, train=private, test=public)
        run_dir = open_run_dir(f"{settings['training.run_dir']}-{label}", False)
        result = runner.train(prepared, run_dir, False, lambda progress: None).result
        reported.append({k: v for k, v in result.items() if k not in changing})
    assert reported[0] == reported[1]


@pytest.mark.parametrize("head", ["mean", "auto"])
@pytest.mark.parametrize("tune", ["lora", "full", "head"])
def test_head_has_its_own_learning_rate(tune: str, head: str, settings) -> None:
    rates = {
        "optimizer.learning_rate": 1e-3,
        "optimizer.head_learning_rate": 5e-2,
        "optimizer.warmup_steps": 0,
    }
    config = config_of(settings | rates | {"model.tune": tune, "model.head": head})
    classifier = prepare(config).model.classifier
    optimizer, schedule = build_optimizer(classifier, config.optimizer, 10)
    schedule(0)
    rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rate_of.keys() == {id(p) for p in classifier.parameters() if p.requires_grad}
    for name, p in classifier.named_parameters():
        if p.requires_grad:
            is_head = name.startswith("head.") or ".classifier." in name
            assert rate_of[id(p)] == (5e-2 if is_head else 1e-3), name


@pytest.mark.grid(4, "ways that share the loop")
@pytest.mark.parametrize("head", ["mean", "auto"])
@pytest.mark.parametrize("tune", ["lora", "full", "head"])
def test_every_way_to_tune(tune: str, head: str, settings) -> None:
    changed = {
        "model.tune": tune,
        "model.head": head,
        "privacy.noise_multiplier": 0.5,
        "training.steps": 3,
    }
    values = {k: v for k, v in settings.items() if k != "privacy.target_epsilon"} | changed
    before = weights(prepare(config_of(values)))
    prepared, outcome, run_dir = train(values)
    assert not outcome.interrupted
    parameters = dict(prepared.model.classifier.named_parameters())
    pretrained = {
        n
        for n in before
        if "lora_" not in n and "head" not in n and "classifier" not in n and "pooler" not in n
    }
    for name, p in parameters.items():
        if not p.requires_grad and name in pretrained:
            assert torch.equal(p, before[name]), name
    moved = {name for name in pretrained if not torch.equal(parameters[name], before[name])}
    assert moved == (pretrained if tune == "full" else set())

    classifier, tokenizer, labels = load_saved(run_dir.model)
    assert labels == ["bad", "good"]
    texts = tokenise(prepared.task.splits.test, tokenizer, 16)
    again = predictions(classifier, texts, 8, torch.device("cpu"))
    assert np.array_equal(
        again, predictions(prepared.model.classifier, prepared.test, 8, torch.device("cpu"))
    )
    batch = texts.collate(np.arange(5), torch.device("cpu"))
    with torch.no_grad():
        one, other = (
            m(batch["input_ids"], batch["attention_mask"])
            for m in (classifier, prepared.model.classifier.eval())
        )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("private", [True, False])
def test_optimisers_with_and_without_privacy(optimizer: str, private: bool, settings) -> None:
    changed = {
        "optimizer.name": optimizer,
        "privacy.enabled": private,
        "optimizer.weight_decay": 0.1,
        **({"optimizer.momentum": 0.5} if optimizer == "sgd" else {}),
    }
    prepared, outcome, run_dir = train(settings | changed)
    assert outcome.result["private"] is private
    assert run_dir.ledger.exists() is private
    assert (outcome.result["epsilon"] is None) is not private
    if not private:
        assert all("epsilon" not in m for m in run_dir.read_metrics())
        assert prepared.plan is None


@pytest.mark.parametrize("estimator", ["hutch", "hutch++", "ghost", "materialized"])
def test_estimators(estimator: str, settings) -> None:
    prepared, outcome, run_dir = train(
        settings | {"clipping.estimator": estimator, "training.steps": 3}
    )
    assert outcome.result["epsilon"] <= 4.0
    contents = read_ledger(run_dir.path)
    assert epsilon(contents.event, contents.header["delta"]) == outcome.result["epsilon"]
    if estimator.startswith("hutch"):
        assert contents.event.clipping.sketch_dim == 32
        exact = prepare(config_of(settings | {"training.steps": 3})).plan
        assert prepared.plan.noise_multiplier > exact.noise_multiplier


def test_a_model_can_learn_and_noise_can_prevent_it(settings) -> None:
    # Not a statistical test: seeds are fixed, and the two classes differ by their words.
    accuracy = {}
    for sigma in (0.3, 100.0):
        changed = {
            "privacy.noise_multiplier": sigma, "training.steps": 60, "training.seed": 0,
            "training.eval_every": 0, "model.tune": "full",
            "training.run_dir": f"{settings['training.run_dir']}-{sigma}",
        }  # fmt: skip
        values = {k: v for k, v in settings.items() if k != "privacy.target_epsilon"} | changed
        accuracy[sigma] = train(values)[1].result["metrics"]["accuracy"]
    assert accuracy[100.0] < 0.85 < accuracy[0.3]


def test_micro_batches_and_evaluations_change_nothing_but_rounding(settings) -> None:
    found = []
    for i, changed in enumerate(
        ({}, {"performance.max_physical_batch_size": 5}, {"training.eval_every": 0})
    ):
        values = {
            "training.seed": 2,
            "optimizer.name": "sgd",
            "training.run_dir": f"{settings['training.run_dir']}{i}",
        }
        found.append(weights(train(settings | values | changed)[0]))
    for other in found[1:]:
        for name, p in found[0].items():
            torch.testing.assert_close(p, other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changed", [{"model.lora_layers": 1}, {"model.tune": "head"}], ids=str)
def test_cached_frozen_layers_give_the_same_gradients(changed: dict, settings) -> None:
    prepared = prepare(config_of(settings | changed))
    torch.nn.init.normal_(
        prepared.model.classifier.head.weight
    )  # a head of zeros lets no gradient through
    cache = prepared.prefix_cache()
    assert cache is not None
    records = np.array([0, 3, 4, 9])
    whole = per_example_norms(
        prepared.model.classifier, prepared.loss(), prepared.train.collate(records, prepared.device)
    )
    cached = per_example_norms(
        cache.upper, prepared.loss(), cache.collate(records, prepared.device)
    )
    torch.testing.assert_close(whole, cached, rtol=1e-4, atol=0)


def test_nothing_is_cached_where_the_lowest_layer_trains(settings) -> None:
    assert prepare(config_of(settings | {"model.tune": "full"})).prefix_cache() is None
    assert (
        prepare(config_of(settings | {"model.tune": "lora", "model.lora_layers": 0})).prefix_cache()
        is None
    )
    assert (
        prepare(
            config_of(settings | {"model.tune": "head", "training.cache_frozen_layers": False})
        ).prefix_cache()
        is None
    )
