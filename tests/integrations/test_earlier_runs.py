"""A model that a private run of this process has trained comes through another door, or as part of
another model: the two epsilons add, and each door would tell its own.
"""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import private_trainers
import pytest
import torch
import torch.nn.functional as F
from lightning_modules import ADVICE, Small, StopAt
from lightning_modules import records as tensors
from lightning_modules import trainer as lightning_trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from quietgrad import PrivacyConfig
from quietgrad.accounting import epsilon
from quietgrad.checks import SettingsWarning
from quietgrad.events import PoissonGaussian
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.plan import PrivateRun
from quietgrad.plan.session.trained import runs_of

OWN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=2)
SAID = "trained by another private run of this process.*the epsilons and deltas add"
ADDS = "whose epsilon adds to this one's"
pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def looped(model: nn.Module, ledger: Path | None = None, **changes: Any) -> PrivateRun:
    x, y = tensors().tensors
    with replace(OWN, **changes).build(len(x)).start(ledger) as run:
        for indices in run.batches():
            run.backward(model, loss, (x[indices], y[indices]))
    return run


def engine_on(model: nn.Module) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine, optimizer = PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(tensors(), batch_size=20)
    given: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    made = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **given)
    return engine, *made


def scripted(model: nn.Module) -> PrivacyEngine:
    """As an Opacus script trains: five steps."""
    engine, private, optimizer, loader = engine_on(model)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    return engine


def test_a_second_loop_says_that_its_epsilon_is_not_the_whole() -> None:
    # Before: 2.9 and 2.9, of weights that had seen both.
    model = Small().net
    looped(model)
    with pytest.warns(SettingsWarning, match=SAID):
        looped(model)


def test_two_loops_in_turn_say_it() -> None:
    (x, y), model = tensors().tensors, Small().net
    one, two = (OWN.build(len(x)).start() for _ in range(2))
    with pytest.warns(SettingsWarning, match=SAID):
        for first, second in zip(one.batches(), two.batches(), strict=True):
            one.backward(model, loss, (x[first], y[first]))
            two.backward(model, loss, (x[second], y[second]))


def clipped(model: nn.Module) -> None:
    """A run that ends before its first release, as after an error."""
    (x, y), plan = tensors().tensors, OWN.build(100)
    with plan.start() as run:
        indices = next(run.batches())
        run.clip(model, loss, (x[indices], y[indices]))


@pytest.mark.filterwarnings("ignore:the model was trained by another private run")
@pytest.mark.parametrize("between", ["clipped", "public"])
def test_a_run_between_hides_none(between: str, tmp_path: Path) -> None:
    # Before: the third run knew of the second alone, which had released nothing of these records.
    module = Small(privacy=OWN)
    looped(module.net)
    clipped(module.net) if between == "clipped" else looped(
        module.net, seed=1, data_are_public=True
    )
    with pytest.raises(ValueError, match=ADDS):
        lightning_trainer(tmp_path).fit(module, tensors())
    with pytest.warns(SettingsWarning, match=SAID):
        scripted(module.net)
    with pytest.warns(SettingsWarning, match=SAID):
        looped(module.net)


def test_a_session_without_a_release_hides_none_of_its_run(tmp_path: Path) -> None:
    """Mutant: what the session before it released was forgotten with the next start."""
    (x, y), plan, model = tensors().tensors, OWN.build(100), Small().net
    for releases in (True, False):
        with plan.start(tmp_path / "ledger.jsonl") as run:
            indices = next(run.batches())
            (run.backward if releases else run.clip)(model, loss, (x[indices], y[indices]))
    with pytest.warns(SettingsWarning, match=SAID):
        looped(model)


