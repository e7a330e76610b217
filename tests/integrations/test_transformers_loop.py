"""PrivateTrainer is the loop of docs/loops.md: the same weights to the bit, also after a stop."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_trainers import (
    PRIVACY,
    RATE,
    STEPS,
    StopAt,
    classifier,
    plain_loop,
    records,
    same_weights,
    trainer,
)
from transformers import TrainerCallback

from quietgrad import PrivacyConfig
from quietgrad.checks import RoundingWarning
from quietgrad.ledger import read_ledger

pytestmark = pytest.mark.usefixtures("examined_once")


@cache
def plain(**loop: Any) -> torch.nn.Module:
    """What the plain loop ends with: seeded, so the same for every test."""
    return plain_loop(classifier(), **loop)


@pytest.mark.grid(3, "settings of one loop, of which each is a training and its plain twin")
@pytest.mark.parametrize(
    ("changes", "loop"),
    [
        ({}, {}),
        ({"per_device_train_batch_size": 3}, {"physical": 3}),
        ({"dataloader_num_workers": 1}, {"workers": 1}),
        ({"bf16": True}, {"bf16": True}),
        ({"torch_compile": True}, {}),  # clipping runs uncompiled
    ],
    ids=["plain", "micro-batches", "workers", "bf16", "compiled"],
)
def test_the_weights_are_those_of_the_plain_loop(
    tmp_path: Path, changes: dict[str, Any], loop: dict[str, Any]
) -> None:
    trained = trainer(tmp_path, **changes)
    done = trained.train()
    assert done.global_step == trained.plan.steps == STEPS
    assert same_weights(trained.model, plain(**loop))
    assert not same_weights(trained.model, classifier())


def test_half_precision_on_private_records_is_warned_of(tmp_path: Path) -> None:
    private = PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, steps=1)
    with pytest.warns(RoundingWarning, match=r"bf16=True rounds coarsely.*bf16=False has a bound"):
        trainer(tmp_path / "half", privacy=private, bf16=True).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundingWarning)
        trainer(tmp_path / "whole", privacy=private).train()


def test_evaluation_logs_and_checkpoints_in_between_change_nothing(tmp_path: Path) -> None:
    trained = trainer(
        tmp_path,
        eval_dataset=records(20, seed=1),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
    )
    trained.train()
    assert same_weights(trained.model, plain())


@pytest.mark.parametrize("stop", [3, 5], ids=["in an epoch", "between epochs"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    first = trainer(tmp_path, callbacks=[StopAt(stop)], save_strategy="steps")
    first.train()
    assert first.state.global_step == stop
    assert 0 < first.epsilon() < first.plan.epsilon
    again = trainer(tmp_path, save_strategy="steps")
    done = again.train(resume_from_checkpoint=True)
    assert done.global_step == STEPS and again.state.epoch == 2.0
    assert same_weights(again.model, plain())
    assert read_ledger(tmp_path / "ledger.jsonl").releases == STEPS
    assert again.epsilon() == again.plan.epsilon <= 3.0


class Rates(TrainerCallback):
    """Learning rate and epoch after each step."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step] = kwargs["lr_scheduler"].get_last_lr()[0], state.epoch


@pytest.mark.parametrize("saved", [True, False], ids=["a checkpoint", "no checkpoint"])
def test_steps_lost_in_a_crash_are_spent(tmp_path: Path, saved: bool) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2} if saved else {}
    first = trainer(tmp_path, callbacks=[StopAt(7, crash=True)], **saving)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    rates = Rates()
    again = trainer(tmp_path, callbacks=[rates], **saving)
    if saved:
        again.train(resume_from_checkpoint=True)
    else:
        with pytest.warns(UserWarning, match="training begins anew, after the 7 releases"):
            again.train(resume_from_checkpoint=True)
    assert sorted(rates.seen) == [8, 9, 10]
    for step, (rate, epoch) in rates.seen.items():  # schedule and epoch count releases
        assert rate == pytest.approx(RATE * (1 - step / STEPS))
        assert epoch == pytest.approx(step / 5)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == STEPS
    assert again.epsilon() == again.plan.epsilon


def test_workers_that_stay_are_let_go_at_the_end(tmp_path: Path) -> None:
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    evaluation = {"eval_dataset": records(20, seed=1), "eval_strategy": "epoch"}
    first = trainer(tmp_path, callbacks=[StopAt(7)], save_strategy="steps", **workers, **evaluation)
    first.train()
    again = trainer(tmp_path, **workers)  # the first one's would hold the directory's lock
    assert again.train(resume_from_checkpoint=True).global_step == STEPS


def test_a_finished_run_has_nothing_left_to_release(tmp_path: Path) -> None:
    first = trainer(tmp_path, save_strategy="epoch")
    first.train()
    again = trainer(tmp_path, save_strategy="epoch")
    assert again.train(resume_from_checkpoint=True).global_step == STEPS
    assert same_weights(again.model, first.model)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == STEPS


def test_epsilon_is_the_plans(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    assert trained.epsilon() == 0.0
    trained.train()
    assert trained.epsilon() == PRIVACY.build(100).epsilon == trained.plan.epsilon


def test_trainers_own_clipping_has_no_effect(tmp_path: Path) -> None:
    trained = trainer(tmp_path, max_grad_norm=0.0)
    trained.train()
    assert same_weights(trained.model, plain())


def test_adapters_train_and_nothing_else(tmp_path: Path) -> None:
    def adapted() -> Any:
        torch.manual_seed(8)
        return get_peft_model(
            classifier(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
        )

    trained = trainer(tmp_path, model=adapted(), save_strategy="epoch")
    trained.train()
    moved = {
        name
        for name, value in adapted().state_dict().items()
        if not torch.equal(value, trained.model.state_dict()[name])
    }
    assert moved and all("lora" in name or "classifier" in name for name in moved)
    assert (tmp_path / "checkpoint-10" / "adapter_model.safetensors").is_file()


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    trained = trainer(tmp_path, model=classifier(0.0), activation_checkpointing=True)
    trained.train()
    expected = plain_loop(classifier(0.0)).state_dict()
    for name, value in trained.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_a_model_made_by_model_init_is_trained(tmp_path: Path) -> None:
    trained = trainer(tmp_path, model_init=lambda: classifier())
    trained.train()
    assert same_weights(trained.model, plain())


def test_the_public_generator_is_left_where_it_was(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    torch.manual_seed(11)
    trained.train()
    drawn = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(drawn, torch.rand(3))
