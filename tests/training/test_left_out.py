"""Runs whose settings are left out: what is said and recorded, what wins, and that a resume goes on
with what the run began with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import config_of

from quietgrad.cli.beside.chosen import embedded
from quietgrad.comparing.table import load_comparison
from quietgrad.training.derived.resolve import Machine, is_open, resolved, with_what_trains
from quietgrad.training.derived.rule import Reads
from quietgrad.training.prepare import prepare
from quietgrad.training.settings.config import TrainConfig, load_config
from quietgrad.training.tasks.text.batches import TokenisedTexts

LEFT_OUT = ("optimizer.learning_rate", "training.expected_batch_size", "training.steps")
SLOW = Machine(seconds=1.0, parameters=300_000, head_input=Reads(20.0, 320.0))
FAST = replace(SLOW, seconds=1e-6)
RECORDS = 30_276
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def left_out(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in LEFT_OUT}


def chosen(overrides: list[str], machine: Machine = FAST) -> TrainConfig:
    config = with_what_trains(load_config(None, overrides))
    return resolved(config, RECORDS, machine)[0]


def test_adapters_alone_inherit_neither_rate_nor_batch_of_the_head() -> None:
    head = chosen([], replace(FAST, parameters=1155))
    adapters = chosen(["model.tune=lora"])
    assert head.model.tune == "head" and head.optimizer.head_learning_rate is None
    assert adapters.optimizer.learning_rate < head.optimizer.learning_rate / 1.5
    assert adapters.optimizer.head_learning_rate not in (None, head.optimizer.learning_rate)
    assert adapters.training.expected_batch_size != head.training.expected_batch_size
    slow = chosen(["model.tune=lora"], SLOW).training
    assert slow.expected_batch_size * slow.steps <= 2 * 3600


def test_more_hours_make_a_longer_run() -> None:
    few, many = (chosen(["model.tune=lora", f"hours={h}"], SLOW).training for h in (2, 20))
    assert 5 < many.expected_batch_size * many.steps / (few.expected_batch_size * few.steps) < 15


@pytest.mark.parametrize("override", ["learning_rate=0.123", "expected_batch_size=77", "steps=7"])
def test_what_is_given_wins(override: str) -> None:
    config = chosen([override])
    key, value = override.split("=")
    table = config.optimizer if key == "learning_rate" else config.training
    assert getattr(table, key) == float(value)
    assert not is_open(config)


def test_nothing_is_chosen_where_everything_is_given() -> None:
    given = ["learning_rate=0.1", "expected_batch_size=64", "steps=5", "tune=head"]
    config = load_config(None, given)
    assert not is_open(config) and with_what_trains(config) == config
    assert resolved(config, RECORDS, SLOW) == (config, {})


def test_a_given_rate_is_the_head_s_too() -> None:
    config = chosen(["model.tune=lora", "learning_rate=0.01"])
    assert config.optimizer.head_learning_rate is None


@pytest.mark.parametrize(
    ("overrides", "tune"),
    [
        ([], "head"),
        (["lora_layers=2"], "lora"),
        (["train_layers=1"], "full"),
        (["model.name=table:mlp"], "full"),
        (["model.name=cnn:groupnorm"], "full"),
        (["model.name=features:random"], "head"),
        (["model.name=packaged:smollm2", "task.kind=generate"], "lora"),
    ],
)
def test_what_trains(overrides: list[str], tune: str) -> None:
    assert with_what_trains(load_config(None, overrides)).model.tune == tune


def test_sgd_has_no_rule(left_out: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate is left out"):
        prepare(config_of(left_out | {"optimizer.name": "sgd"}))


def test_a_run_without_privacy_is_its_reference() -> None:
    """Rate, batch and steps of the private run, so that the difference is privacy's."""
    plain, private = chosen(["privacy.enabled=false"]), chosen([])
    assert (plain.optimizer, plain.training) == (private.optimizer, private.training)


