"""Trainer on several processes, each with the whole model: one run, one ledger, and the weights of
one process, to the bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from private_trainers import PRIVACY, STEPS, classifier, records, trainer
from processes import on_processes
from transformers import TrainerCallback

from quietgrad.ledger import read_ledger

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("first_looks_alone")]
Weights = dict[str, torch.Tensor]


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def trained(
    output: str, resume: bool = False, stop_at: int = 0, **changes: Any
) -> tuple[Weights, list[dict[str, Any]], float]:
    """Weights in float64, the log, and epsilon."""
    torch.manual_seed(0)
    model = classifier(dropout=0.0).double()
    callbacks = [StopAt(stop_at)] if stop_at else None
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch"} | changes
    made = trainer(
        Path(output), model=model, callbacks=callbacks, eval_dataset=records(16, 1), **settings
    )
    made.train(resume_from_checkpoint=resume)
    weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
    return weights, made.state.log_history, made.epsilon()


def equal(found: Weights, expected: Weights) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_two_processes_end_with_the_weights_of_one(tmp_path: Path) -> None:
    ((alone, log, epsilon),) = on_processes(1, tmp_path / "a", trained, str(tmp_path / "alone"))
    ranks = on_processes(2, tmp_path / "b", trained, str(tmp_path / "both"))
    for found in ranks:
        assert not isinstance(found, str), found
        equal(found[0], alone)
        assert found[2] == epsilon
    assert read_ledger(tmp_path / "both" / "ledger.jsonl").releases == STEPS
    assert len((tmp_path / "both" / "ledger.jsonl").read_text().splitlines()) == len(
        (tmp_path / "alone" / "ledger.jsonl").read_text().splitlines()
    )
    last = tmp_path / "both" / f"checkpoint-{STEPS}"
    assert json.loads((last / "quietgrad_release.json").read_text())["releases"] == STEPS
    assert not (tmp_path / "both" / "secrets.json").exists()
    # Trainer multiplies the loss of evaluation records by the number of processes.
    losses = [
        [line["eval_loss"] for line in of if "eval_loss" in line] for of in (log, ranks[0][1])
    ]
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert not any({"loss", "grad_norm", "total_flos"} & set(line) for line in ranks[1][1])


def test_a_run_of_two_processes_goes_on_with_one_and_the_other_way(tmp_path: Path) -> None:
    expected = on_processes(1, tmp_path / "a", trained, str(tmp_path / "whole"))[0][0]
    for first, then in ((2, 1), (1, 2)):
        place = str(tmp_path / f"{first}-{then}")
        stopped = on_processes(first, tmp_path / f"s{first}", trained, place, False, 4)
        assert not any(isinstance(found, str) for found in stopped), stopped
        assert read_ledger(Path(place, "ledger.jsonl")).releases == 4
        for found in on_processes(then, tmp_path / f"r{first}", trained, place, True):
            assert not isinstance(found, str), found
            equal(found[0], expected)


def test_what_the_first_process_refuses_is_refused_by_all(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    for found in on_processes(2, tmp_path / "a", trained, place, True):
        assert "holds no ledger" in found
    on_processes(2, tmp_path / "b", trained, place, False, 2)
    for found in on_processes(2, tmp_path / "c", trained, place):
        assert "holds a private run already" in found


def test_processes_that_start_from_other_weights_are_one_run(tmp_path: Path) -> None:
    """DistributedDataParallel sends the first one's to all before training begins."""

    def other_weights() -> Any:
        model = classifier(dropout=0.0).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(int(os.environ["RANK"]))
        made = trainer(tmp_path / "run", model=model)
        made.train()
        return {name: t.detach().clone() for name, t in model.state_dict().items()}

    first, second = on_processes(2, tmp_path / "a", other_weights)
    assert not isinstance(first, str) and not isinstance(second, str), (first, second)
    equal(first, second)


def test_dropout_and_half_precision_run(tmp_path: Path) -> None:
    def run() -> Any:
        made = trainer(tmp_path / "run", model=classifier(0.1), bf16=True)
        made.train()
        return made.state.global_step

    assert on_processes(2, tmp_path / "a", run) == [STEPS, STEPS]


def test_epsilon_is_that_of_the_plan(tmp_path: Path) -> None:
    plan = PRIVACY.build(len(records()))
    found = on_processes(2, tmp_path / "a", trained, str(tmp_path / "run"))
    assert [one[2] for one in found] == [pytest.approx(plan.epsilon)] * 2
