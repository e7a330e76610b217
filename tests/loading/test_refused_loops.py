"""Loops that would step otherwise than once a release are refused by name, before any work."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad import PrivacyConfig
from quietgrad.clipping import clipped_gradients
from quietgrad.integrations.opacus import PrivacyEngine

pytestmark = pytest.mark.usefixtures("examined_once")

DATA = TensorDataset(torch.randn(60, 4), torch.arange(60) % 2)
PLAN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=10, steps=3).build(len(DATA))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_records_that_come_between_two_passes_are_refused() -> None:
    """Before: those that were added were never drawn, and what is missing was an IndexError."""
    given, model = [DATA[i] for i in range(60)], nn.Linear(4, 2)
    with PLAN.start() as run:
        loader = run.loader(given, steps=1)
        for batch in loader:
            run.backward(model, loss, batch)
        for now in (given[:50], given + given):
            given[:] = now
            with pytest.raises(ValueError, match="records, the plan is for dataset_size=60"):
                next(iter(loader))


def test_a_loop_over_a_closed_run_says_so() -> None:
    """Before: "not of the batch that is open"."""
    with PLAN.start() as run:
        loader = run.loader(DATA)
    with pytest.raises(RuntimeError, match="the run is closed; loop over its batches before"):
        next(iter(loader))


def index(run: Any, loader: Any) -> None:
    for batch in loader:
        batch[0]


def unpack(run: Any, loader: Any) -> None:
    for _x, _y in loader:
        pass


def unpack_later(run: Any, loader: Any) -> None:
    for batch in loader:
        _x, _y = batch


def unpack_each(run: Any, loader: Any) -> None:
    for batch in loader:
        for _x, _y in batch:
            pass


def move(run: Any, loader: Any) -> None:
    for batch in loader:
        batch.to("cpu")


def move_each(run: Any, loader: Any) -> None:
    for batch in loader:
        for part in batch:
            part.items()


@pytest.mark.parametrize("size", [1, 64])  # many micro-batches, or one
@pytest.mark.parametrize("habit", [index, unpack, unpack_later, unpack_each, move, move_each])
def test_a_loop_that_takes_a_batch_apart_is_told_where_records_are(
    habit: Callable[..., None], size: int
) -> None:
    """Before: "not enough values to unpack (expected 2, got 1)", which counts micro-batches."""
    refused = (TypeError, AttributeError)
    with PLAN.start() as run:
        loader = run.loader(DATA, physical_batch_size=size)
        with pytest.raises(refused, match="holds no records of its own") as told:
            habit(run, loader)
    assert "per_example_loss(model, batch) is given the records" in str(told.value)
    assert not any(word in str(told.value) for word in ("expected 2", "got", "too many"))


def test_micro_batches_may_still_be_named_one_by_one() -> None:
    model = nn.Linear(4, 2)
    with PLAN.start() as run:
        for batch in run.loader(DATA, physical_batch_size=4, steps=2):
            first, *others = batch
            total = run.clip(model, loss, first)
            for part in others:
                total = total + run.clip(model, loss, part)
            run.release(total)
        for batch in run.loader(DATA, physical_batch_size=64):
            (part,) = batch
            run.release(run.clip(model, loss, part))
    assert run.released == 3


def with_closure(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters())
    for batch in loader:
        optimizer.step(lambda: run.backward(model, loss, batch))  # noqa: B023


def without_closure(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters())
    for batch in loader:
        run.backward(model, loss, batch)
        optimizer.step()


def by_a_scaler(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for batch in loader:
        run.backward(model, loss, batch)
        scaler.step(optimizer)
        scaler.update()


def with_a_scaled_loss(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    """Nothing else would stop it: steps are 65536 times too small."""
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters())
    for batch in loader:
        run.backward(model, lambda m, b: scaler.scale(loss(m, b)), batch)
        scaler.step(optimizer)


def in_a_function_of_its_own(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step(batch: Any) -> None:
        run.backward(model, loss, batch)

    for batch in loader:
        step(batch)
        scaler.update()


def by_a_scaler_of_an_object(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    """Before: "Attempted step but _scale is None", once a release was made."""
    own = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    optimizer = torch.optim.SGD(model.parameters())
    for batch in loader:
        run.backward(model, loss, batch)
        own.scaler.step(optimizer)


class Prepared(SimpleNamespace):
    """As ``accelerate`` prepares an optimiser."""

    __module__ = "accelerate.optimizer"


def prepared(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    optimizer = Prepared(optimizer=torch.optim.LBFGS(model.parameters()), scaler=None)
    for batch in loader:
        run.backward(model, loss, batch)
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (with_closure, r"optimizer is LBFGS.*AdamW"),
        (without_closure, r"optimizer is LBFGS.*AdamW"),
        (prepared, r"optimizer is LBFGS.*AdamW"),
        (by_a_scaler, r"has a GradScaler.*leave it out"),
        (by_a_scaler_of_an_object, r"has a GradScaler.*leave it out"),
        (with_a_scaled_loss, r"has a GradScaler.*leave it out"),
        (in_a_function_of_its_own, r"has a GradScaler.*leave it out"),
    ],
)
def test_a_loop_that_cannot_step_on_releases_is_refused(
    loop: Callable[..., None], said: str
) -> None:
    model = nn.Linear(4, 2)
    with PLAN.start() as run:
        with pytest.raises(ValueError, match=said):
            loop(run, model, run.loader(DATA), nn.Linear(4, 2))
        assert run.released == 0 and model.weight.grad is None


def of_another_model(run: Any, model: nn.Module, loader: Any, other: nn.Module) -> None:
    lbfgs = torch.optim.LBFGS(other.parameters())
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    held = SimpleNamespace(other_scaler=torch.amp.GradScaler("cpu"))  # named nowhere here
    for batch in loader:
        run.backward(model, loss, batch)
        scaler.step(optimizer)
        scaler.update()
    assert lbfgs.param_groups and vars(held)


def test_a_scaler_that_does_nothing_and_another_models_optimiser_are_not() -> None:
    with PLAN.start() as run:
        of_another_model(run, nn.Linear(4, 2), run.loader(DATA, steps=3), nn.Linear(4, 2))
        assert run.released == 3


def test_no_loss_is_named() -> None:
    """Before: "'NoneType' object is not callable"."""
    nothing: Any = None
    with PLAN.start() as run:
        for batch in run.loader(DATA):
            with pytest.raises(
                TypeError, match=r"per_example_loss is of type NoneType, and no fun"
            ):
                run.backward(nn.Linear(4, 2), nothing, batch)
            break
        assert run.released == 0


def test_a_loss_in_the_models_place_is_named() -> None:
    """Before: "'function' object has no attribute 'modules'"."""
    model, records = nn.Linear(4, 2), DATA[:4]
    given: Any = (loss, model, records)
    with pytest.raises(TypeError, match=r"of type function.*\(model, per_example_loss, batch\)"):
        clipped_gradients(*given, max_grad_norm=1.0)
    with PLAN.start() as run:
        for batch in run.loader(DATA):
            with pytest.raises(TypeError, match=r"the order is \(model, per_example_loss, batch\)"):
                run.backward(loss, model, batch)  # type: ignore[arg-type]
            break


def test_an_opacus_script_with_lbfgs_is_refused() -> None:
    model = nn.Linear(4, 2)
    engine = PrivacyEngine()
    with pytest.raises(ValueError, match=r"optimizer is LBFGS.*AdamW"):
        engine.make_private(
            module=model,
            optimizer=torch.optim.LBFGS(model.parameters()),
            data_loader=DataLoader(DATA, batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


class Lazy:
    """As settings of a web framework outside of its context."""

    __dict__ = property(lambda self: _outside())  # type: ignore[assignment]


def _outside() -> Any:
    raise RuntimeError("working outside of context")


def test_what_a_loop_names_is_not_asked_for_what_it_holds() -> None:
    """Before: the errors of a weak proxy whose object is gone, and of a lazy one."""
    model, held, named = nn.Linear(4, 2), nn.Linear(1, 1), Lazy()
    gone = weakref.proxy(held)
    del held
    with PLAN.start() as run:
        for batch in run.loader(DATA):
            run.backward(model, loss, batch)
            break
        assert run.released == 1 and type(gone) is not type(named)
