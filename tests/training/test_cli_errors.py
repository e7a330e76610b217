"""A user's mistake on the command line: exit code 2 and exactly one line on standard error, which
begins with "error:".
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import labelled_texts, write_records

Run = Callable[..., tuple[int, str, str]]
Config = Callable[[dict[str, Any]], Path]


def assert_one_error(outcome: tuple[int, str, str], *parts: str) -> None:
    code, _, err = outcome
    assert code == 2, outcome
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("command", ["train", "plan"])
def test_missing_configuration(command: str, quietgrad: Run, tmp_path: Path) -> None:
    assert_one_error(quietgrad(command, tmp_path / "none.toml"), "none.toml", "no such file")
    assert_one_error(quietgrad(command, tmp_path), "is a folder")


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("data.source", "/nowhere/none.csv", ["none.csv", "no such file"]),
        ("data.text", "txt", ["data.text='txt'", "did you mean 'text'"]),
        ("data.label", "lable", ["data.label='lable'", "did you mean 'label'"]),
        ("data.labels", ["good", "ugly"], ["label 'bad' of a validation or test record is not in "
                                           "data.labels"]),
        ("data.test_fraction", 1.5, ["data.test_fraction=1.5"]),
        ("privacy.target_epsilon", 0, ["target_epsilon=0.0", "positive"]),
        ("privacy.target_epsilon", -2.0, ["target_epsilon=-2.0", "positive"]),
        ("privacy.target_delta", 1.0, ["target_delta=1.0", "(0, 1)"]),
        ("privacy.target_delta", 0.0, ["target_delta=0.0"]),
        ("privacy.noise_multiplier", 1.0, ["privacy.target_epsilon=4.0 and "
                                           "privacy.noise_multiplier=1.0 are both given"]),
        ("privacy.max_grad_norm", 0.0, ["max_grad_norm=0.0"]),
        ("training.expected_batch_size", 100_000, ["expected_batch_size=100000",
         "exceeds the number of records", "use at most"]),
        ("training.steps", 0, ["steps=0"]),
        ("training.stepps", 5, ["unknown key training.stepps", "did you mean 'steps'"]),
        ("clipping.sketch_dims", 5, ["unknown key clipping.sketch_dims",
         "did you mean 'sketch_dim'"]),
        ("clipping.estimator", "gost", ["clipping.estimator='gost'", "did you mean 'ghost'"]),
        ("model.name", "/nowhere/at-all", ["model.name='/nowhere/at-all'", "cannot be loaded"]),
        ("model.lora_targets", ["zzz"], ["model.lora_targets=['zzz']", "does not fit"]),
        ("training.device", "tpu9", ["training.device='tpu9'"]),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes_in_the_configuration(
    command, key, value, parts, quietgrad: Run, settings, write_config: Config
) -> None:
    outcome = quietgrad(command, write_config(settings | {key: value}))
    assert_one_error(outcome, *parts)
    assert not Path(settings["training.run_dir"], "ledger.jsonl").exists()  # nothing was started


@pytest.mark.parametrize(
    ("records", "part"),
    [
        ([], "holds no records"),
        ([(f"text {i}", "x") for i in range(60)], "single label 'x'"),
        ([("a", "x"), ("b", "y")], "too few"),
    ],
    ids=["empty", "single-label", "two-records"],
)
def test_data_that_cannot_be_used(
    records, part: str, quietgrad: Run, settings, write_config: Config, tmp_path: Path
) -> None:
    path = write_records(tmp_path / "data.csv", records)
    assert_one_error(
        quietgrad("train", write_config(settings | {"data.source": str(path)})), "data.csv", part
    )


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("target_epsilom=1", ["unknown key 'target_epsilom'", "did you mean 'target_epsilon'"]),
        (
            "privacy.target_epsilon=abc",
            ["privacy.target_epsilon='abc'", "a number above 0, not a string"],
        ),
        ("name=x", ["model.name", "optimizer.name"]),
        ("steps", ["key=value"]),
        ("training.steps=[1", ["training.steps='[1'"]),
    ],
)
def test_mistakes_in_overrides(
    override: str, parts: list[str], quietgrad: Run, settings, write_config: Config
) -> None:
    assert_one_error(quietgrad("train", write_config(settings), "--set", override), *parts)


def test_unwritable_run_directory(
    quietgrad: Run, settings, write_config: Config, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    below = str(tmp_path / "file" / "run")  # not even root can make a folder below a regular file
    outcome = quietgrad("train", write_config(settings | {"training.run_dir": below}))
    assert_one_error(
        outcome, f"training.run_dir={below!r} cannot be written", "choose another directory"
    )
    at_file = str(tmp_path / "file")
    assert_one_error(
        quietgrad("train", write_config(settings | {"training.run_dir": at_file})),
        "cannot be written",
    )


def test_run_directory_that_reads_like_a_home(
    quietgrad: Run, settings, write_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a folder of the name ~, and printed commands that lead elsewhere in a shell."""
    monkeypatch.chdir(tmp_path)
    outcome = quietgrad("train", write_config(settings | {"training.run_dir": "~/runs/a"}))
    assert_one_error(outcome, "training.run_dir='~/runs/a' begins with ~", "/~/runs/a'")
    assert not Path("~").exists()


