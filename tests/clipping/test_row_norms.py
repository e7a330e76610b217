"""Lengths of rows that are taken as they come are those of the factors, whatever the model does to
a layer's input and output: what was captured with a node of the graph, the other way, says so.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.pytorch_utils import Conv1D

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture import capture
from quietgrad.clipping.capture.row_norms import REMEMBERED
from quietgrad.clipping.engines import one_example
from quietgrad.clipping.engines.one_example import gradients_and_spreads
from quietgrad.clipping.engines.spreads import Spreads
from quietgrad.clipping.norms.estimators.projections import Projections

X = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().flatten(1).sum(1)


def spreads_of(
    model: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor] = squares
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    bound = Clipper(1.0, engine="one-example").bind(model, loss)
    work = bound._work(bound._layout(), Projections.fresh())
    [example] = list(bound.examples_of(x).parts(1))
    gradients, spreads, _ = gradients_and_spreads(work, example)
    return spreads, gradients


class Model(nn.Module):
    """Two layers, and what happens between them."""

    def __init__(self, first: nn.Module, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = first, between, nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.first(x)))
        return found


class Named(Model):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.first(input=x)))
        return found


class Checkpointed(Model):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(4, 6), torch.tanh)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        found: Tensor = self.last(checkpoint(self.inside, x, use_reentrant=self.reentrant))
        return found

    def inside(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x).tanh()
        return found


def linear(bias: bool = True) -> nn.Module:
    return nn.Linear(4, 6, bias=bias)


def changed_behind(h: Tensor) -> Tensor:
    h.register_hook(lambda g: 64.0 * g)
    return h.tanh()


def changed_at_its_node(h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: (64.0 * gradients[0],))
    return h.tanh()


def parts_written(h: Tensor) -> Tensor:
    h[..., 1].mul_(3.0)
    return torch.cat([h[..., 3:], h[..., :3]], -1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bias": lambda: Model(linear(), torch.tanh),
    "no bias": lambda: Model(linear(False), torch.tanh),
    "written over": lambda: Model(linear(), torch.relu_),
    "written over, no bias": lambda: Model(linear(False), torch.relu_),
    "a part written over": lambda: Model(linear(), parts_written),
    "a hook on the output": lambda: Model(linear(), changed_behind),
    "a hook on the output, no bias": lambda: Model(linear(False), changed_behind),
    "a hook on the output's node": lambda: Model(linear(), changed_at_its_node),
    "a hook on the output's node, no bias": lambda: Model(linear(False), changed_at_its_node),
    "the other way round": lambda: Model(Conv1D(6, 4), torch.tanh),
    "by name": lambda: Named(linear(), torch.tanh),
    "double": lambda: Model(linear(), torch.tanh).double(),
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


@pytest.mark.parametrize("shape", [(1, 5, 4), (1, 4), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_they_are_those_of_captured_factors(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = built(kind), torch.randn(shape, generator=torch.Generator().manual_seed(2))
    x = x.to(next(model.parameters()).dtype)
    found, gradients = spreads_of(model, x)
    monkeypatch.setattr(capture, "watches_rows", lambda *_: False)
    expected, others = spreads_of(model, x)
    assert set(found) == set(expected) == set(gradients) == set(others)
    for name, spread in expected.items():
        torch.testing.assert_close(found[name], spread, rtol=1e-9, atol=0)
        torch.testing.assert_close(gradients[name], others[name], rtol=0, atol=0)
        gradient = gradients[name]
        assert gradient is not None and float(found[name][0]) >= 0.999 * float(gradient.norm())


def test_a_gradient_that_a_loss_turns_round_is_read_as_the_layer_gave_it() -> None:
    torch.manual_seed(0)
    model = Model(linear(), torch.tanh)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        targets = torch.arange(5).remainder(3).unsqueeze(0)
        return F.cross_entropy(model(x).mT, targets, reduction="none").sum(1)

    def rowwise(model: nn.Module, x: Tensor) -> Tensor:
        targets = torch.arange(5).remainder(3)
        return F.cross_entropy(model(x)[0], targets, reduction="none").sum(0, keepdim=True)

    turned, straight = (spreads_of(model, X, way)[0] for way in (loss, rowwise))
    for name, spread in straight.items():
        torch.testing.assert_close(turned[name], spread)


class Adapters(nn.Module):
    """Three layers on one input, each with an adapter of two: their inputs take turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        each = [up(down(x)) for down, up in zip(self.down, self.up, strict=True)]
        return torch.stack(each).sum(0)