def test_what_is_no_second_run_says_nothing(tmp_path: Path) -> None:
    """One run that goes on, new weights, records that were declared public."""
    model, ledger = Small().net, tmp_path / "ledger.jsonl"
    (x, y), plan = tensors().tensors, OWN.build(100)
    with plan.start(ledger) as run:
        indices = next(run.batches())
        run.backward(model, loss, (x[indices], y[indices]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looped(model, ledger)
        looped(Small().net)
        looped(model, seed=1, data_are_public=True)
        unreleased = Small().net
        clipped(unreleased)  # which trained nothing
        looped(unreleased)


@pytest.mark.parametrize("by", [looped, scripted])
def test_a_trainer_does_not_begin_with_what_a_loop_trained(by: Any, tmp_path: Path) -> None:
    # Before: accepted, and its model card told the Trainer's own epsilon alone.
    module = Small(privacy=OWN)
    by(module.net)
    with pytest.raises(ValueError, match=ADDS):
        lightning_trainer(tmp_path).fit(module, tensors())
    module.accept_start = "epsilons-add"
    lightning_trainer(tmp_path).fit(module, tensors())  # and says nothing more
    (earlier,) = module._loaded_record["started_from"]  # type: ignore[index]
    assert earlier["epsilon"] > 0.5 and earlier["private"]


@pytest.mark.filterwarnings("ignore:the model was trained by another private run")
def test_runs_in_a_row_are_told_once_each(tmp_path: Path) -> None:
    module = Small(privacy=OWN)
    for _ in range(4):
        looped(module.net)
    module.accept_start = "epsilons-add"
    lightning_trainer(tmp_path).fit(module, tensors())
    (last,) = module._loaded_record["started_from"]  # type: ignore[index]
    assert [one["started_from"] for one in last["started_from"]] == [[]] * 3


def test_a_loop_says_what_a_trainer_trained(tmp_path: Path) -> None:
    module = Small(privacy=OWN)
    lightning_trainer(tmp_path).fit(module, tensors())
    with pytest.warns(SettingsWarning, match=SAID):
        looped(module.net)
    with pytest.warns(SettingsWarning, match=SAID):
        engine_on(module.net)


def test_an_engine_that_is_made_anew_counts_what_the_one_before_released() -> None:
    # Before: the epsilon of five releases, of weights that had seen ten.
    model = Small().net
    first = scripted(model)
    with pytest.warns(SettingsWarning, match="another PrivacyEngine.*counted here too"):
        second = scripted(model)
    five, ten = (epsilon(PoissonGaussian(1.0, 0.2, steps), 1e-3) for steps in (5, 10))
    assert first.get_epsilon(1e-3) == pytest.approx(five)
    assert second.get_epsilon(1e-3) == pytest.approx(ten)


def test_adapters_that_were_merged_are_no_public_start(tmp_path: Path) -> None:
    # Before: accepted: parameters of the merged model are those that were frozen.
    adapters = LoraConfig(r=2, target_modules=["query", "value"])
    private: dict[str, Any] = {"privacy": OWN}
    model = get_peft_model(private_trainers.classifier(), adapters)
    private_trainers.trainer(tmp_path / "one", model=model, **private).train()
    merged = model.merge_and_unload()  # type: ignore[operator]
    merged.requires_grad_(True)
    with pytest.raises(ValueError, match=ADDS):
        private_trainers.trainer(tmp_path / "two", model=merged, **private)


@pytest.mark.filterwarnings("ignore:the model was trained by another private run")
def test_adapters_merged_into_what_was_trained_itself_are_known(tmp_path: Path) -> None:
    # Before: the run of the weights themselves alone.
    adapters = LoraConfig(r=2, target_modules=["query", "value"])
    model = private_trainers.classifier()
    private_trainers.trainer(tmp_path / "one", model=model, privacy=OWN).train()
    adding = {"privacy": OWN, "accept_start": "epsilons-add"}
    adapted = get_peft_model(model, adapters)
    private_trainers.trainer(tmp_path / "two", model=adapted, **adding).train()
    merged = adapted.merge_and_unload()  # type: ignore[operator]
    merged.requires_grad_(True)
    assert len({one.run for one in runs_of(merged)}) == 2


def test_a_frozen_model_that_stayed_as_it_was_takes_other_adapters(tmp_path: Path) -> None:
    adapters = LoraConfig(r=2, target_modules=["query", "value"])
    model: Any = private_trainers.classifier()
    for place in ("one", "two"):
        adapted = get_peft_model(model, adapters)
        private_trainers.trainer(tmp_path / place, model=adapted, privacy=OWN).train()
        model = adapted.unload()


def flat(record: dict[str, Any]) -> Any:
    """Steps of a run, and of those before it."""
    return record["steps"], [flat(earlier) for earlier in record["started_from"]]


def saved(trainer: Any, folder: Path) -> Any:
    trainer.save_model(str(folder))
    return flat(json.loads((folder / "quietgrad.json").read_text())["quietgrad_trained_on"])


def adding(folder: Path, model: nn.Module, **changes: Any) -> Any:
    changes = {"privacy": OWN, "accept_start": "epsilons-add"} | changes
    return private_trainers.trainer(folder, model=model, **changes)


def test_a_trainer_tells_of_runs_between_its_making_and_its_training(tmp_path: Path) -> None:
    # Before: only what was known when it was made; the first one's epsilon was told nowhere.
    model = private_trainers.classifier()
    first, second = adding(tmp_path / "first", model), adding(tmp_path / "second", model)
    first.train()
    second.train()
    assert saved(second, tmp_path / "saved") == (2, [(2, [])])


def test_a_resumed_trainer_tells_what_its_run_began_with(tmp_path: Path) -> None:
    # Before: what the model that it was given this time is from, which the checkpoint replaces.
    model = private_trainers.classifier()
    adding(tmp_path / "first", model).train()
    stopped = adding(tmp_path / "second", model, callbacks=[private_trainers.StopAt(1)])
    stopped.train()
    for given in (model, private_trainers.classifier()):
        again = adding(tmp_path / "second", given, accept_start="")
        again.train(resume_from_checkpoint=True)
        assert saved(again, tmp_path / "saved") == (2, [(2, [])])


@pytest.mark.parametrize("public", [False, True])
def test_a_fit_that_was_broken_off_is_an_earlier_run(public: bool, tmp_path: Path) -> None:
    # Before: the module's record of the first run hid the second, even where the first one's data
    # were public and nothing had to be asked for.
    module = Small(privacy=replace(OWN, data_are_public=public))
    lightning_trainer(tmp_path / "first").fit(module, tensors())
    module.privacy, module.accept_start = OWN, "" if public else "epsilons-add"
    with pytest.raises(InterruptedError):
        lightning_trainer(tmp_path / "second", callbacks=[StopAt(1, True)]).fit(module, tensors())
    copied = copy.deepcopy(module)
    assert flat(copied._loaded_record) == (1, [(2, [])])  # type: ignore[arg-type]
    for one in (copied, module):
        one.accept_start = ""
        with pytest.raises(ValueError, match=ADDS):
            lightning_trainer(tmp_path / "third").fit(one, tensors())
    module.accept_start = "epsilons-add"
    lightning_trainer(tmp_path / "third").fit(module, tensors())
    assert flat(module._loaded_record) == (2, [(1, [(2, [])])])  # type: ignore[arg-type]
