"""Attacks on the time between norm and sum: whoever writes into a layer's gradient or input after
it was measured; and on what a record's company does to the bounds of sketches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines import accumulator
from quietgrad.clipping.norms.estimators import sketches
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.randomness import RandomKey

LARGEST = 1.001
WIDTH, POSITIONS, TIMES = 64, 4, 1000.0
ESTIMATORS = ["auto", "ghost", "ghost64", "materialized"]
Hook = Callable[[nn.Module], Any]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def of_the_last(clipper: Any, batch: tuple[Tensor, Tensor], step: int = 0) -> float:
    """Its contribution, in units of C = 1."""

    def total(count: int) -> Tensor:
        clipped = clipper.clip((batch[0][:count], batch[1][:count]), step=step)
        return torch.cat([g.double().flatten() for g in clipped.gradients.values()])

    count = len(batch[0])
    return float((total(count) - total(count - 1)).norm())


def returning(layer: nn.Module, seen: Callable[[Tensor], Any]) -> None:
    """What the layer itself returns goes through ``seen``, before any hook of its module."""
    forward = layer.forward

    def returned(x: Tensor) -> Tensor:
        out: Tensor = forward(x)
        seen(out)
        return out

    layer.forward = returned  # type: ignore[method-assign]


def in_place_hook(layer: nn.Module) -> None:
    returning(layer, lambda out: out.register_hook(lambda g: g.mul_(TIMES)))


def past_the_counters(layer: nn.Module) -> None:
    def hook(g: Tensor) -> None:
        g.data.mul_(TIMES)

    returning(layer, lambda out: out.register_hook(hook))


def before_its_node(layer: nn.Module) -> None:
    def node(out: Tensor) -> None:
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda gs: (gs[0].mul_(TIMES),))

    returning(layer, node)


def hook_of_a_module(layer: nn.Module) -> None:
    """Comes before the measuring."""
    layer.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda g: g.mul_(TIMES)) and None
    )


HOOKS: dict[str, Hook] = {
    f.__name__: f for f in (in_place_hook, past_the_counters, before_its_node)
}


def hooked(hook: Hook) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 3)
    )
    nn.init.zeros_(model[1].weight)  # as LoRA's second matrix begins
    hook(model[1])
    return model


def records(count: int = 4) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(count, POSITIONS, WIDTH, generator=source)
    return x, torch.randn(count, POSITIONS, 3, generator=source)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("hook", [*HOOKS.values(), hook_of_a_module])
def test_a_gradient_that_is_scaled_after_it_was_measured(hook: Hook, estimator: str) -> None:
    """Before: 942 C. Now such a model is taken one example at a time."""
    bound = Clipper(1.0, estimator).bind(hooked(hook), loss)
    assert of_the_last(bound, records()) <= LARGEST


@pytest.mark.parametrize("estimator", ["ghost", "hutch"])
@pytest.mark.parametrize("hook", HOOKS)
def test_where_there_is_no_other_way_it_is_refused(hook: str, estimator: str) -> None:
    bound = Clipper(1.0, estimator, engine="bookkeeping").bind(hooked(HOOKS[hook]), loss)
    with pytest.raises(ValueError, match="written into after its per-example gradients were"):
        bound.clip(records(), step=0)


@pytest.mark.parametrize("hook", ["in_place_hook", "before_its_node"])
def test_torch_counts_it_at_every_release(hook: str) -> None:
    bound = Clipper(1.0, "ghost", engine="bookkeeping").bind(hooked(HOOKS[hook]), loss)
    with pytest.raises(ValueError, match="written into after"):
        bound.clip(records(), step=5)  # no look of the guard


def test_without_the_check_the_attack_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator, "require_untouched", lambda *_: None)
    monkeypatch.setattr(accumulator, "require_same_norms", lambda *_: None)
    bound = Clipper(1.0).bind(hooked(in_place_hook), loss)
    assert of_the_last(bound, records()) > 100


class InPlaceLeaky(torch.autograd.Function):
    """Takes its input back in the backward pass, as InPlace-ABN and reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.mark_dirty(x)
        ctx.slope = slope
        x.data.mul_(torch.where(x > 0, 1.0, slope))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        slope = torch.where(y > 0, 1.0, ctx.slope)
        y.data.div_(slope)
        return g * slope, None


class Inverting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(InPlaceLeaky.apply(self.a(x), 0.01)).tanh())


def test_an_input_that_is_taken_back_after_it_was_measured() -> None:
    """Before: 69 C, where the guard's public records had no negative activation."""
    torch.manual_seed(0)
    model = Inverting()
    with torch.no_grad():
        model.a.weight.abs_()
        model.a.bias.zero_()
    public = (torch.rand(8, POSITIONS, WIDTH), torch.randn(8, POSITIONS, 3))
    bound = Clipper(1.0).bind(model, loss, guard_batch=public)
    x, g = records()
    for step in (0, 1, 2, 4):
        assert of_the_last(bound, (-50 * x.abs(), g), step) <= LARGEST


