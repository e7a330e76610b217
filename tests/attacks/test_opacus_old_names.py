"""Opacus scripts that go on with what ``make_private`` was given, in place of what it returned, and
other slips around an engine: nothing is stepped on that was not released, and every epsilon is of
all that was.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.checks import SettingsWarning
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager
from quietgrad.plan.session import stepping

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


class Script:
    """Both sets of names: those that ``make_private`` was given, and those that it returned."""

    def __init__(self, wrap_model: bool = True) -> None:
        self.model, self.engine = net(), PrivacyEngine()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.loader = DataLoader(TensorDataset(X, Y), batch_size=20)
        made = self.engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            noise_multiplier=1.0,
            max_grad_norm=1e-8,
            wrap_model=wrap_model,
        )
        self.attached, self.dp_optimizer, self.dp_loader = made
        self.dp_model = self.attached if wrap_model else self.model


def stepped(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def all_old(script: Script) -> None:
    for x, y in script.loader:
        stepped(script.model, script.optimizer, x, y)


def old_but_the_model(script: Script) -> None:
    for x, y in script.loader:
        stepped(script.dp_model, script.optimizer, x, y)


def a_new_optimizer(script: Script) -> None:
    optimizer = torch.optim.AdamW(script.model.parameters(), lr=0.1)
    for x, y in script.loader:
        stepped(script.model, optimizer, x, y)


def beside_the_private_loop(script: Script) -> None:
    for x, y in script.dp_loader:
        stepped(script.dp_model, script.dp_optimizer, x, y)
        script.model.eval()  # so that its call is not of the batch
        stepped(script.model, script.optimizer, X[:20], Y[:20])


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize(
    "loop", [all_old, old_but_the_model, a_new_optimizer, beside_the_private_loop]
)
def test_the_names_of_before_train_nothing(loop: Any, wrap_model: bool) -> None:
    """They trained without privacy, and ``get_epsilon`` said 0."""
    script = Script(wrap_model)
    before = script.model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"that make_private returned, all three"):
        loop(script)
    assert float((script.model[0].weight.detach() - before).norm()) < 1e-6


@pytest.mark.parametrize("loop", [all_old, beside_the_private_loop])
def test_unwatched_they_train_without_a_word(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping.Stepping, "is_asked", lambda self: False)
    script = Script()
    before = script.model[0].weight.detach().clone()
    loop(script)
    assert float((script.model[0].weight.detach() - before).norm()) > 1e-3


@pytest.mark.parametrize("wrap_model", [True, False])
def test_after_cleanup_the_model_is_the_script_s(wrap_model: bool) -> None:
    script = Script(wrap_model)
    for x, y in script.dp_loader:
        stepped(script.dp_model, script.dp_optimizer, x, y)
    script.attached.cleanup()
    all_old(script)
    hooked = [p for p in script.model.parameters() if p._post_accumulate_grad_hooks]  # type: ignore[attr-defined]
    assert not hooked


def test_layers_that_thaw_are_watched_too() -> None:
    script = Script()
    script.model[0].requires_grad_(False)
    for x, y in script.dp_loader:
        stepped(script.dp_model, script.dp_optimizer, x, y)
    script.model[0].requires_grad_(True)
    for x, y in script.dp_loader:
        stepped(script.dp_model, script.dp_optimizer, x, y)
    with pytest.raises(RuntimeError, match="all three"):
        all_old(script)


def test_a_budget_that_is_given_to_two_models_is_said_to_be_spent_twice() -> None:
    engine = PrivacyEngine()

    def made(model: nn.Module, loader: Any) -> Any:
        return engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            target_epsilon=1.0,
            target_delta=1e-3,
            epochs=1,
            max_grad_norm=1.0,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = made(net(), DataLoader(TensorDataset(X, Y), batch_size=20))
    with pytest.warns(SettingsWarning, match="the whole epsilon will be larger"):
        second = made(net(), first[2])
    for x, y in first[2]:
        for model, optimizer in (first[:2], second[:2]):
            stepped(model, optimizer, x, y)
    assert engine.get_epsilon(1e-3) > 1.2


@pytest.mark.parametrize("epochs", [0, -1, 0.5, True])
def test_a_budget_for_no_pass_is_refused(epochs: Any) -> None:
    """Noise for one step was given, and the loop went on for as many as it liked."""
    model = net()
    with pytest.raises((TypeError, ValueError), match="epochs="):
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(X, Y), batch_size=20),
            target_epsilon=1.0,
            target_delta=1e-3,
            epochs=epochs,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm"])
@pytest.mark.parametrize("value", [None, [1.0], "much", 0.0, float("nan")])
def test_settings_that_a_schedule_spoils_are_named(name: str, value: Any) -> None:
    script = Script()
    with pytest.raises(ValueError, match=name):
        for x, y in script.dp_loader:
            setattr(script.dp_optimizer, name, value)
            stepped(script.dp_model, script.dp_optimizer, x, y)
    assert script.engine.get_epsilon(1e-3) == 0.0


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm"])
def test_schedules_that_count_parts_of_batches_are_refused(name: str) -> None:
    """How many parts there are follows from the batch's size, and so would the noise."""
    script, factor = Script(), 1.0
    with (
        pytest.raises(RuntimeError, match=f"{name} was changed within a batch.*once a batch"),
        BatchMemoryManager(
            data_loader=script.dp_loader, max_physical_batch_size=4, optimizer=script.dp_optimizer
        ) as parts,
    ):
        for x, y in parts:
            stepped(script.dp_model, script.dp_optimizer, x, y)
            setattr(script.dp_optimizer, name, getattr(script.dp_optimizer, name) * factor)
            factor = 1.01


def test_schedules_that_count_batches_go_on_in_parts() -> None:
    script = Script()
    with BatchMemoryManager(
        data_loader=script.dp_loader, max_physical_batch_size=4, optimizer=script.dp_optimizer
    ) as parts:
        for x, y in parts:
            stepped(script.dp_model, script.dp_optimizer, x, y)
            if not script.dp_optimizer._is_last_step_skipped:
                script.dp_optimizer.noise_multiplier *= 1.1
    assert len(script.engine.accountant.history) == 3
