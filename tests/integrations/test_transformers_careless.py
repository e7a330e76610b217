"""Careless uses that would make a printed epsilon too small, or show private scores."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from private_trainers import PRIVACY, StopAt, classifier, records, trainer
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from transformers import TrainerCallback, default_data_collator

from quietgrad.integrations.public import refuse_private_evaluation
from quietgrad.integrations.transformers import PrivateTrainer

pytestmark = pytest.mark.usefixtures("examined_once")

OWN = replace(PRIVACY, seed=None, data_are_public=False)


class OwnStep(PrivateTrainer):
    def training_step(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


class OwnBatches(PrivateTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, 20)


class Mixed:
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


class MixedIn(Mixed, PrivateTrainer):
    pass


class OwnSampler(PrivateTrainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return WeightedRandomSampler([1.0] * 100, 100)


class OwnInputs(PrivateTrainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return {name: value[:, :4] for name, value in inputs.items()}


class OwnNorm(PrivateTrainer):
    def _get_grad_norm(self, *args: Any, **options: Any) -> Any:
        return 0.0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (OwnStep, "OwnStep.training_step.*per_example_loss"),
        (OwnBatches, "OwnBatches.get_train_dataloader.*train_dataset"),
        (MixedIn, "Mixed.compute_loss.*per_example_loss"),
        (OwnSampler, "OwnSampler._get_train_sampler would not be asked.*rare classes"),
        (OwnInputs, "OwnInputs._prepare_inputs would see no batch.*data_collator"),
        (OwnNorm, "OwnNorm._get_grad_norm"),
    ],
)
def test_methods_that_the_guarantee_is_made_of_are_not_replaced(
    kind: type[PrivateTrainer], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        trainer(tmp_path, kind=kind)


@pytest.mark.parametrize("name", ["compute_loss", "compute_loss_func", "_get_train_sampler"])
def test_what_is_put_on_a_trainer_and_would_not_be_called_is_refused(
    name: str, tmp_path: Path
) -> None:
    trained = trainer(tmp_path)
    setattr(trained, name, lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=f"{name} .*per_example_loss"):
        trained.train()
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("instead", [True, False], ids=["instead", "afterwards"])
def test_only_what_was_released_is_stepped_on(instead: bool, tmp_path: Path) -> None:
    """A method that is put on the object; before the first step of the optimiser."""
    trained = trainer(tmp_path, privacy=OWN)
    before = copy.deepcopy(trained.model.state_dict())
    step = trained.training_step

    def raw(model: Any, inputs: Any, *_: Any) -> Any:
        done = torch.zeros(()) if instead else step(model, inputs)
        model(**default_data_collator(records(4))).loss.backward()
        return done

    trained.training_step = raw  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="gradients that were not released"):
        trained.train()
    after = trained.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Halves(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, model: Any, **_: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)


def test_released_gradients_may_be_changed_by_a_callback(tmp_path: Path) -> None:
    assert trainer(tmp_path, callbacks=[Halves()]).train().global_step == 10


def test_a_model_that_a_run_has_trained_is_no_public_start(tmp_path: Path) -> None:
    first = trainer(tmp_path / "one", privacy=OWN)
    first.train()
    with pytest.raises(ValueError, match=r'epsilon adds.*accept_start="epsilons-add"'):
        trainer(tmp_path / "two", model=first.model, privacy=OWN)
    asked = {"model": first.model, "privacy": OWN, "accept_start": "epsilons-add"}
    second = trainer(tmp_path / "two", **asked)
    second.train()
    (earlier,) = second._session.started_from
    assert earlier["epsilon"] == first.epsilon()


def test_a_trainer_does_not_begin_anew_where_its_ledger_is_gone(tmp_path: Path) -> None:
    trained = trainer(tmp_path / "run", privacy=OWN)
    trained.train()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ValueError, match="epsilon adds"):
        trained.train()


def test_one_model_and_directory_go_on_in_another_trainer(tmp_path: Path) -> None:
    first = trainer(tmp_path, privacy=OWN, callbacks=[StopAt(3)], save_strategy="steps")
    first.train()
    again = trainer(tmp_path, privacy=OWN, model=first.model, save_strategy="steps")
    assert again.train(resume_from_checkpoint=True).global_step == 10
    assert again._session.started_from == ()


def test_a_resume_that_is_refused_counts_no_start(tmp_path: Path) -> None:
    first = trainer(tmp_path, privacy=OWN, callbacks=[StopAt(3)], save_strategy="steps")
    first.train()
    before = (tmp_path / "ledger.jsonl").read_bytes()
    again = trainer(tmp_path, privacy=OWN, model=first.model, save_strategy="steps")
    with pytest.raises(ValueError, match="is no whole checkpoint of the private run"):
        again.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


class Again(TrainerCallback):
    trainer: PrivateTrainer

    def on_epoch_end(self, *args: Any, **options: Any) -> None:
        self.trainer.train(resume_from_checkpoint=True)


def test_training_within_training_is_refused(tmp_path: Path) -> None:
    again = Again()
    again.trainer = trainer(tmp_path, callbacks=[again])
    with pytest.raises(ValueError, match=r"args.output_dir=.*in use"):
        again.trainer.train()


def texts(n: int) -> Dataset:
    return Dataset.from_list([{"text": f"this is the record of number {i}"} for i in range(n)])


ROWS = records()
WHOLE = texts(50)
PARTS: dict[str, tuple[Any, Any, bool]] = {
    "a slice of the list": (ROWS, ROWS[20:30], True),
    "a deep copy": (ROWS, copy.deepcopy(ROWS), True),
    "a part": (ROWS, Subset(ROWS, [4, 5]), True),  # type: ignore[arg-type]
    "parts that overlap": (Subset(ROWS, range(9)), Subset(ROWS, [8]), True),  # type: ignore[arg-type]
    "a shuffled selection": (WHOLE, WHOLE.shuffle(seed=1).select(range(9)), True),
    "other records": (ROWS, records(9, seed=1), False),
    "the rest of the list": (ROWS[:50], ROWS[50:], False),
    "a split": (*random_split(ROWS, [60, 40]), False),  # type: ignore[arg-type]
    "a split of texts": (*WHOLE.train_test_split(9).values(), False),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_training_records_are_seen(name: str, tmp_path: Path) -> None:
    data, public, refused = PARTS[name]
    if not refused:
        trainer(tmp_path, train_dataset=data, eval_dataset=public)
        return
    with pytest.raises(ValueError, match="holds records of it"):
        trainer(tmp_path, train_dataset=data, eval_dataset={"named": public})


X, Y = torch.arange(400.0).view(100, 4), torch.arange(100)
TENSORS = TensorDataset(X, Y)
NUMBERS = Dataset.from_dict({"x": X.tolist(), "labels": Y.tolist()})
TENTHS = NUMBERS.train_test_split(0.1, seed=3)
PLACES: dict[str, tuple[Any, Any, bool]] = {
    "the end of the tensors": (TENSORS, TensorDataset(X[90:], Y[90:]), True),
    "a part of their beginning": (TensorDataset(X[:90], Y[:90]), Subset(TENSORS, [7]), True),
    "tensors and others": (TENSORS, ConcatDataset([TensorDataset(X[90:], Y[90:])]), True),
    "the end of a table": (NUMBERS, NUMBERS.select(range(90, 100)), True),
    "a shuffled part of a table": (NUMBERS, NUMBERS.shuffle(seed=1).select([4, 5]), True),
    "a split of what is trained on": (NUMBERS, TENTHS["test"], True),
    "the same in another format": (NUMBERS, NUMBERS.with_format("torch"), True),
    "the rest of the tensors": (
        TensorDataset(X[:90], Y[:90]),
        TensorDataset(X[90:], Y[90:]),
        False,
    ),
    "every other row": (TensorDataset(X[::2], Y[::2]), TensorDataset(X[1::2], Y[1::2]), False),
    "the other part of a split": (TENTHS["train"], TENTHS["test"], False),
    "the rest of a table": (NUMBERS.select(range(90)), NUMBERS.select(range(90, 100)), False),
}


@pytest.mark.parametrize("name", PLACES)
def test_parts_are_known_by_where_they_lie(name: str) -> None:
    """Before: all but the beginning of tensors and of tables of numbers was scored in the open."""
    private, public, refused = PLACES[name]
    with pytest.raises(ValueError, match="holds records of it") if refused else nullcontext():
        refuse_private_evaluation({"a": public}, (private,))


def test_training_records_are_not_scored_by_another_door(tmp_path: Path) -> None:
    trained = trainer(tmp_path, train_dataset=ROWS, eval_dataset=records(9, seed=1))
    with pytest.raises(ValueError, match="evaluate on public records"):
        trained.predict(ROWS)
    trained.eval_dataset = ROWS
    with pytest.raises(ValueError, match="evaluate on public records"):
        trained.evaluate()
    trained.eval_dataset = {"a": ROWS}
    with pytest.raises(ValueError, match="evaluate on public records"):
        trained.evaluate("a")


def test_weights_before_a_release_are_anyones(tmp_path: Path) -> None:
    model = classifier()
    for name in ("one", "two"):
        trainer(tmp_path / name, model=model, privacy=OWN)


def test_a_scaler_of_the_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer takes it from the environment, whatever ``args.fp16`` says."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"mixed_precision='fp16'.*use bf16"):
        trainer(tmp_path)
