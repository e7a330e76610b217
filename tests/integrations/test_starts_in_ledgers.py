"""Where a private start is accepted by name, all of it is found and named: what a file says of its
run, and copies of what others of this process trained. The ledger says it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import private_trainers
import pytest
import torch
from lightning_modules import ADVICE, Small, records
from lightning_modules import trainer as lightning_trainer

from quietgrad import PrivacyConfig
from quietgrad.ledger import LedgerWriter, read_ledger

OWN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=2)
LONGER = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=3)
ADDING: dict[str, Any] = {"privacy": OWN, "accept_start": "epsilons-add"}
pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]


def steps_in(folder: Path) -> list[int]:
    return [one["steps"] for one in read_ledger(folder).started_from]


def test_a_private_file_hides_no_copy_of_a_third_run(tmp_path: Path) -> None:
    """Before: where the file's own start was accepted nothing else was looked for, and the third
    run's epsilon was told nowhere.
    """
    first = private_trainers.trainer(tmp_path / "one", privacy=OWN)
    first.train()
    first.save_model(str(tmp_path / "saved"))
    third: Any = private_trainers.classifier()
    private_trainers.trainer(tmp_path / "three", model=third, privacy=LONGER).train()
    model = type(third).from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.copy_(
            third.bert.embeddings.word_embeddings.weight
        )
    second = private_trainers.trainer(tmp_path / "two", model=model, **ADDING)
    assert sorted(one["steps"] for one in second._session.started_from) == [2, 3]
    second.train()
    assert sorted(steps_in(tmp_path / "two")) == [2, 3]


def test_the_run_of_a_file_is_told_once(tmp_path: Path) -> None:
    """Its weights are copies of what it trained here; it has the name that the file says."""
    first = private_trainers.trainer(tmp_path / "one", privacy=OWN)
    first.train()
    first.save_model(str(tmp_path / "saved"))
    model = type(first.model).from_pretrained(tmp_path / "saved")
    stopping = [private_trainers.StopAt(1)]
    second = private_trainers.trainer(tmp_path / "two", model=model, callbacks=stopping, **ADDING)
    second.train()
    assert steps_in(tmp_path / "two") == [2]
    assert "run" in second._session.started_from[0]
    again = private_trainers.trainer(tmp_path / "two", model=second.model, **ADDING)
    again.train(resume_from_checkpoint=True)
    assert steps_in(tmp_path / "two") == [2]


def test_a_lightning_checkpoint_hides_no_copy_either(tmp_path: Path) -> None:
    saving = lightning_trainer(tmp_path / "one", enable_checkpointing=True)
    saving.fit(Small(privacy=OWN), records())
    saving.save_checkpoint(tmp_path / "one.ckpt")
    third = Small(privacy=LONGER)
    lightning_trainer(tmp_path / "three").fit(third, records())
    module = Small.load_from_checkpoint(tmp_path / "one.ckpt", privacy=OWN)
    module.accept_start = "epsilons-add"
    with torch.no_grad():
        module.net[0].weight.copy_(third.net[0].weight)
    lightning_trainer(tmp_path / "two").fit(module, records())
    assert sorted(steps_in(tmp_path / "two")) == [2, 3]
    told = module._loaded_record["started_from"]  # type: ignore[index]
    assert sorted(one["steps"] for one in told) == [2, 3]

    alone = Small.load_from_checkpoint(tmp_path / "one.ckpt", privacy=OWN)
    alone.accept_start = "epsilons-add"
    lightning_trainer(tmp_path / "four").fit(alone, records())
    assert steps_in(tmp_path / "four") == [2]


def test_no_door_goes_on_with_a_run_that_gave_up_its_privacy(tmp_path: Path) -> None:
    """Before: weights that a Trainer saved said the epsilon of a run with privacy."""
    stopping = [private_trainers.StopAt(1)]
    first = private_trainers.trainer(tmp_path / "one", privacy=OWN, callbacks=stopping)
    first.train()
    with LedgerWriter(tmp_path / "one" / "ledger.jsonl", resume=True) as ledger:
        ledger.not_private("a look inside")
    again = private_trainers.trainer(tmp_path / "one", model=first.model, privacy=OWN)
    with pytest.raises(ValueError, match=r"gave up its privacy \(a look inside\)"):
        again.train(resume_from_checkpoint=True)
    assert read_ledger(tmp_path / "one").releases == 1
