"""Records taken one at a time: plain autograd decides, whatever is captured beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.engines import contributions, one_example
from quietgrad.clipping.engines.one_example import gradients_and_spreads, norms_of_each
from quietgrad.clipping.engines.spreads import Spreads
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.rounding import OF_TERMS, least_of
from quietgrad.clipping.norms.spread import spread_of
from quietgrad.clipping.verify import verify_clipping
from quietgrad.randomness import RandomKey


class Shifts(nn.Module):
    """Without a rule; autograd needs nothing of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class WritesInto(nn.Module):
    """What ``Shifts`` was given is written into before the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.shifts, self.out = nn.Linear(4, 6), Shifts(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        shifted = self.shifts(h)
        h.mul_(2.0)
        found: Tensor = self.out(shifted.tanh() + h)
        return found


class BesideItsModule(nn.Module):
    """A weight that is used without its module, and one of a module that is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() @ self.head.weight.T


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().flatten(1).sum(1)


@pytest.mark.parametrize("kind", [WritesInto, BesideItsModule])
def test_what_cannot_be_captured_is_clipped_as_ever(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(5, 3, 4)
    found = Clipper(1e9, engine="one-example").bind(model, squares).clip(x, step=2).gradients
    right = torch.autograd.grad(
        squares(model, x).sum(), list(model.parameters()), allow_unused=True
    )
    for (name, p), g in zip(model.named_parameters(), right, strict=True):
        torch.testing.assert_close(found[name], torch.zeros_like(p) if g is None else g)


def work_and_example(model: nn.Module, x: Tensor) -> tuple[Any, Any]:
    bound = Clipper(1.0, engine="one-example").bind(model, squares)
    work = bound._work(bound._layout(), Projections.fresh())
    [example] = list(bound.examples_of(x).parts(1))
    return work, example


def test_the_spread_is_that_of_the_factors() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 6, bias=False), torch.randn(1, 3, 4)
    gradients, spreads, _ = gradients_and_spreads(*work_and_example(model, x))
    g = 2 * model(x)
    factors = DenseFactors(g.detach().unsqueeze(1), x.unsqueeze(1))
    torch.testing.assert_close(spreads["weight"][0], spread_of([factors], torch.float32).plain)
    weight = gradients["weight"]
    assert weight is not None and float(spreads["weight"][0]) >= float(weight.norm())


def test_what_is_divided_by_at_least_is_that_of_the_average() -> None:
    """Of a sum of four gradients, on average: in half precision the root of the sum of squares of
    the terms counts, too.
    """
    torch.manual_seed(0)
    work, example = work_and_example(nn.Linear(4, 6, bias=False), torch.randn(1, 3, 4))
    gradients, spreads, _ = gradients_and_spreads(work, example)
    total, squared = spreads["weight"].sum(1)
    for times in (1.0, 64.0):
        norms = norms_of_each(replace(work, least_times=times), gradients.items(), 4, spreads)
        expected = float(least_of(total) / 4) * times
        if times > 1.0:
            expected = max(expected, float(squared.sqrt() / 4) * OF_TERMS * times)
            assert expected > float(least_of(total) / 4) * times  # else the terms say nothing here
        torch.testing.assert_close(float(norms.least), expected, rtol=1e-12, atol=0)


