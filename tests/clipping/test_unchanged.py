"""What is seen of a block that changes a model, asked of ``unchanged`` itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quietgrad.clipping.soundness.unchanged import StateChanged, unchanged

Change = Callable[[Any], Any]


class Kept(nn.Module):
    """Buffers of several types and sizes, and a frozen layer beside a trained one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.frozen = nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("small", torch.tensor([0.5, float("nan")]))
        self.register_buffer("large", torch.zeros(2**19))
        self.inner.register_buffer("count", torch.tensor(3))


def changed_places(model: Kept) -> None:
    model.inner.weight.data.copy_(model.inner.weight.data.flip(0))


def other_weight(model: Kept) -> None:
    model.inner.weight = nn.Parameter(model.inner.weight.detach().clone())


def another_weight(model: Kept) -> None:
    model.inner.register_parameter("more", nn.Parameter(torch.zeros(2)))


def other_forward(model: Kept) -> None:
    model.inner.forward = torch.relu  # type: ignore[method-assign]


# What is done; how it is named.
BUFFERS: dict[str, tuple[Change, str]] = {
    "an equal one": (lambda m: setattr(m, "small", m.small.clone()), "small"),
    "of another type": (lambda m: setattr(m, "small", m.small.double()), "small"),
    "written": (lambda m: m.small.add_(1), "small"),
    "of a layer": (lambda m: m.inner.count.add_(1), "inner.count"),
    "one entry past the counter": (lambda m: m.small.data[:1].fill_(7.0), "small"),
    "no number past the counter": (lambda m: m.small.data.fill_(7.0), "small"),
    "to no number past the counter": (lambda m: m.small.data.fill_(float("nan")), "small"),
    "the last of a large one": (lambda m: m.large.data[-1:].fill_(7.0), "large"),
    "fewer past the counter": (lambda m: setattr(m.large, "data", torch.zeros(1)), "large"),
    "another type past the counter": (
        lambda m: setattr(m.large, "data", m.large.double()),
        "large",
    ),
    "another one": (lambda m: m.register_buffer("more", torch.zeros(2)), "more"),
    "another of a layer": (lambda m: m.inner.register_buffer("more", torch.zeros(2)), "inner.more"),
    "gone": (lambda m: delattr(m.inner, "count"), "inner.count"),
    "none": (lambda m: setattr(m, "large", None), "large"),
}
PARAMETERS: dict[str, tuple[Change, str]] = {
    "an equal one": (other_weight, "inner.weight"),
    "another one": (another_weight, "inner.more"),
    "gone": (lambda m: delattr(m.inner, "bias"), "inner.bias"),
    "written": (lambda m: m.frozen.bias.add_(0.0), "frozen.bias"),
    "one entry past the counter": (lambda m: m.inner.weight.data[1, 2].add_(1.0), "inner.weight"),
    "rows that change places": (changed_places, "inner.weight"),
}
SWITCHED: dict[str, tuple[Change, str]] = {
    "a mode": (lambda m: m.inner.eval(), "layer 'inner' is switched"),
    "the model's mode": (lambda m: setattr(m, "training", False), "the model is switched"),
    "trained": (lambda m: m.frozen.requires_grad_(), "parameter 'frozen.weight' is switched"),
    "a type": (lambda m: torch.set_default_dtype(torch.float64), "torch.set_default_dtype is swi"),
    "a layer": (lambda m: setattr(m, "inner", nn.Linear(3, 2)), "layer 'inner' is exchanged"),
    "no layer": (lambda m: delattr(m, "frozen"), "layer 'frozen' is exchanged"),
    "a class": (lambda m: setattr(m.inner, "__class__", nn.Module), "layer 'inner' is exchanged"),
    "a forward": (other_forward, "layer 'inner' is exchanged"),
}


def state_of(model: Kept) -> Any:
    """All that ``unchanged`` looks at, and how it can be told whether it is the same."""
    return (
        [(name, id(m), type(m), m.training, vars(m).get("forward"), [*m._modules])
         for name, m in model.named_modules()],
        [(name, id(b), b.dtype, b.nan_to_num(9.0).tolist()) for name, b in model.named_buffers()],
        [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        torch.get_default_dtype(),
    )  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_changes_is_named_and_put_back(name: str, fails: bool) -> None:
    """Also where the block fails by itself."""
    change, named = BUFFERS[name]
    model = Kept()
    before = state_of(model)
    match = "by itself" if fails else f"buffer '{named}' changes .*it was put back"
    with (
        pytest.raises((StateChanged, RuntimeError), match=match),
        unchanged(model, thorough=True),
        torch.no_grad(),
    ):
        change(model)
        if fails:
            raise RuntimeError("by itself")
    assert state_of(model) == before


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_that_changes_is_named(name: str, beside: bool) -> None:
    change, named = PARAMETERS[name]
    model = Kept()
    with (
        pytest.raises(StateChanged, match=f"parameter '{named}' is rewritten"),
        unchanged(model, thorough=True),
        torch.no_grad(),
    ):
        if beside:
            model.small.add_(1)
        change(model)
    assert float(model.small[0]) == 0.5  # buffers beside it are put back


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_switched_is_named_and_put_back(name: str, fails: bool) -> None:
    change, said = SWITCHED[name]
    model = Kept()
    before = state_of(model)
    with (
        pytest.raises((StateChanged, RuntimeError), match="by itself" if fails else said),
        unchanged(model),
        torch.no_grad(),
    ):
        model.small.add_(1)
        change(model)
        if fails:
            raise RuntimeError("by itself")
    assert state_of(model) == before


def test_a_forward_that_was_there_before_is_put_back() -> None:
    model = Kept()
    model.inner.forward = torch.relu  # type: ignore[method-assign]
    with pytest.raises(StateChanged, match="layer 'inner' is exchanged"), unchanged(model):
        del model.inner.forward
    assert model.inner.forward is torch.relu


def test_what_cannot_be_put_back_is_said() -> None:
    """Of a large buffer there is no copy but at looks."""
    model = Kept()
    with (
        pytest.raises(StateChanged, match=r"'large' changes .*load the weights from before"),
        unchanged(model),
        torch.no_grad(),
    ):
        model.large.add_(1)


def test_small_buffers_are_copied_first() -> None:
    model = Kept()
    with pytest.raises(StateChanged, match=r"'small' changes .*it was put back"), unchanged(model):
        model.small.data[:1].fill_(7.0)
    assert float(model.small[0]) == 0.5


def test_what_stays_is_not_refused() -> None:
    """Also tensors that count no writes, and what is undone."""
    model = Kept()
    with torch.inference_mode():
        model.inner.register_buffer("inference", torch.ones(2))
    for thorough in (False, True):
        with unchanged(model, thorough):
            model.eval()
            model.inner(torch.ones(3))
            model.train()
    with (
        pytest.raises(StateChanged, match=r"inner\.inference"),
        unchanged(model),
        torch.inference_mode(),
    ):
        model.inner.inference.add_(1)
