"""``privacy=`` may be a plan: one that was built, and one that was extended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_trainers import (
    PRIVACY,
    RATE,
    STEPS,
    StopAt,
    arguments,
    bert_loss,
    classifier,
    llama,
    pairs,
    records,
    same_weights,
    tokenizer,
    trainer,
)
from transformers import default_data_collator

pytest.importorskip("trl", reason="needs the extra trl")

from trl import DPOConfig, SFTConfig

from quietgrad import PrivacyConfig, Users
from quietgrad.integrations.transformers import PrivateDPOTrainer, PrivateSFTTrainer
from quietgrad.ledger import read_ledger
from quietgrad.schedules import Phase

pytestmark = pytest.mark.usefixtures("examined_once")

MORE = 4  # steps, which end within an epoch of five
CONSTANT = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1000}


def loops(folder: Path) -> torch.nn.Module:
    """Two plain loops over one ledger, the second by the extended plan."""
    model, plan = classifier(), PRIVACY.build(100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    model.train()
    for one in (plan, plan.extended(steps=MORE, target_epsilon=6.0)):
        with one.start(folder / "ledger.jsonl") as run:
            loader = run.loader(
                records(), physical_batch_size=8, collate_fn=default_data_collator, steps=one.steps
            )
            for batch in loader:
                torch.manual_seed(run.model_seed())
                run.backward(model, bert_loss, batch)
                optimizer.step()
                optimizer.zero_grad()
    return model


def test_a_plan_trains_as_its_configuration(tmp_path: Path) -> None:
    first = trainer(tmp_path / "config")
    other = trainer(tmp_path / "plan", privacy=PRIVACY.build(100))
    first.train()
    other.train()
    assert same_weights(first.model, other.model) and first.epsilon() == other.epsilon()


@pytest.mark.parametrize("stop", [None, 7], ids=["finished", "stopped"])
def test_an_extended_plan_goes_on_into_its_new_phase(tmp_path: Path, stop: int | None) -> None:
    plan = PRIVACY.build(100)
    callbacks = [] if stop is None else [StopAt(stop)]
    first = trainer(tmp_path / "run", privacy=plan, callbacks=callbacks, **CONSTANT)
    first.train()
    longer = plan.extended(steps=MORE, target_epsilon=6.0)
    again = trainer(tmp_path / "run", privacy=longer, **CONSTANT)
    done = again.train(resume_from_checkpoint=True)
    assert done.global_step == STEPS + MORE and again.state.max_steps == STEPS + MORE
    assert again.state.epoch == pytest.approx((STEPS + MORE) / 5)
    (tmp_path / "loops").mkdir()
    assert same_weights(again.model, loops(tmp_path / "loops"))
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert ledger.releases == STEPS + MORE
    assert [extension.course.steps for extension in ledger.extensions] == [MORE]
    assert plan.epsilon < again.epsilon() == longer.epsilon <= 6.0
    # And once more, in the same directory.
    twice = longer.extended(epochs=1, target_epsilon=7.0)
    third = trainer(tmp_path / "run", privacy=twice, **CONSTANT)
    assert third.train(resume_from_checkpoint=True).global_step == twice.steps
    assert third.epsilon() == twice.epsilon


def test_an_extended_plan_has_a_run_to_go_on_with(tmp_path: Path) -> None:
    longer = PRIVACY.build(100).extended(steps=MORE, target_epsilon=6.0)
    with pytest.raises(ValueError, match="is one with steps on top of a run's"):
        trainer(tmp_path, privacy=longer).train()
    with pytest.raises(ValueError, match="holds no ledger"):
        trainer(tmp_path, privacy=longer).train(resume_from_checkpoint=True)
    trainer(tmp_path, privacy=longer)  # nothing was begun by either
    first = trainer(tmp_path / "run", save_strategy="epoch")
    first.train()
    with pytest.raises(ValueError, match="holds a private run already"):
        trainer(tmp_path / "run", privacy=longer).train()
    other = replace(PRIVACY, max_grad_norm=0.5).build(100).extended(steps=1, target_epsilon=6.0)
    with pytest.raises(ValueError, match="changed privacy setting"):
        trainer(tmp_path / "run", privacy=other).train(resume_from_checkpoint=True)
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").releases == STEPS


def test_phases_may_be_extended(tmp_path: Path) -> None:
    config = replace(PRIVACY, epochs=None, phases=(Phase(steps=2), Phase(steps=2, noise=2.0)))
    plan = config.build(100)
    trainer(tmp_path, privacy=plan, **CONSTANT).train()
    longer = plan.extended(steps=2, target_epsilon=9.0)
    again = trainer(tmp_path, privacy=longer, **CONSTANT)
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert again.epsilon() == longer.epsilon > plan.epsilon


OWNERS = [f"user {i % 25}" for i in range(100)]
OTHERS = [f"user {i % 25}" for i in range(99)] + ["user 0"]


@pytest.mark.parametrize(
    ("privacy", "owners", "message"),
    [
        (lambda: PRIVACY.build(99), None, "a plan for 99 records, and train_dataset has 100"),
        (lambda: PRIVACY.build(100), OWNERS, "record_owner with a plan that protects single"),
        (lambda: OF_USERS.build(100, record_owner=OWNERS), None, "nothing says here whose"),
        (lambda: OF_USERS.build(100, record_owner=OWNERS), OTHERS, "built with other owners"),
        (lambda: OF_USERS.build(100, record_owner=OWNERS), OWNERS[:99], "built with other owners"),
        (lambda: OF_USERS.build(99, record_owner=OWNERS[:99]), OWNERS, "built with other owners"),
    ],
    ids=["size", "records", "no owners", "other owners", "fewer owners", "fewer records"],
)
def test_a_plan_for_other_records_is_refused(
    privacy: Any, owners: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, privacy=privacy(), record_owner=owners)


OF_USERS = replace(PRIVACY, users=Users(records_per_user=2), expected_batch_size=10)


def test_a_plan_of_users_trains_as_its_configuration(tmp_path: Path) -> None:
    plan = OF_USERS.build(100, record_owner=OWNERS)
    made = [
        trainer(tmp_path / name, privacy=privacy, record_owner=OWNERS, max_steps=plan.steps)
        for name, privacy in (("config", OF_USERS), ("plan", plan))
    ]
    for one in made:
        one.train()
    assert same_weights(made[0].model, made[1].model)


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match="privacy is of type float, neither a configuration nor a plan"
    ):
        trainer(tmp_path, privacy=3.0)


@pytest.mark.parametrize("kind", [PrivateSFTTrainer, PrivateDPOTrainer])
def test_language_models_go_on_too(kind: Any, tmp_path: Path) -> None:
    data, settings = pairs(40), SFTConfig
    if kind is PrivateDPOTrainer:
        data = data.rename_column("completion", "chosen").add_column("rejected", ["e f"] * 40)
        settings = DPOConfig
    plan = PrivacyConfig(
        target_epsilon=3.0, expected_batch_size=10, steps=2, seed=1, data_are_public=True
    ).build(40)

    def made(privacy: Any) -> Any:
        options = {"max_length": 32, "bf16": False, "gradient_checkpointing": None}
        given = vars(arguments(tmp_path, save_strategy="steps", save_steps=1000))
        names = ("per_device_train_batch_size", "learning_rate", "use_cpu", "report_to",
                 "save_strategy", "save_steps", "disable_tqdm")  # fmt: skip
        args = settings(str(tmp_path), **{name: given[name] for name in names}, **options)
        return kind(
            model=llama(),
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            privacy=privacy,
        )

    made(plan).train()
    longer = plan.extended(steps=2, target_epsilon=5.0)
    again = made(longer)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert again.epsilon() == longer.epsilon > plan.epsilon