class Parallel(nn.Module):
    """Layers of several widths with one input, another of its own, normalisations, biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.rms = nn.Linear(4, 6), nn.LayerNorm(6), nn.RMSNorm(6)
        self.one, self.two, self.three = (nn.Linear(6, p) for p in (3, 9, 3))
        self.last = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rms(self.norm(self.first(x)).tanh())
        found: Tensor = self.last(self.two(h).tanh()).sum(-1, keepdim=True) * self.one(h)
        return found + self.three(h)


def test_spreads_of_many_layers_are_each_their_own() -> None:
    """Against factors that hooks saw; a bias' is the sum of its rows' norms."""
    model, x = Parallel(), torch.randn(1, 5, 4)
    _, spreads, _ = gradients_and_spreads(*work_and_example(model, x))
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in model.named_children():

        def keep(_: Any, args: Any, output: Tensor, name: str = name) -> None:
            output.register_hook(lambda g: seen.update({name: (args[0].detach(), g)}))

        layer.register_forward_hook(keep)
    squares(model, x).sum().backward()
    assert set(spreads) == {name for name, _ in model.named_parameters()}
    for name, layer in model.named_children():
        a, g = seen[name]
        if isinstance(layer, nn.Linear):
            used = [DenseFactors(g.unsqueeze(1), a.unsqueeze(1))]
            found = spread_of(used, torch.float32)
            expected, terms = found.plain, found.terms
            squared = spreads[f"{name}.weight"][1]
            torch.testing.assert_close(squared, terms.square(), rtol=1e-5, atol=1e-7)
        else:
            kind: Any = nn.functional.layer_norm if name == "norm" else nn.functional.rms_norm
            expected = (kind(a, (6,)) * g).norm(dim=2).sum(1).double()
            if name == "norm":  # what the mean takes off is rounded, too
                means = a.mean(2).abs() * (a.var(2, correction=0) + layer.eps).rsqrt()
                expected += (g.norm(dim=2) * means).sum(1).double()
        torch.testing.assert_close(spreads[f"{name}.weight"][0], expected, rtol=1e-5, atol=1e-7)
        if f"{name}.bias" in spreads:
            torch.testing.assert_close(
                spreads[f"{name}.bias"][0], g.norm(dim=2).sum(1).double(), rtol=1e-5, atol=1e-7
            )


def test_no_activation_is_held_once_spreads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor whose norms others may share is let go of, not left to the garbage collector."""
    made: list[Spreads] = []

    def noted(*arguments: Any) -> Spreads:
        made.append(Spreads(*arguments))
        return made[-1]

    monkeypatch.setattr(one_example, "Spreads", noted)
    gradients_and_spreads(*work_and_example(Parallel(), torch.randn(1, 5, 4)))
    assert made and all(not one.row_watch._before and not one._waiting for one in made)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = 1.0 + self.layer(x) + self.layer(-x)  # nothing is left of it
        return found


def test_calls_of_one_weight_add_up() -> None:
    model, x = Twice(), torch.randn(1, 3, 4)
    gradients, spreads, _ = gradients_and_spreads(*work_and_example(model, x))
    g = torch.full((1, 1, 3, 4), 2.0)
    once = spread_of([DenseFactors(g, x.unsqueeze(1))], torch.float32).plain
    weight = gradients["layer.weight"]
    assert weight is not None and float(weight.norm()) < 1e-5
    torch.testing.assert_close(spreads["layer.weight"][0], 2 * once)


def test_a_module_that_does_not_run_again_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("once only")

    monkeypatch.setattr(contributions, "fallback_spreads", fails)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), Shifts()), torch.randn(1, 3, 4)
    gradients, spreads, _ = gradients_and_spreads(*work_and_example(model, x))
    assert set(spreads) == {"0.weight", "0.bias"} and set(gradients) == set(spreads) | {"1.shift"}


def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("all of it")

    monkeypatch.setattr(contributions, "fallback_spreads", fails)
    with pytest.raises(torch.OutOfMemoryError):
        gradients_and_spreads(*work_and_example(nn.Sequential(Shifts()), torch.randn(1, 3, 6)))


class Shifting(nn.Module):
    """Frozen but for a module without a rule, whose gradient is a sum over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = Shifts()

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = (self.shifts(batch * 0.0) * batch).sum((1, 2))
        return found


@pytest.mark.parametrize("kind", [Shifting, nn.Linear])
@pytest.mark.parametrize("views", [1, 2])
def test_engines_divide_records_that_cancel_by_the_same(kind: Any, views: int) -> None:
    """Of a millionth that is left, known to some per cent: both shorten it to the same length."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(6, 1, bias=False) if kind is nn.Linear else Shifting()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if kind is nn.Linear:
            return (model(batch)[..., 0] * 1e6).sum(1)
        found: Tensor = model(batch * 1e6)
        return found

    half = torch.randn(3, views, 8, 6)
    x = torch.cat([half, -half * (1.0 + 2.0**-19)], dim=2)
    x = x[:, 0] if views == 1 else x
    lengths = []
    for engine in ("bookkeeping", "one-example"):
        clipper = Clipper(1.0, engine=engine, views=views)  # type: ignore[arg-type]
        bound = clipper.bind(model, loss)
        bound.check(torch.randn_like(x))
        drawn = Projections(RandomKey.from_seed(1), 5)
        [found] = bound.clip(x[:1], drawn, step=5).gradients.values()
        lengths.append(float(found.norm()))
    assert 0.0 < lengths[0] < 0.9
    assert lengths[1] == pytest.approx(lengths[0], rel=0.1)


def test_the_check_looks_at_the_engine_that_is_asked_for() -> None:
    """A run with engine = "one-example" was refused by a check of the other engine."""
    model, batch = BesideItsModule(), torch.randn(3, 4)
    assert verify_clipping(model, squares, batch, "one-example") < 1e-5
    for engine in ("bookkeeping", "auto"):
        with pytest.raises(NotCaptured, match="never called"):
            verify_clipping(model, squares, batch, engine)
