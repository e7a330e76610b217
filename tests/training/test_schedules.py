"""Runs from files whose settings change: trained, stopped, resumed and extended on the command
line, with one epsilon in ledger, result, card and ``quietgrad epsilon``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import config_of, interrupt_at, train

from quietgrad.accounting import epsilon
from quietgrad.accounting.rounding import round_up
from quietgrad.ledger import read_ledger
from quietgrad.training import runner
from quietgrad.training.extending import Extend, extended
from quietgrad.training.prepare import prepare

SCHEDULES: dict[str, Any] = {
    "schedules.noise": {"shape": "cosine", "first": 2.0, "last": 1.0},
    "schedules.clipping_norm": {"shape": "linear", "last": 0.5},
    "schedules.batch_size": {"shape": "step", "factors": [1, 1.5], "begins": [3]},
}


@pytest.mark.parametrize("method", ["independent", "banded"])
def test_a_scheduled_run_stops_resumes_and_tells_one_epsilon(
    settings: dict[str, Any], quietgrad: Any, method: str
) -> None:
    noise = {"noise.method": method} | ({"noise.bands": 2} if method == "banded" else {})
    values = (
        settings | SCHEDULES | noise | {"data.public": False, "training.expected_batch_size": 16}
    )
    prepared, first, run_dir = train(values, report=interrupt_at(4))
    assert first.interrupted and prepared.plan is not None
    code, out, err = quietgrad("epsilon", "--ledger", run_dir.path, "--json")
    assert code == 0, err
    assert json.loads(out)["epsilon"] == first.result["epsilon"]
    _, second, _ = train(values, resume=True)
    result = second.result
    assert result["epsilon"] == prepared.plan.epsilon <= 4.0
    assert result["course"] == prepared.plan.course.to_json()
    assert epsilon(read_ledger(run_dir.path).event, result["delta"]) == result["epsilon"]
    card = (run_dir.model / "README.md").read_text()
    assert f"= ({round_up(result['epsilon'], 4)}, " in card and "by a public schedule" in card
    assert run_dir.read_metrics()[-1]["epsilon"] == result["epsilon"]
    with pytest.raises(
        ValueError, match=r"changed privacy setting: schedules\.noise\.last was 1\.0 and is"
    ):
        train(values | {"schedules.noise": {"shape": "cosine", "first": 2, "last": 1.5}}, True)


def test_without_privacy_the_batches_change_too(settings: dict[str, Any]) -> None:
    prepared, outcome, _ = train(settings | SCHEDULES | {"privacy.enabled": False})
    assert not outcome.interrupted
    sizes = [prepared.batch_size_at(t) for t in range(6)]
    assert sizes == pytest.approx([24.0] * 3 + [36.0] * 3)


def test_a_run_is_extended_on_the_command_line(
    settings: dict[str, Any], quietgrad: Any, write_config: Any
) -> None:
    run_dir = Path(settings["training.run_dir"])
    config = write_config(settings)
    assert quietgrad("train", config)[0] == 0
    before = json.loads((run_dir / "result.json").read_text())
    ask = ("plan", run_dir, "--extend-steps", 4)
    code, out, err = quietgrad(*ask, "--json")
    told = json.loads(out)
    assert code == 0, err
    assert told["epsilon"] > 4.0 >= told["epsilon_planned"] == before["epsilon"]
    assert (told["steps"], told["extension_steps"], told["within_target"]) == (10, 4, False)
    shown = quietgrad(*ask)[1]
    assert "above the target of 4" in shown and "--extend-to-epsilon" in shown
    declared = before["data_declared_public"]
    assert told.get("data_declared_public", False) is declared
    assert ("were declared public" in " ".join(shown.split())) is declared
    resume = ("train", config, "--resume", "--extend-steps", 4)
    code, _, err = quietgrad(*resume)
    assert code == 2 and "above the plan's target of 4" in err
    assert read_ledger(run_dir).extensions == ()  # nothing was done
    code, _, err = quietgrad("train", config, "--resume", "--extend-to-epsilon", 9)
    assert code == 2 and "a new target alone" in err and "--extend-steps" in err
    code, out, err = quietgrad(*resume, "--extend-to-epsilon", 9, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["epsilon"] == told["epsilon"] and result["steps"] == 10
    assert result["extended_by"] == [4] and read_ledger(run_dir).releases == 10
    # without the options: the ledger has the extension, and nothing is left to do
    code, out, err = quietgrad("train", config, "--resume", "--json")
    assert code == 0 and json.loads(out)["epsilon"] == told["epsilon"], err
    code, out, err = quietgrad("epsilon", "--ledger", run_dir, "--json")
    assert json.loads(out)["epsilon"] == told["epsilon"]
    again = json.loads(quietgrad("plan", run_dir, "--extend-epochs", 1, "--json")[1])
    assert again["target_epsilon"] == 9 and again["epsilon_spent"] == told["epsilon"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--extend-steps", 3, "--extend-epochs", 1), "--extend-steps=3 and --extend-epochs=1 are"),
        (("--extend-steps", -3), "--extend-steps=-3 must be positive"),
        (("--extend-epochs", 0), "--extend-epochs=0 must be positive"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_an_extension_of_no_length_is_refused_in_words_of_the_options(
    quietgrad: Any, tmp_path: Path, command: str, options: tuple[Any, ...], message: str
) -> None:
    """Before: "steps=3 and epochs=1.0", after the records were read and noise was calibrated."""
    asked = ("plan", tmp_path) if command == "plan" else ("train", "--resume")
    code, _, err = quietgrad(*asked, *options)
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and message in last and "reading" not in err


def test_an_end_before_the_extension_says_nothing_of_what_comes_after(
    settings: dict[str, Any], quietgrad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a kill in an extended run left the first end's epsilon in result.json, and a kill
    while it saved left new weights beside the old epsilon.
    """
    _, first, run_dir = train(settings)
    config = config_of(settings)

    def go_on(report: Any) -> runner.Outcome:
        more = Extend() if read_ledger(run_dir.path).extensions else Extend(4, None, 9.0)
        longer = prepare(config, extend=lambda plan: extended(plan, run_dir, more))
        return runner.train(longer, run_dir, True, report)

    described, weights = run_dir.model / "quietgrad.json", run_dir.model / "model.safetensors"
    before = described.read_bytes(), weights.read_bytes()
    assert go_on(interrupt_at(8)).interrupted and not run_dir.result.exists()
    (listed,) = json.loads(quietgrad("runs", run_dir.path, "--json")[1])["runs"]
    assert (listed["status"], listed["steps"], listed["planned"]) == ("unfinished", 8, 10)
    assert listed["epsilon"] > first.result["epsilon"]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr("quietgrad.training.tasks.text.saved.stamp_weights", killed)
        with pytest.raises(KeyboardInterrupt):
            go_on(lambda progress: None)
    assert (described.read_bytes(), weights.read_bytes()) == before
    ended = go_on(lambda progress: None)
    assert ended.made == 0 and ended.result["epsilon"] > first.result["epsilon"]
    assert json.loads(described.read_text())["quietgrad_trained_on"]["steps"] == 10
    assert weights.read_bytes() != before[1] and not (run_dir.path / "model.writing").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "--extend-steps", 4), "add --resume"),
        (("plan", "--extend-steps", 4), "give its directory"),
        (("plan", "nowhere", "--extend-steps", 4), "no ledger there"),
    ],
)
def test_extensions_that_make_no_sense(quietgrad: Any, arguments, told) -> None:
    code, _, err = quietgrad(*arguments)
    assert code == 2 and told in err


