"""What a record adds is the same by either engine: the planner, or a branch that cannot be
captured, changes engines by what else is in the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper, bound
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.norms.estimators.projections import Projections

CROWD = 24


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def moved(model: nn.Module, limit: float, x: Tensor, g: Tensor, views: int = 1) -> float:
    """What a crowd's sum moves by as engines change, in units of C."""
    projections, found = Projections.fresh(), []
    for engine in ("bookkeeping", "one-example"):
        clipper = Clipper(limit, engine=engine, views=views)
        bound = clipper.bind(model, loss)
        bound.clip((torch.randn_like(x), torch.randn_like(g)), step=0)  # what the guard looks at
        sums = bound.clip((x, g), projections, step=2).gradients
        found.append(torch.cat([s.double().flatten() for s in sums.values()]) / limit)
    return float((found[0] - found[1]).norm())


def cancelling(shape: tuple[int, ...], share: float) -> Tensor:
    """[CROWD, *shape, positions]: two positions that cancel but for a share, and a third without a
    gradient.
    """
    row = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    g = torch.stack([row, -(1 - share) * row, torch.zeros_like(row)], dim=-1)
    return g.expand(CROWD, *g.shape[1:]).clone()


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_map_whose_last_line_has_no_gradient_has_one_spread(kernel: int) -> None:
    """Several examples are measured at their own sizes; one was at that of its map. Before: 24
    records moved by 0.5 C, more would by more.
    """
    torch.manual_seed(0)
    model = nn.Conv1d(8, 16, kernel, padding=kernel // 2)
    x = torch.randn(1, 8, 1).expand(CROWD, 8, 3).clone()
    assert moved(model, 1e-5, x, cancelling((16,), 2.0**-15)) < 5e-3


@pytest.mark.parametrize("groups", [1, 4])
def test_views_of_a_map_have_one_spread(groups: int) -> None:
    """Several examples' views are positions of one matrix; one example's were taken row by row, by
    a bound of whole maps.
    """
    torch.manual_seed(0)
    model = nn.Conv1d(8, 16, 3, padding=1, groups=groups)
    x = torch.randn(1, 1, 8, 6).expand(CROWD, 2, 8, 6).clone()
    x[:, 1] *= torch.linspace(0, 8, 8)[:, None]
    row = torch.randn(1, 1, 16, 6)
    g = torch.cat([row, -(1 - 2.0**-15) * row], dim=1).expand(CROWD, 2, 16, 6).clone()
    x[:, 1] = x[:, 0]
    assert moved(model, 1e-5, x, g, views=2) < 5e-3


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5, 1e6, 1e8])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (lambda: nn.LayerNorm(24), (24,)),
        (lambda: nn.LayerNorm(24), (5, 24)),
        (lambda: nn.LayerNorm(1), (3, 1)),
        (lambda: nn.LayerNorm(2), (3, 2)),
        (lambda: nn.LayerNorm((4, 6)), (3, 4, 6)),
        (lambda: nn.InstanceNorm2d(8, affine=True), (8, 6, 6)),
        (lambda: nn.GroupNorm(2, 8), (8, 6, 6)),
    ],
)
def test_inputs_far_from_zero_under_a_norm_are_rounded_and_shortened(
    kind: type[nn.Module], shape: tuple[int, ...], offset: float
) -> None:
    """Autograd takes means off in other roundings than a rule's forward pass. Before: at 1e6 24
    records moved by 0.5 C, at 1e8 by 34 C.
    """
    torch.manual_seed(0)
    model = kind()
    x = (torch.randn(1, *shape) + offset).expand(CROWD, *shape).clone()
    g = torch.randn(1, *shape).expand(CROWD, *shape).clone()
    assert moved(model, 0.5, x, g) < 1e-2


class Attends(nn.Module):
    """Attention to itself, or to something else by one matrix."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.crossed, self.attention = crossed, nn.MultiheadAttention(16, 2, batch_first=True)
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        key = x.flip(2) if self.crossed else x
        found: Tensor = self.attention(x, key, key, need_weights=False)[0]
        return found


@pytest.mark.parametrize("crossed", [False, True])
def test_attention_has_one_spread(crossed: bool) -> None:
    """Several examples are captured map by map, and one was by signs, which say another number.
    Before: 24 records moved by 20 C.
    """
    torch.manual_seed(0)
    model = Attends(crossed)
    x = torch.randn(1, 3, 16).expand(CROWD, 3, 16).clone()
    x[:, 1] = x[:, 0]
    g = cancelling((16,), 2.0**-15).mT.clone()
    assert moved(model, 1e-5, x, g) < 2e-2


@pytest.mark.parametrize("half", ["autocast", "parameters", "no"])
def test_half_precision_has_one_engine_whatever_the_batch(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In it two engines give a record two gradients, by 1e-3 C each, of copies by as many times
    that; with little memory records of a wide layer would be taken one at a time. From the first
    release on, though autocast within a loss is seen by looking alone.
    """
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    x = torch.randn(2, 256, 256)
    if half == "parameters":
        model, x = model.bfloat16(), x.bfloat16()
    ran: list[str] = []

    def noted(name: str, add: Any, *given: Any) -> Any:
        ran.append(name)
        return add(*given)

    for name in ("add_one_by_one", "add_by_bookkeeping"):
        monkeypatch.setattr(bound, name, partial(noted, name, getattr(bound, name)))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
            return model(batch).float().square().mean((1, 2))

    clipper = Clipper(1.0, memory_budget=1.0).bind(model, loss)
    for step in range(3):
        clipper.clip(x, step=step)
    assert set(ran) == {"add_one_by_one" if half == "no" else "add_by_bookkeeping"}


class Branches(nn.Module):
    """A matrix that only rare records use, without a call of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        rare = x[:, 0, 0] > 50
        if bool(rare.any()):
            h = h + rare[:, None, None] * nn.functional.linear(x, self.rare.weight)
        return h


@pytest.mark.parametrize("half", [True, False])
def test_a_record_that_cannot_be_captured_changes_no_engine_in_half_precision(half: bool) -> None:
    """Before: one record more took 256 copies, each by 1e-3 C, with it: 1.06 C together."""

    def squares(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean((1, 2))

    torch.manual_seed(0)
    model = Branches().bfloat16() if half else Branches()
    x = torch.randn(6, 8, 32).to(torch.bfloat16 if half else torch.float32)
    clipper = Clipper(1.0).bind(model, squares)
    for step in range(2):
        clipper.clip(x, step=step)
    x[3, 0, 0] = 100.0
    if not half:  # in float32 either engine will do
        clipper.clip(x, step=2)
        return
    with pytest.raises(NotCaptured, match="engine='one-example'"):
        clipper.clip(x, step=2)
    one_by_one = Clipper(1.0, engine="one-example").bind(model, squares)
    one_by_one.clip(x, step=0)