def test_an_input_of_many_layers_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Spreads] = []
    held: list[int] = []

    def noted(*arguments: Any) -> Spreads:
        made.append(Spreads(*arguments))
        watch, norms = made[-1].row_watch, made[-1].row_watch.norms_of

        def counted(factor: Tensor) -> Tensor:
            before = {id(one.norms) for one in watch._before}
            found = norms(factor)
            read.append(id(found) not in before)
            held.append(len(watch._before))
            return found

        monkeypatch.setattr(watch, "norms_of", counted)
        return made[-1]

    read: list[bool] = []
    monkeypatch.setattr(one_example, "Spreads", noted)
    spreads_of(Adapters(), X)
    assert read == [True, True, False, True, False, True]
    assert max(held) <= REMEMBERED and not made[0].row_watch._before


def test_nothing_is_put_into_the_graph() -> None:
    torch.manual_seed(0)
    model = Model(linear(), torch.tanh)
    nodes: list[str] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses = squares(model, x)
        waiting = [losses.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None:
                nodes.append(node.name())
                waiting += [following for following, _ in node.next_functions]
        return losses

    spreads_of(model, X, loss)
    assert nodes and not [name for name in nodes if "Identity" in name]


class Selective(nn.Module):
    """A layer's input has been read before what is checkpointed begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outside, self.one, self.two = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def inside(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.one(x).tanh()).sin()
        return found

    def forward(self, x: Tensor) -> Tensor:
        def keep_all(*_: Any, **__: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE

        outside = self.outside(x)
        inside = checkpoint(
            self.inside,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keep_all),
        )
        found: Tensor = self.last((outside + inside).tanh())
        return found


def test_checkpointing_that_counts_operations_does_not_see_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = spreads_of(Selective(), X)
    monkeypatch.setattr(capture, "watches_rows", lambda *_: False)
    expected, _ = spreads_of(Selective(), X)
    assert set(found) == set(expected)
    for name, spread in expected.items():
        torch.testing.assert_close(found[name], spread, rtol=1e-9, atol=0)


class Widths(nn.Module):
    """A layer without outputs beside another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="zero-element"):
            self.none = nn.Linear(4, 0)
        self.some = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.none(x), self.some(x)], -1)


def test_a_layer_without_outputs_stops_nothing() -> None:
    spreads, gradients = spreads_of(Widths(), X)
    assert set(spreads) >= {"some.weight", "some.bias"}
    assert set(gradients) == {"none.weight", "none.bias", "some.weight", "some.bias"}


def test_no_activation_outlives_a_pass_that_fails() -> None:
    torch.manual_seed(0)
    held: list[StorageWeakRef] = []

    def noted(h: Tensor) -> Tensor:
        h = h.tanh()
        held.append(StorageWeakRef(h.untyped_storage()))
        return h

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        squares(model, x)
        raise LookupError("of the user's")

    model = Model(linear(), noted)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            spreads_of(model, X, loss)
        assert [one.expired() for one in held] == [True]
    finally:
        gc.enable()


def test_what_is_not_ordinary_is_captured_as_ever() -> None:
    """Half precision: whether it takes part is looked at call by call."""
    torch.manual_seed(0)
    model = Model(linear(), torch.tanh).bfloat16()
    spreads, gradients = spreads_of(model, X.bfloat16())
    assert set(spreads) == set(gradients)


def test_a_gradient_that_a_loss_takes_itself_counts_for_nothing() -> None:
    torch.manual_seed(0)
    model = Model(linear(), torch.tanh)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        [inner] = torch.autograd.grad(100.0 * model(x).sum(), x)
        return squares(model, x) + inner.detach().sum(dim=(1, 2))

    found, plain = (spreads_of(model, X, way)[0] for way in (loss, squares))
    for name, spread in plain.items():
        torch.testing.assert_close(found[name], spread, rtol=0, atol=0)
