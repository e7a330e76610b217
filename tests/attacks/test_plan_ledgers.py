"""Attacks on what a ledger says of plans that change or go on, and of numbers beside the gradients:
what a course of settings does not count is refused, never counted low.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attacks.ledgers import CONFIG, RECORDS, plan_of, release
from quietgrad.accounting import epsilon
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.cli.app import app
from quietgrad.events import EventSequence, PoissonGaussian, SideRelease
from quietgrad.ledger import LedgerWriter, read_ledger
from quietgrad.schedules import Course, Linear, Schedules, StepSettings

BESIDE = [
    {"training_loss": TrainingLoss(own_noise=0.5)},
    {"adaptive_clipping": AdaptiveClipping(own_noise=0.5, every=2)},
]


@pytest.mark.parametrize("beside", BESIDE)
def test_the_cost_of_more_steps_is_not_told_without_the_numbers_beside(
    tmp_path: Path, beside
) -> None:
    """Before: ``quietgrad plan RUN_DIR --extend-steps 1`` told 0.65 of a run at 10.6."""
    with plan_of(**beside).start(tmp_path / "ledger.jsonl") as run:
        for _ in range(4):
            release(run)
    asked = CliRunner().invoke(app, ["plan", str(tmp_path), "--extend-steps", "1", "--json"])
    assert asked.exit_code != 0 and "epsilon" not in asked.stdout
    said = str(asked.exception) + asked.output
    assert "whose steps are all alike" in " ".join(said.split()) or "all alike" in said


def test_a_ledger_with_numbers_beside_has_no_extension_and_no_course(tmp_path: Path) -> None:
    plan, path = plan_of(**BESIDE[0]), tmp_path / "ledger.jsonl"
    with plan.start(path) as run:
        release(run)
    more = Course(((3, StepSettings(1.1, 0.1, 1.0)),))
    with LedgerWriter(path) as writer:
        writer.extension(more)
        writer.release(1)
    with pytest.raises(ValueError, match="numbers beside the gradients that it does not count"):
        read_ledger(path)
    event = PoissonGaussian(1.1, 0.1, 1, beside=(SideRelease("training-loss", 0.5),))
    other = tmp_path / "other.jsonl"
    with LedgerWriter(other) as writer:
        writer.mechanism(event, more.then(Course(((1, StepSettings(9.0, 0.1, 1.0)),))))
    with pytest.raises(ValueError, match="a course of settings, and numbers beside"):
        read_ledger(other)


def test_a_plain_release_is_not_counted_at_an_extension_s_own_settings(tmp_path: Path) -> None:
    """A release without settings is at the mechanism line's; an extension that says less loss for
    it does not belong to the run.
    """
    path = tmp_path / "ledger.jsonl"
    with plan_of().start(path) as run:
        for _ in range(CONFIG.steps or 0):
            release(run)
    with LedgerWriter(path) as writer:
        writer.extension(Course(((3, StepSettings(99.0, 0.1, 1.0)),)))
        writer.release(CONFIG.steps or 0)
    with pytest.raises(ValueError, match="has other settings than were planned"):
        read_ledger(path)
    plain = tmp_path / "plain.jsonl"
    with plan_of().start(plain) as run:
        release(run)
    with plan_of().extended(steps=3).start(plain) as run:
        for _ in range(run.plan.steps - 1):
            release(run)
    assert read_ledger(plain).event == replace(plan_of().event, steps=(CONFIG.steps or 0) + 3)
    assert RECORDS


def test_a_torn_line_after_the_last_step_counts_at_the_worst_settings(tmp_path: Path) -> None:
    """Nobody knows what it was; a mutant counted it as nothing."""
    path = tmp_path / "ledger.jsonl"
    plan = plan_of(schedules=Schedules(noise=Linear(1.0, 3.0), batch_size=Linear(1.0, 2.0)))
    with plan.start(path) as run:
        for _ in range(plan.steps):
            release(run)
    path.write_bytes(path.read_bytes() + b'{"line": 9')
    torn = read_ledger(path)
    assert torn.releases == plan.steps + 1 and isinstance(torn.event, EventSequence)
    worst = plan.whole_course.least_noise, plan.whole_course.highest_rate
    assert (torn.event.events[-1].noise_multiplier, torn.event.events[-1].sample_rate) == worst
    assert epsilon(torn.event, plan.delta) > plan.epsilon


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 2.0},
        {"noise_multiplier": 1.2},
        {"steps": 13},
        {"expected_batch_size": 9},
        {"target_delta": 1e-3},
        {"data_are_public": True},
        {"estimator": "hutch"},
        {"bands": 3},
    ],
    ids=str,
)
def test_no_setting_of_the_mechanism_changes_on_a_resume(tmp_path: Path, changes) -> None:
    """A mutant went on with another clipping norm than the ledger states."""
    with plan_of().start(tmp_path / "ledger.jsonl") as run:
        release(run)
    with pytest.raises(ValueError, match="resume with a changed privacy setting"):
        plan_of(**changes).start(tmp_path / "ledger.jsonl")
