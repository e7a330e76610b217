"""Whose a random number is, asked of the look itself: quick, where a run through the clipper for
each way of drawing takes a minute.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import Loss, With, good, records, switched_off
from attacks.test_guard_shared_numbers import BACKWARD, MET_BY_OTHERS, Leaves
from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.backward import Checkpointing
from quietgrad.clipping.capture.layout import layout_of
from quietgrad.clipping.soundness.company.own_numbers import share_numbers
from quietgrad.clipping.soundness.subject import Subject

SHARED = [
    *["layer", "features", "pythons", "numpys", "beside others", "beside noise"],
    *MET_BY_OTHERS,
    *list(BACKWARD)[:3],
]
OWN = ["each", "none", "row by row", "heads", "heads by turns", "positions first", "own backward"]


def asked(model: nn.Module, loss: Loss = good) -> bool:
    """Whether the records of a micro-batch share a number, by what the look says."""
    subject = Subject(model, layout_of(model), loss, Checkpointing())
    return share_numbers(subject, records(6))


@pytest.mark.parametrize("kind", SHARED)
def test_a_number_that_others_meet_is_shared(kind: str) -> None:
    assert asked(Leaves(kind).train())


@pytest.mark.parametrize("kind", OWN)
def test_a_records_own_number_is_not(kind: str) -> None:
    assert not asked(Leaves(kind).train())


def met_by_all(number: Callable[[int], Tensor]) -> nn.Module:
    """Hidden features times one number, made of what is drawn for so many records."""
    return With(lambda model, h: h * number(len(h)))


def drawn_again(n: int) -> Tensor:
    """Until it is not too small."""
    drawn = torch.rand(n)
    return drawn[0] if drawn[0] > 0.3 else 1 + torch.rand(n)[0]


def drawn_beside_another(n: int) -> Tensor:
    """A second number where the first one is in the middle of its range."""
    return torch.rand(n)[0] if 0.1 < torch.rand(n)[0] < 0.9 else torch.ones(())


ODD: dict[str, Callable[[int], Tensor]] = {
    "of as many numbers as pairs": lambda n: torch.rand(n, n)[0, 0],
    "of one more than there are": lambda n: torch.rand(n + 1)[0],
    "drawn again": drawn_again,
    "drawn beside another": drawn_beside_another,
    "of a fused kernel's mask": lambda n: torch.native_dropout(torch.ones(n, 1), 0.5, True)[0][-1],
    "that matters little": lambda n: 1 + 0.01 * torch.rand(n)[0],
}


@pytest.mark.parametrize("kind", ODD)
def test_it_is_shared_where_it_cannot_be_told_whose_it_is(kind: str) -> None:
    assert asked(met_by_all(ODD[kind]))


def test_it_is_shared_where_gradients_alone_show_a_little_of_it() -> None:
    def change(model: With, h: Tensor) -> Tensor:
        return h + 0.01 * torch.rand(len(h))[0] * (h - h.detach())

    assert asked(With(change))


class Second(nn.Module):
    """Weights of its own, and what is used is the second output: to factors there is none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x @ self.weight


class Turned(nn.Module):
    """A number turns gradients round, and no loss."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.inner, self.own = Second(), own

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[1]
        drawn = torch.rand(len(x), 1)
        sign = 8 * (drawn if self.own else drawn[0]).round() - 1
        return out + (out - out.detach()) * sign


@pytest.mark.parametrize("own", [True, False])
def test_a_number_that_only_a_later_output_shows(own: bool) -> None:
    """Before: not seen. What gradients are made of was compared by factors alone."""
    assert asked(Turned(own)) is not own


def test_without_the_look_one_record_reveals_others_that_cancel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched_off(monkeypatch)
    batch = records(16)
    batch["x"][:] = batch["x"][0]
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0] * 4)

    def moved(first: int) -> float:
        signs = torch.cat([torch.zeros(first), sign])
        bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=2)
        of_one = {"x": batch["x"][:1].expand(16 + first, -1), "sign": signs}
        made = bound.bind(Turned(own=False), loss).clip(of_one).gradients
        return float(made["inner.weight"].norm())

    def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(part["x"])[:, 0] * part["sign"]
        return found

    assert max(moved(0) for _ in range(5)) < 1e-5
    assert max(moved(1) for _ in range(5)) > 1.5  # C is all that it may add
