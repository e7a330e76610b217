"""How often, and by what, a weight is used may follow from one record: a loop over the longest
record's frames, a branch that some record needs. Under a sketch nothing of the others may follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.engines import accumulator
from quietgrad.clipping.norms.estimators import sketches
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import Geometry, MatrixFactors
from quietgrad.clipping.norms.factors.convolution import ConvolutionFactors
from quietgrad.clipping.norms.rounding import Measured
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Batch

CROWD, FRAMES, UNGUARDED = 20, 8, 4
SKETCHES = ["hutch", "hutch++"]


def bound_to(model: nn.Module, estimator: str, sketch_dim: int = 16) -> BoundClipper:
    clipper = Clipper(1.0, estimator, sketch_dim, engine="bookkeeping", physical_batch_size=1000)
    return clipper.bind(model, lambda model, batch: model(batch))


def total(bound: BoundClipper, batch: Batch) -> Tensor:
    projections = Projections(RandomKey.from_seed(3), 4)
    sums = bound.clip(batch, projections, step=UNGUARDED).gradients.values()
    return torch.cat([value.double().flatten() for value in sums])


# ------------------------------------------------------------------------------------- how often


class Loop(nn.Module):
    """A cell of its own making, once for every frame of the longest record."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, batch: Batch) -> Tensor:
        frames = zip(batch["x"].unbind(1), batch["g"].unbind(1), strict=True)
        return sum(((self.cell(x) * g).flatten(1).sum(1) for x, g in frames), torch.zeros(1))


CELLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 8, bias=False), (1, 8), (1, 8)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 6, 6), (4, 6, 6)),
}


def videos(kind: str, longer: int, cancel: float) -> Batch:
    """Records whose frames cancel but for a share; with one that is longer and next to nothing."""
    _, inputs, outputs = CELLS[kind]
    source = torch.Generator().manual_seed(0)
    records, frames = CROWD + (longer > 0), max(FRAMES, longer)
    x, g = torch.zeros(records, frames, *inputs), torch.zeros(records, frames, *outputs)
    x[:CROWD, :FRAMES] = 10 * torch.randn(*inputs, generator=source)
    one = 10 * torch.randn(FRAMES, *outputs, generator=source)
    g[:CROWD, :FRAMES] = one - (1 - cancel) * one.mean(0, keepdim=True)
    x[CROWD:], g[CROWD:] = 1e-6, 1e-6
    return {"x": x, "g": g}


def moved_by_a_longer_one(kind: str, estimator: str, cancel: float, longer: int = 100) -> float:
    found = []
    for length in (0, longer):
        torch.manual_seed(0)
        bound = bound_to(Loop(CELLS[kind][0]()), estimator)
        public = videos(kind, 0, 1.0)
        bound.check({name: torch.randn_like(value[:4, :5]) for name, value in public.items()})
        found.append(total(bound, videos(kind, length, cancel)))
    assert float(found[0].norm()) > 0.1
    return float((found[1] - found[0]).norm())


@pytest.mark.parametrize("estimator", SKETCHES)
@pytest.mark.parametrize(
    "kind, cancel", [("linear", 1e-4), ("convolution", 1.0), ("convolution", 1e-2)]
)
def test_a_longer_video_does_not_move_the_others(kind: str, cancel: float, estimator: str) -> None:
    """Before: each of 20 was divided by other numbers, convolutions at once: 8 C with 400 frames,
    recurrent cells where frames cancel: 0.7 C.
    """
    assert moved_by_a_longer_one(kind, estimator, cancel) < 1e-6


def test_bounds_that_count_the_uses_of_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "_holds", lambda use: torch.ones(use.sizes.b, dtype=torch.bool))
    assert moved_by_a_longer_one("convolution", "hutch", 1.0) > 1.0
    assert moved_by_a_longer_one("linear", "hutch", 1e-2) > 0.02


@pytest.mark.parametrize("side", [4, 40])
def test_a_use_without_a_gradient_changes_no_bound(side: int) -> None:
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = torch.randn(2, 2, side, side), torch.randn(2, 3, side, side)
    one = ConvolutionFactors(x, g, geometry)
    none = ConvolutionFactors(x, torch.zeros_like(g), geometry)
    infinite = Measured(*torch.full((3, 2), torch.inf, dtype=torch.float64))

    def bounds(*uses: MatrixFactors) -> tuple[Tensor, Tensor]:
        own = sketches.own_rounding(uses, g, torch.float32)
        assert not own.beside(infinite).slack.isnan().any()
        return torch.as_tensor(own.of_spread) + torch.zeros(2), torch.as_tensor(own.of_norm)

    for alone, beside in (
        (bounds(one), bounds(one, none)),
        (bounds(one, one), bounds(one, none, one, none, none)),
    ):
        assert torch.allclose(alone[0].double(), beside[0].double(), rtol=1e-12)
        assert torch.allclose(alone[1].double(), beside[1].double(), rtol=1e-12)
    assert bool((bounds(one, one)[0] > bounds(one)[0]).all())