def test_run_directory_that_holds_a_run(quietgrad: Run, settings, write_config: Config) -> None:
    config = write_config(settings | {"training.steps": 2})
    assert quietgrad("train", config)[0] == 0
    ledger = Path(settings["training.run_dir"], "ledger.jsonl").read_bytes()
    assert_one_error(quietgrad("train", config), "already holds a run", "--resume")
    assert Path(settings["training.run_dir"], "ledger.jsonl").read_bytes() == ledger


def test_resume_mistakes(quietgrad: Run, settings, write_config: Config, tmp_path: Path) -> None:
    config = write_config(settings)
    assert_one_error(
        quietgrad("train", config, "--resume"), "holds no run to resume", "without --resume"
    )
    without = {k: v for k, v in settings.items() if k != "training.run_dir"}
    assert_one_error(
        quietgrad("train", write_config(without), "--resume"), "--resume needs the run directory"
    )


@pytest.mark.grid(3, "settings that one comparison refuses")
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("privacy.noise_multiplier=2", "noise_multiplier"),
        ("privacy.target_epsilon=1", "privacy"),
        ("privacy.target_delta=1e-3", "delta"),
        ("privacy.max_grad_norm=2", "max_grad_norm"),
        ("training.expected_batch_size=20", "expected_batch_size"),
        ("training.steps=9", "steps"),
        ("clipping.estimator=hutch", "estimator"),
        ("data.test_fraction=0.3", "test_fraction"),  # other records are private now
        ("privacy.enabled=false", "privacy"),
    ],
)
def test_resume_with_a_changed_privacy_setting(
    override: str, named: str, quietgrad: Run, settings, write_config: Config
) -> None:
    fixed = {k: v for k, v in settings.items() if k != "privacy.target_epsilon"} | {
        "privacy.noise_multiplier": 1.0
    }
    config = write_config(fixed | {"training.steps": 2, "training.eval_every": 0})
    assert quietgrad("train", config)[0] == 0
    files = {
        p: p.read_bytes()
        for p in Path(settings["training.run_dir"]).iterdir()
        if p.name in ("ledger.jsonl", "result.json")
    }
    assert_one_error(quietgrad("train", config, "--resume", "--set", override), "resume", named)
    assert all(p.read_bytes() == content for p, content in files.items())


@pytest.mark.grid(2, "settings that one comparison refuses")
@pytest.mark.parametrize(
    "override",
    [
        "model.tune=full",
        "model.lora_rank=3",
        "model.head=auto",
        "optimizer.name=sgd",
        "optimizer.head_learning_rate=1",
    ],
)
def test_resume_with_another_model_or_optimiser(
    override: str, quietgrad: Run, settings, write_config: Config
) -> None:
    # The plan has a step left, and the checkpoint does not fit what would go on.
    config = write_config(settings | {"training.steps": 3, "training.eval_every": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quietgrad.training.runner._stop_on_signal", stop_at_once)
        assert quietgrad("train", config)[0] == 130
    outcome = quietgrad("train", config, "--resume", "--set", override)
    if "learning_rate" in override:
        assert outcome[0] == 0, outcome  # a free choice: it is post-processing
    else:
        assert_one_error(outcome, "resume with a changed")


@contextlib.contextmanager
def stop_at_once() -> Iterator[Any]:
    yield types.SimpleNamespace(requested=True)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["calibrate", "--epsilon", 0, "--delta", 1e-5], ["--epsilon=0.0", "positive"]),
        (["calibrate", "--epsilon", -1, "--delta", 1e-5], ["--epsilon=-1.0"]),
        (["calibrate", "--epsilon", 1, "--delta", 1], ["delta=1.0", "(0, 1)"]),
        (["calibrate", "--epsilon", 1, "--delta", 1e-5, "--sketch-dim", 1], ["sketch_dim=1"]),
        (["calibrate", "--epsilon", 1, "--delta", 1e-5, "--rank", 5], ["--sketch-dim"]),
        (["epsilon", "--noise-multiplier", 0, "--delta", 1e-5], ["noise_multiplier=0.0"]),
        (["epsilon", "--noise-multiplier", 1, "--delta", 1.5], ["delta=1.5"]),
        (["epsilon", "--noise-multiplier", 1], ["--delta"]),
        (["epsilon", "--delta", 1e-5], ["--noise-multiplier"]),
    ],
    ids=lambda value: (
        " ".join(map(str, value)) if value and str(value[0]) in ("calibrate", "epsilon") else ""
    ),
)
def test_mistakes_in_accounting_commands(arguments: list, parts: list[str], quietgrad: Run) -> None:
    common = ["--dataset-size", 1000, "--batch-size", 50, "--steps", 20]
    assert_one_error(quietgrad(*arguments, *common), *parts)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((100, 101, 5), ["batch_size=101 exceeds dataset_size=100"]),
        ((100, 0, 5), ["batch_size=0"]),
        ((100, 10, 0), ["steps=0"]),
        ((0, 10, 5), ["dataset_size=0"]),
    ],
    ids=str,
)
def test_mistakes_in_sizes(sizes: tuple[int, int, int], parts: list[str], quietgrad: Run) -> None:
    arguments = ["--dataset-size", sizes[0], "--batch-size", sizes[1], "--steps", sizes[2]]
    assert_one_error(quietgrad("calibrate", "--epsilon", 1, "--delta", 1e-5, *arguments), *parts)


