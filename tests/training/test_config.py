"""The TOML configuration: every name and type checked, overrides in both spellings, and a file that
reads back to itself.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quietgrad.checks import RoundingWarning
from quietgrad.training.precision import warn_of_rounding
from quietgrad.training.settings.config import TrainConfig, config_from, load_config
from quietgrad.training.settings.overrides import default_config_path

TABLES = [f.name for f in dataclasses.fields(TrainConfig)]


def toml_file(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_embedded_default_is_complete() -> None:
    config = load_config(None)
    assert config == load_config(default_config_path())
    assert config.model.name == "packaged:minilm" and config.data.source == "packaged:tweets"
    assert config.privacy.enabled
    assert config.training.seed is None  # noise that nobody can repeat, unless asked for
    assert (config.privacy.target_epsilon is None) != (config.privacy.noise_multiplier is None)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"privacy": {"target_epsilom": 1.0}},
            r"unknown key privacy.target_epsilom; did you mean 'target_epsilon'",
        ),
        (
            {"training": {"batch_size": 1}},
            r"unknown key training.batch_size; did you mean 'expected_batch_size'",
        ),
        ({"optimiser": {}}, r"unknown table \[optimiser\]; did you mean 'optimizer'"),
        ({"zzz": {}}, r"unknown table \[zzz\]; valid: " + ", ".join(TABLES)),
        ({"model": {"qqqq": 1}}, "unknown key model.qqqq; valid: name, tune"),
        ({"model": 3}, "model=3 must be a table"),
    ],
    ids=str,
)
def test_unknown_names_are_refused_with_the_nearest(tree: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from(tree)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("training.steps", "many", "a whole number of at least 1, not a string"),
        ("training.steps", 2.5, "a whole number of at least 1; or leave it out"),
        ("training.steps", True, "a whole number"),
        ("privacy.target_epsilon", "two", "a number"),
        ("privacy.target_epsilon", True, "a number"),
        ("privacy.enabled", 1, "true or false"),
        ("privacy.enabled", "false", "true or false, not a string"),
        ("model.name", ["a"], "a string"),
        ("data.labels", "a,b", "a list"),
        ("data.labels", [1, 2], "a list, each entry a string"),
        ("optimizer.learning_rate", [], "a number above 0"),
    ],
    ids=str,
)
def test_wrong_types_are_refused_by_name(name: str, value: Any, wanted: str) -> None:
    table, key = name.split(".")
    with pytest.raises(ValueError, match=f"{name}=.*must be {wanted}"):
        config_from({table: {key: value}})


def test_whole_numbers_are_numbers() -> None:
    config = config_from({"privacy": {"target_epsilon": 2}, "training": {"epochs": 3}})
    assert config.privacy.target_epsilon == 2.0 and isinstance(config.privacy.target_epsilon, float)
    assert isinstance(config.training.epochs, float)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.tune", "lorra", "model.tune='lorra' is unknown; did you mean 'lora'"),
        ("model.head", "mena", "did you mean 'mean'"),
        ("clipping.estimator", "hutch+", "did you mean 'hutch"),
        ("optimizer.name", "adam", "did you mean 'adamw'"),
        ("training.precision", "float23", "did you mean 'float32'"),
        ("optimizer.learning_rate", 0.0, "optimizer.learning_rate=0.0 must be positive"),
        ("optimizer.head_learning_rate", -1.0, "optimizer.head_learning_rate"),
        ("model.lora_rank", 0, "model.lora_rank=0"),
        ("model.max_length", 0, "model.max_length=0"),
        ("model.dropout", -0.1, "model.dropout"),
        ("performance.max_physical_batch_size", 0, "performance.max_physical_batch_size=0"),
        ("training.checkpoint_every", 0, "training.checkpoint_every=0"),
        ("training.eval_every", -1, "training.eval_every=-1"),
        ("spectrum.top", 1, "spectrum.top=1"),
        ("spectrum.probes", 1, "spectrum.probes=1"),
        ("spectrum.lanczos_steps", 1, "spectrum.lanczos_steps=1"),
        ("spectrum.tail_value", 0.0, "spectrum.tail_value=0.0"),
        ("spectrum.head_epochs", -1, "spectrum.head_epochs=-1"),
        ("spectrum.simclr_epochs", -1, "spectrum.simclr_epochs=-1"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any, message: str) -> None:
    table, key = name.split(".")
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        config_from({table: {key: value}})


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("privacy.target_epsilon=1", lambda c: c.privacy.target_epsilon, 1.0),
        ("target_epsilon=0.5", lambda c: c.privacy.target_epsilon, 0.5),
        (" seed = 7 ", lambda c: c.training.seed, 7),
        ("run_dir=runs/a b", lambda c: c.training.run_dir, "runs/a b"),
        ("run_dir='quoted'", lambda c: c.training.run_dir, "quoted"),
        ("data.source=a=b.csv", lambda c: c.data.source, "a=b.csv"),
        ("run_dir=2024", lambda c: c.training.run_dir, "2024"),
        ("enabled=false", lambda c: c.privacy.enabled, False),
        ('labels=["x", "y"]', lambda c: c.data.labels, ["x", "y"]),
        ("target_delta=1e-6", lambda c: c.privacy.target_delta, 1e-6),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_overrides(override: str, read: Callable[[TrainConfig], Any], value: Any) -> None:
    assert read(load_config(None, [override])) == value


def test_overrides_leave_the_file_as_it_is() -> None:
    before = default_config_path().read_bytes()
    config = load_config(None, ["training.steps=5"])
    assert config.training.steps == 5
    assert default_config_path().read_bytes() == before


@pytest.mark.parametrize(
    ("override", "taken", "dropped"),
    [
        ("epochs=3", ("training", "epochs"), ("training", "steps")),
        ("noise_multiplier=1.5", ("privacy", "noise_multiplier"), ("privacy", "target_epsilon")),
    ],
)
def test_override_takes_the_place_of_its_alternative(
    override: str, taken: tuple, dropped: tuple, tmp_path: Path
) -> None:
    def value(config: TrainConfig, where: tuple[str, str]) -> Any:
        return getattr(getattr(config, where[0]), where[1])

    file = toml_file(tmp_path, "[training]\nsteps = 9\n[privacy]\ntarget_epsilon = 2.0\n")
    assert value(load_config(file), dropped) is not None
    config = load_config(file, [override])
    assert value(config, taken) is not None and value(config, dropped) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepps=3", "unknown key 'stepps'; did you mean 'steps'"),
        ("training.stepps=3", "unknown key training.stepps; did you mean 'steps'"),
        ("trainig.steps=3", r"unknown table \[trainig\]; did you mean 'training'"),
        ("name=x", "unknown key 'name'; write one of model.name, optimizer.name"),
        ("steps", "'steps' is not of the form key=value"),
        ("steps=many", "training.steps='many' must be a whole number of at least 1, not a string"),
    ],
)
def test_bad_overrides_are_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(None, [override])


def test_missing_and_malformed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.toml'.*no such file"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match="not valid TOML"):
        load_config(toml_file(tmp_path, "[model\n"))
    (tmp_path / "config.toml").write_bytes(b'[model]\nname = "\xff"\n')
    with pytest.raises(ValueError, match="not valid TOML"):
        load_config(tmp_path / "config.toml")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            "target_delta=1e-05",
            "learning_rate=2.5e-7",
            "seed=0",
            "enabled=false",
            "weight_decay=1e16",
        ],
        ['labels=["a\\"b", "c\\\\d", "ü 🙂", ""]', "epochs=0.5", "head_learning_rate=0.1"],
        ["run_dir='C:\\new\\tab'", 'data.text="two\\nlines\\tand \\u0001"', "lora_targets=[]"],
        ['data.text="\\u007f"'],
    ],
    ids=["default", "numbers", "lists", "strings", "delete-character"],
)
def test_toml_round_trip(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(None, overrides)
    assert load_config(toml_file(tmp_path, config.to_toml())) == config


def test_configurations_are_frozen() -> None:
    config = load_config(None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training.steps = 1


def test_precision_is_the_one_with_a_bound_whatever_the_machine() -> None:
    config = load_config(None)
    assert config.training.precision == "float32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_rounding(config)
    coarse = load_config(None, ["training.precision=bfloat16"])
    with pytest.warns(RoundingWarning, match=r"precision='bfloat16' rounds coarsely.*'float32'"):
        warn_of_rounding(coarse)
    with pytest.raises(ValueError, match=r"training.precision='auto'"):
        load_config(None, ["training.precision=auto"])