# -------------------------------------------------------------------------------------- by what


class Product(nn.Module):
    """No rule: gradients are formed."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Branch(nn.Module):
    """A second layer with the weight of the first, where some record asks for it."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, batch: Batch) -> Tensor:
        loss = (self.first(batch["x"]) * batch["g"]).sum((1, 2))
        asked = batch["asked"].float()
        if bool(asked.any()):
            loss = loss + (self.second(batch["h"]) * batch["k"]).sum((1, 2)) * asked
        return loss


def product_beside_a_layer() -> Branch:
    first = nn.Linear(6, 12, bias=False)
    return Branch(first, Product(first.weight))


def head_beside_a_table() -> Branch:
    first, second = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
    second.weight = first.weight
    return Branch(first, second)


BRANCHES = {"formed": product_beside_a_layer, "read": head_beside_a_table}


def alike(kind: str, asked: bool) -> Batch:
    """Copies of one record, and one that adds nothing and may ask for the branch."""
    source = torch.Generator().manual_seed(1)
    x: Any = torch.randn(1, 5, 6, generator=source)
    width = 12
    if kind == "read":
        x, width = torch.randint(0, 12, (1, 5), generator=source), 6
    g = 100 * torch.randn(1, 5, width, generator=source)
    batch = {"x": x, "g": g, "h": torch.ones(1, 5, 6), "k": torch.ones(1, 5, 12)}
    batch = {name: value.repeat_interleave(CROWD + 1, dim=0) for name, value in batch.items()}
    batch["g"][CROWD], batch["k"][CROWD] = 0, 0
    batch["asked"] = torch.tensor([False] * CROWD + [asked])
    return batch


def moved_by_a_branch(kind: str, estimator: str) -> float:
    found = []
    for asked in (False, True):
        torch.manual_seed(0)
        bound = bound_to(BRANCHES[kind](), estimator, 4)
        public = alike(kind, False)
        public["g"] = torch.randn_like(public["g"])
        bound.check(public)
        found.append(total(bound, alike(kind, asked)))
    return float((found[1] - found[0]).norm())


@pytest.mark.parametrize("estimator", SKETCHES)
@pytest.mark.parametrize("kind", BRANCHES)
def test_a_record_that_asks_for_a_branch_does_not_move_the_others(
    kind: str, estimator: str
) -> None:
    """Before: it decided whether their norms were sketched: 10 C with 40 copies and k = 4."""
    assert moved_by_a_branch(kind, estimator) < 1e-5


@pytest.mark.parametrize("kind", BRANCHES)
def test_norms_that_follow_from_the_branch_are_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulator, "in_one_way", lambda layout, name, uses: uses)
    assert moved_by_a_branch(kind, "hutch") > 1.0


class Looks(nn.Module):
    """Attention to itself; where some record asks for it, to something else, too or instead."""

    def __init__(self, instead: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True, bias=False)
        self.instead = instead

    def forward(self, batch: Batch) -> Tensor:
        x, asked = batch["x"], batch["asked"].float()
        if not bool(asked.any()):
            return self.of(x, x, batch["g"])
        if self.instead:
            return self.of(x, x.clone(), batch["g"])
        return self.of(x, x, batch["g"]) + self.of(x, x + 1, batch["k"]) * asked

    def of(self, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
        return (self.inner(x, y, y, need_weights=False)[0] * g).sum((1, 2))


@pytest.mark.parametrize("estimator", SKETCHES)
@pytest.mark.parametrize("instead", [False, True])
def test_attention_to_something_else_does_not_move_the_others(
    instead: bool, estimator: str
) -> None:
    """Before: 13 C with 40 copies and k = 2."""
    found = []
    for asked in (False, True):
        bound = bound_to(Looks(instead), estimator, 2)
        batch = alike("read", asked) | {"x": alike("formed", asked)["x"]}
        batch["k"] = torch.zeros_like(batch["g"])
        none = torch.zeros_like(batch["asked"])
        bound.check(batch | {"g": torch.randn_like(batch["g"]), "asked": none})
        found.append(total(bound, batch))
    assert float((found[1] - found[0]).norm()) < 1e-3 * float(found[0].norm())


def test_a_module_that_changes_its_way_is_refused_beside_sketches() -> None:
    bound = bound_to(nn.Sequential(Looks(False)), "hutch")
    batch = alike("read", False) | {"x": torch.randn(CROWD + 1, 5, 6)}
    bound.per_example_loss = lambda model, batch: model(batch)
    total(bound, batch)
    refused = pytest.raises(ValueError, match="used by its module in another way")
    with torch.autocast("cpu", torch.bfloat16), refused:
        total(bound, batch)