def test_phases_of_a_file_are_calibrated_together(settings: dict[str, Any]) -> None:
    values = {k: v for k, v in settings.items() if k != "training.steps"}
    phases = [{"steps": 2, "noise": 2.0}, {"steps": 3, "batch_size": 1.5}]
    plan = prepare(config_of(values | {"schedules.phases": phases})).plan
    assert plan is not None and plan.phase_lengths == (2, 3) and 3.9 <= plan.epsilon <= 4.0
    with pytest.raises(ValueError, match="steps=6 with phases: each phase says its own"):
        prepare(config_of(settings | {"schedules.phases": phases}))


def test_a_schedule_says_what_it_is_a_factor_on(settings: dict[str, Any]) -> None:
    # Who writes --set batch_size=200 means the batch: the key without its table is the factor's.
    open_sizes = {k: v for k, v in settings.items() if k != "training.expected_batch_size"}
    with pytest.raises(ValueError, match=r"was training\.expected_batch_size=200 meant\?"):
        prepare(config_of(open_sizes | {"schedules.batch_size": 200}))
    with pytest.raises(
        ValueError, match=r"schedules\.noise=.* needs training\.expected_batch_size"
    ):
        prepare(config_of(open_sizes | {"schedules.noise": 2.0}))
    open_steps = {k: v for k, v in settings.items() if k != "training.steps"}
    with pytest.raises(ValueError, match=r"needs training\.steps or training\.epochs"):
        prepare(config_of(open_steps | {"schedules.noise": 2.0}))
