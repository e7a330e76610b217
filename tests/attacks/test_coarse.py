"""Half precision rounds a thousand times as coarsely as float32: a softmax over more keys moves
bfloat16 factors by their whole spacing. No norm divides that is a small share of what a gradient is
a sum of, wherever half precision takes part in a pass (``norms/coarseness``).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.layout.modules import tensors_in
from quietgrad.clipping.norms import coarseness, rounding
from tests.attacks.test_padded_formed import moved as moved_by
from tests.attacks.test_padded_models import Attentive, last, sum_of

CLOSE = 0.05


def moved(estimator: str) -> float:
    """By a longer text, in clipping norms, of 40 texts whose positions cancel."""
    return float((sum_of(131, estimator) - sum_of(0, estimator)).norm())


@pytest.mark.parametrize("estimator", ["auto", "materialized", "hutch", "hutch++"])
def test_a_longer_text_hardly_moves_texts_in_bfloat16(estimator: str) -> None:
    """Before: 1.4 C; now 0.009 C."""
    with torch.autocast("cpu", torch.bfloat16):
        assert moved(estimator) < CLOSE


def test_one_at_a_time_too() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert moved_by(Attentive(last), "auto", "one-example") < CLOSE


@pytest.mark.parametrize("estimator", ["auto", "hutch"])
def test_divided_as_in_float32_it_is_seen(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarseness, "OF_COARSE", 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert moved(estimator) > 0.5


def part_of_two_positions(estimator: str, engine: str) -> float:
    """What a record adds, in clipping norms, whose second position takes back seven eighths of the
    first: few positions, so that their sum S hardly shows that they cancel.
    """
    model = nn.Linear(8, 4, bias=False).bfloat16()
    x = torch.full((1, 2, 8), 8.0)
    g = torch.full((1, 2, 4), 8.0) * torch.tensor([1.0, -0.875]).view(1, 2, 1)
    bound = Clipper(1.0, estimator, engine=engine).bind(model, loss)
    found = bound.clip((x.bfloat16(), g.bfloat16()), step=0)
    return float(found.gradients["weight"].double().norm())


WAYS = [
    (estimator, engine)
    for estimator in ("exact", "materialized", "ghost")
    for engine in ("bookkeeping", "one-example")
]


@pytest.mark.parametrize("estimator, engine", WAYS)
def test_two_positions_that_cancel_add_a_part_alone(estimator: str, engine: str) -> None:
    """An eighth of a position, divided by 64 u Q = sqrt(1 + 0.875^2) / 4 of one."""
    expected = 0.125 / (math.hypot(1.0, 0.875) / 4)
    assert part_of_two_positions(estimator, engine) == pytest.approx(expected, rel=1e-2)


def test_divided_by_a_share_of_their_sum_alone_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "OF_TERMS", 0.0)
    assert part_of_two_positions("exact", "bookkeeping") > 0.99


class Below(nn.Module):
    """A float32 layer above a product in half precision, which none of its factors shows."""

    def __init__(self, dtype: torch.dtype | None = torch.bfloat16) -> None:
        super().__init__()
        self.dtype, self.large = dtype, float("inf")
        self.inner = nn.Linear(4, 6).requires_grad_(False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.dtype is not None and (self.large == float("inf") or self._asked(x))
        cast = torch.autocast("cpu", self.dtype) if narrow else contextlib.nullcontext()
        with cast:
            h = self.inner(x)
        out: Tensor = self.out(h.float())
        return out

    def _asked(self, x: Tensor) -> bool:
        return bool((x.abs() > self.large).any())


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def drawn(records: int = 4) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(records, 5, 4, generator=source), torch.randn(
        records, 5, 3, generator=source
    )


@pytest.mark.parametrize(
    "dtype, times", [(torch.bfloat16, 64.0), (torch.float16, 8.0), (None, 1.0)]
)
def test_half_precision_below_a_layer_is_seen(dtype: torch.dtype | None, times: float) -> None:
    bound = Clipper(1.0, engine="bookkeeping").bind(Below(dtype), loss)
    bound.clip(drawn(), step=0)
    assert bound._guard.least_times(bound.model) == times


def test_what_stands_in_half_precision_is_seen() -> None:
    model = nn.Linear(3, 2)
    assert coarseness.least_times(coarseness.standing(tensors_in(model))) == 1.0
    model.register_buffer("table", torch.zeros(2, dtype=torch.float16))
    assert coarseness.least_times(coarseness.standing(tensors_in(model))) == 8.0
    with torch.autocast("cpu", torch.bfloat16):
        assert coarseness.least_times(coarseness.standing(tensors_in(model))) == 64.0
    assert coarseness.least_times(coarseness.standing(tensors_in(model.bfloat16()))) == 64.0
    assert coarseness.least_times(coarseness.standing(tensors_in(nn.Linear(3, 2).double()))) == 1.0


def test_half_precision_that_a_record_asks_for_is_refused() -> None:
    """One record would decide what all others are divided by."""
    model, (x, y) = Below(), drawn()
    model.large, x[0] = 50.0, 100.0
    with pytest.raises(ValueError, match="half precision at times"):
        Clipper(1.0, engine="bookkeeping").bind(model, loss).clip((x, y), step=0)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.narrow = nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            out: Tensor = self.out(x)
        return out


@pytest.mark.parametrize("step", [5, 7])
def test_half_precision_that_comes_later_is_refused(step: int) -> None:
    """By a layer's own factors, and at a release at which the guard looks."""
    model = Late()
    bound = Clipper(1.0, engine="bookkeeping").bind(model, loss)
    bound.clip(drawn(), step=0)
    model.narrow = True
    with pytest.raises(ValueError, match="runs in half precision"):
        bound.clip(drawn(), step=step)


def test_one_half_tensor_among_a_calls_is_enough() -> None:
    single, half = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    coarseness.refuse_coarser("layer", [single, single], 1.0)
    coarseness.refuse_coarser("layer", [torch.zeros(1, dtype=torch.int64), single], 1.0)
    for tensors in ([single, half], [half, single], [half]):
        with pytest.raises(ValueError, match="'layer' runs in half precision"):
            coarseness.refuse_coarser("layer", tensors, 1.0)