@pytest.mark.slow("a run and two resumes, each of which times steps and works the settings out")
def test_the_run_s_folder_says_what_was_chosen_and_a_resume_keeps_it(
    quietgrad: Run, left_out: dict[str, Any], write_config: Callable[[dict[str, Any]], Path]
) -> None:
    config = write_config(left_out)
    code, out, err = quietgrad("train", config, "--set", "hours=0.003")
    assert code == 0, err
    assert "learning rate" in out and "expected batch size" in out
    saved = load_config(Path(left_out["training.run_dir"]) / "config.toml")
    assert not is_open(saved) and saved.model.tune == "lora"
    # Left out again, with other hours: what was begun goes on.
    code, out, err = quietgrad("train", config, "--resume", "--set", "hours=500")
    assert code == 0 and "nothing was released" in out, err
    code, _, err = quietgrad("train", config, "--resume", "--set", "training.steps=12345")
    assert code == 2 and "training.steps" in err


def test_plan_says_what_it_chose_and_warns_of_too_many_hours(
    quietgrad: Run, left_out: dict[str, Any], write_config: Callable[[dict[str, Any]], Path]
) -> None:
    config = write_config(left_out)
    code, out, err = quietgrad("plan", config, "--set", "training.steps=9", "--json")
    assert code == 0, err
    record = json.loads(out)
    why = {entry["key"]: entry["why"] for entry in record["settings"]}
    assert why["training.steps"] == "given" and why["training.expected_batch_size"] != "given"
    assert "warning" not in record
    shown = {entry["key"]: entry["value"] for entry in record["settings"]}
    assert shown["training.expected_batch_size"] == record["expected_batch_size"]
    assert set(why) >= {"model.tune", "privacy.max_grad_norm", "denoising.method"}
    long = ("--set", "training.steps=9000", "--set", "hours=0.0001")
    code, out, err = quietgrad("plan", config, *long)
    assert code == 0 and "training.hours = 0.0001" in out and "leave out training.steps" in out, err
    assert "frozen layers" in out  # of the encoder below the head
    whole = ("--set", "model.tune=full", "--set", "training.steps=9", "--set", "hours=1")
    code, out, err = quietgrad("plan", config, *whole)
    words = " ".join(out.replace("│", " ").split())
    assert code == 0 and "1 hour is allowed" in words and "frozen layers" not in words, err


def test_what_only_the_embedded_default_says_is_not_given(tmp_path: Path) -> None:
    """The clipping norm of `quietgrad train --set ...` was called given."""
    own = tmp_path / "own.toml"
    assert embedded(None, ["target_epsilon=1"]) == ["privacy.max_grad_norm"]
    assert embedded(None, ["max_grad_norm=0.5"]) == []
    assert embedded(None, ["privacy.max_grad_norm=0.5"]) == [] == embedded(own, [])


def test_a_comparison_says_its_own_sizes(tmp_path: Path) -> None:
    file = tmp_path / "comparison.toml"
    text = "[comparison]\n[variants.baseline]\n[data]\npublic = true\n[training]\nsteps = 5\n"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"variants\.baseline leaves .*expected_batch_size"):
        load_comparison(file)
    file.write_text(text + "expected_batch_size = 8\n")
    run = load_comparison(file).first
    assert load_comparison(file).config_of(run).model.tune == "head"


def test_the_choice_looks_at_no_training_record(
    left_out: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Length and speed are those of validation records, which are public."""
    seen: list[tuple[bytes, ...]] = []
    collate = TokenisedTexts.collate

    def watched(self: TokenisedTexts, indices: Any, device: Any) -> Any:
        seen.append(tuple(row.tobytes() for row in self.ids))
        return collate(self, indices, device)

    monkeypatch.setattr(TokenisedTexts, "collate", watched)
    prepared = prepare(config_of(left_out))
    known = {row.tobytes() for row in prepared.validation.ids}
    assert seen and all(set(rows) <= known for rows in seen)
    assert not is_open(prepared.config) and set(prepared.reasons) >= set(LEFT_OUT)