def test_missing_and_damaged_ledgers(quietgrad: Run, tmp_path: Path) -> None:
    assert_one_error(quietgrad("epsilon", "--ledger", tmp_path / "none"), "no ledger there")
    assert_one_error(quietgrad("epsilon", "--ledger", tmp_path), "no ledger there")
    (tmp_path / "ledger.jsonl").write_text("{broken\n")
    assert_one_error(
        quietgrad("epsilon", "--ledger", tmp_path), "lacks its count file", "nothing can be claimed"
    )


def test_large_delta_is_refused(quietgrad: Run, settings, write_config: Config) -> None:
    sizes = ["--dataset-size", 100, "--batch-size", 10, "--steps", 5]
    outcome = quietgrad("epsilon", "--noise-multiplier", 1, "--delta", 0.01, *sizes, "--json")
    assert_one_error(
        outcome, "--delta=0.01 is not below 1/100", "less than 1/100 (the default is 0.0063)"
    )
    config = write_config(settings | {"privacy.target_delta": 0.5, "training.steps": 2})
    assert_one_error(quietgrad("train", config, "--json"), "target_delta=0.5 is not below 1/")


def test_interrupted_texts_have_no_line_breaks_in_errors(
    quietgrad: Run, settings, write_config: Config
) -> None:
    # A value with line breaks still gives one line.
    assert_one_error(
        quietgrad("train", write_config(settings | {"data.source": "a\nb.csv"})), "no such file"
    )


def test_labelled_texts_of_the_tests_are_learnable() -> None:
    assert {label for _, label in labelled_texts()} == {"good", "bad"}


def test_an_interruption_says_whether_anything_was_released(tmp_path: Path) -> None:
    from quietgrad.cli.training import _interrupted
    from quietgrad.training.files.run_dir import RunDir

    run_dir = RunDir(tmp_path)
    assert "before anything was released" in _interrupted(run_dir)
    run_dir.ledger.write_text("{}\n")
    assert f"--resume --set training.run_dir={tmp_path}" in _interrupted(run_dir)


@pytest.mark.parametrize(
    ("command", "stage", "said"),
    [
        ("train", "quietgrad.cli.training.prepare_shown", "before anything was released"),
        ("train", "quietgrad.cli.training.print_guarantee", "before anything was released"),
        ("plan", "quietgrad.cli.plan.prepare_shown", ""),
        ("compare", "quietgrad.comparing.table.load_comparison", "the same command goes on"),
    ],
)
def test_an_interruption_speaks_of_what_the_command_left(
    command: str,
    stage: str,
    said: str,
    quietgrad: Run,
    settings,
    write_config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`plan` and `predict` spoke of a ledger, and so did runs that had released nothing."""

    def stop(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    config = write_config(settings | {"training.steps": 2})
    if command == "compare":
        config.write_text(config.read_text() + "[comparison]\n[variants.baseline]\n")
    monkeypatch.setattr(stage, stop)
    code, _, err = quietgrad(command, config)
    assert code == 130 and err.count("\n") == 1 and err.startswith("error: interrupted")
    assert said in err and "ledger" not in err
    assert said or err == "error: interrupted\n"


@pytest.mark.parametrize("command", ["predict", "train"])
def test_output_that_nobody_reads_any_more(command: str) -> None:
    """`quietgrad predict ... --json | head` ended with an error; a run that stops still says it."""
    code = (
        "from quietgrad.cli.output import one_line\n"
        f"def run_{command}():\n"
        "    for _ in range(10_000):\n        print('x' * 1000)\n"
        f"one_line(run_{command})()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None and ran.stderr is not None
        assert ran.stdout.read(10) == "x" * 10
        ran.stdout.close()
        err = ran.stderr.read()
    assert (ran.returncode == 141) == (command == "predict") and ran.returncode
    assert ("ledger" in err) == (command == "train") and "Traceback" not in err


def test_a_refused_run_leaves_no_folder(
    quietgrad: Run, settings, write_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = settings | {"data.source": "none.csv", "training.run_dir": ""}
    assert_one_error(quietgrad("train", write_config(config)), "no such file")
    assert not (tmp_path / "runs").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    config["training.run_dir"] = str(mine)
    assert_one_error(quietgrad("train", write_config(config)), "no such file")
    assert mine.is_dir()  # it was there before


def test_labels_that_are_numbers(quietgrad: Run, settings, write_config, tmp_path) -> None:
    records = [(text, f"{i * 0.37:.3f}") for i, (text, _) in enumerate(labelled_texts(200))]
    file = write_records(tmp_path / "numbers.csv", records)
    config = write_config(settings | {"data.source": str(file)})
    assert_one_error(quietgrad("train", config), "different labels", "data.label")