# What a record's company does to the bounds of sketches


class Shared(nn.Module):
    """One layer, called several times."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(4, 4, bias=False), uses

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x) for _ in range(self.uses)], 1)


def sum_of(uses: int, others: int, longer: int, estimator: str, total: int = 8192) -> Tensor:
    """Of records whose positions cancel, and with ``longer`` of one that pads the batch."""
    positions, source = total // uses, torch.Generator().manual_seed(0)
    shape = (positions // 2, 4)
    h, gh = torch.randn(shape, generator=source).abs(), torch.randn(shape, generator=source)
    rows = positions + longer
    x, g = torch.zeros(others + longer, rows, 4), torch.zeros(others + longer, rows, 4)
    end = 2 * (positions // 2)
    x[:others, :end:2], x[:others, 1:end:2] = 1000 * h, 1003 * h
    g[:others, :end:2], g[:others, 1:end:2] = gh, -gh
    if longer:
        x[others, -1], g[others, -1] = 1e-3, 1e-3
    torch.manual_seed(0)
    bound = Clipper(1.0, estimator, 32, engine="bookkeeping", physical_batch_size=1000).bind(
        Shared(uses), lambda m, b: (m(b[0]) * b[1].unsqueeze(1)).flatten(1).sum(1)
    )
    drawn = Projections(RandomKey.from_seed(0), 4)
    return bound.clip((x, g), drawn, step=4).gradients["layer.weight"].double()


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
@pytest.mark.parametrize("uses", [1, 12])
@pytest.mark.parametrize("total", [sketches.STEADY_POSITIONS, 8192])
def test_padding_does_not_change_what_others_are_divided_by(
    total: int, uses: int, estimator: str
) -> None:
    """Before: 0.5 C with 20 others, 5 C with 200, once 8192 positions were passed."""
    alone, beside = (sum_of(uses, 20, longer, estimator, total) for longer in (0, 1))
    assert float((alone - beside).norm()) < 0.01


def test_positions_whose_squares_underflow_are_counted() -> None:
    """Factors of 1e-30 and 1e29 add 0.1 each, and have a norm that rounds to zero."""
    long = 12 * sketches.STEADY_POSITIONS
    use = DenseFactors(torch.full((1, 1, long, 2), 1e29), torch.full((1, 1, long, 2), 1e-30))
    none = DenseFactors(torch.zeros(1, 1, long, 2), torch.ones(1, 1, long, 2))
    assert float(sketches._uses_of_each([use] * 5)) == 8
    assert float(sketches._uses_of_each([none] * 5)) == sketches.FEW_USES


def test_bounds_that_count_padding_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def padded(uses: Any) -> float:
        return 128 + 2.0 ** -(-sum(use.sizes.t for use in uses) // 8192) * 64

    monkeypatch.setattr(sketches, "_own_additions", padded)
    alone, beside = (sum_of(1, 20, longer, "hutch") for longer in (0, 1))
    assert float((alone - beside).norm()) > 0.1


class Pixels(nn.Module):
    """A convolution of images, or a layer that meets each of their pixels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        found: Tensor = self.layer(x)
        return found


def sum_of_images(layer: nn.Module, wide: int, estimator: str) -> Tensor:
    """Of 40 images that cancel, 40 pixels wide, with zeros at their right: a wider one, which adds
    next to nothing, pads them.
    """
    x, g = torch.zeros(41, 4, 40, wide), torch.zeros(41, 4, 40, wide)
    x[:40, :, :, :40] = 1.0
    g[:40, :, 1:20, 1:39], g[:40, :, 20:39, 1:39] = 1e6, -1e6 * (1 - 2.0**-12)
    x[40], g[40] = 1e-6, 1e-6
    bound = Clipper(1.0, estimator, 16, engine="bookkeeping", physical_batch_size=64).bind(
        Pixels(layer), lambda m, b: (m(b[0]) * b[1]).flatten(1).sum(1)
    )
    bound.check((torch.randn(8, 4, 8, 8), torch.randn(8, 4, 8, 8)))
    drawn = Projections(RandomKey.from_seed(3), 4)
    return bound.clip((x, g), drawn, step=4).gradients["layer.weight"].double()


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
@pytest.mark.parametrize("wide", [80, 640])
@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Linear(4, 4, bias=False)], ids=str
)
def test_a_wider_image_hardly_moves_the_others(layer: nn.Module, wide: int, estimator: str) -> None:
    """Before: 8 C and 22 C, counted from the first to the last pixel; then 0.6 C of rounding."""
    narrow, padded = (sum_of_images(layer, width, estimator) for width in (40, wide))
    assert float((narrow - padded).norm()) < 1e-4
