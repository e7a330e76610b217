"""One ledger that moves between doors: a loop, a Trainer, a Lightning module, `quietgrad train`.
Whoever goes on counts all releases, or says what to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lightning_modules
import private_trainers
import pytest
import torch
import torch.nn.functional as F
from lightning_modules import ADVICE, Small
from torch import Tensor, nn

from quietgrad.accounting import epsilon
from quietgrad.ledger import read_ledger
from quietgrad.training.files.run_dir import RunDir

pytestmark = [
    *ADVICE,
    pytest.mark.usefixtures("examined_once"),
    pytest.mark.filterwarnings("ignore:.*holds no whole checkpoint of its run"),
]
PLAN = replace(private_trainers.PRIVACY, seed=None, data_are_public=False)
STEPS = private_trainers.STEPS


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_loop(folder: Path, stop: int) -> None:
    model, records = Small(), lightning_modules.records()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with PLAN.build(len(records)).start(folder / "ledger.jsonl", folder / "secrets.json") as run:
        for batch in run.loader(records, steps=stop - run.released):
            run.backward(model, loss, batch)
            optimizer.step()
            optimizer.zero_grad()


def by_trainer(folder: Path, stop: int) -> None:
    goes_on = (folder / "ledger.jsonl").exists()
    ends = [] if stop == STEPS else [private_trainers.StopAt(stop, crash=True)]
    trainer = private_trainers.trainer(folder, privacy=PLAN, callbacks=ends)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=goes_on)


def by_lightning(folder: Path, stop: int) -> None:
    ends = [] if stop == STEPS else [lightning_modules.StopAt(stop, crash=True)]
    trainer = lightning_modules.trainer(folder, callbacks=ends)
    with contextlib.suppress(InterruptedError):
        trainer.fit(Small(privacy=PLAN), lightning_modules.records())


@pytest.mark.parametrize(
    ("first", "then"),
    [(by_loop, by_trainer), (by_trainer, by_loop), (by_lightning, by_loop)],
)
def test_who_goes_on_with_a_ledger_counts_what_others_released(
    first: Callable[[Path, int], None], then: Callable[[Path, int], None], tmp_path: Path
) -> None:
    first(tmp_path, 3)
    assert read_ledger(tmp_path).releases == 3
    then(tmp_path, STEPS)
    found = read_ledger(tmp_path)
    assert found.releases == STEPS and [start.step for start in found.sessions] == [0, 3]
    plan = PLAN.build(100)
    assert found.event is not None
    assert epsilon(found.event, plan.delta) == pytest.approx(plan.epsilon)


@pytest.mark.parametrize("then", [by_lightning])
def test_a_door_that_would_begin_says_that_there_is_a_run(
    then: Callable[[Path, int], None], tmp_path: Path
) -> None:
    by_loop(tmp_path, 3)
    with pytest.raises(ValueError, match=r"holds a private run already.*epsilons of two runs"):
        then(tmp_path, STEPS)
    assert read_ledger(tmp_path).releases == 3


def test_the_command_does_not_say_that_a_loop_released_nothing(tmp_path: Path) -> None:
    """Before: "holds no run to resume: nothing was released", and to start without --resume."""
    by_loop(tmp_path, 3)
    with pytest.raises(ValueError, match=r"did not begin.*its ledger counts on.*epsilons"):
        RunDir(tmp_path).require_state(resume=True)
    with pytest.raises(ValueError, match="already holds a run"):
        RunDir(tmp_path).require_state(resume=False)
