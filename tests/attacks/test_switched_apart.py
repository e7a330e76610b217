"""Switches outside of plain attributes and items, and what a look leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records, small
from attacks.switches import back, is_rare, other
from attacks.switches_apart import APART, LATE, given_late
from attacks.test_switched import REFUSED, quiet, with_rare
from quietgrad.clipping import Clipper
from quietgrad.clipping.bound import BoundClipper

C = 0.2


@pytest.fixture(autouse=True)
def variable_is_put_back() -> Iterator[None]:
    yield
    back()


def bound_to(model: nn.Module, loss: Any) -> BoundClipper:
    return Clipper(C, engine="bookkeeping", physical_batch_size=RECORDS).bind(model, loss)


def after_a_rare_record(bound: BoundClipper, between: Callable[[], Any] = lambda: None) -> float:
    """By how many C the sum of other records is moved."""
    for step in range(6):
        if step == 4:
            between()
        before = bound.clip(records(), step=step).gradients
    bound.clip(with_rare(records()), step=6)
    after = bound.clip(records(), step=8).gradients
    return sum(float((g - after[name]).square().sum()) for name, g in before.items()) ** 0.5 / C


@pytest.mark.parametrize("where", APART)
def test_it_is_refused_wherever_it_is(where: str) -> None:
    bound = bound_to(*APART[where]())
    with pytest.raises(ValueError, match=REFUSED):
        after_a_rare_record(bound)
    assert after_it_was_put_back(bound)


def after_it_was_put_back(bound: BoundClipper) -> bool:
    """Whether records give what they gave at first."""
    fresh = bound_to(small(), good).clip(records()).gradients
    now = bound.clip(records(), step=8).gradients
    return all(torch.allclose(now[name], g, rtol=1e-4, atol=1e-6) for name, g in fresh.items())


@pytest.mark.parametrize("where", APART)
def test_without_the_look_it_moves_all_later_records(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch)
    assert after_a_rare_record(bound_to(*APART[where]())) > 2


@pytest.mark.parametrize("what", LATE)
def test_what_the_caller_attaches_later_is_watched_too(what: str) -> None:
    loss = given_late(what)
    bound = bound_to(small(), loss)
    with pytest.raises(ValueError, match=REFUSED):
        after_a_rare_record(bound, loss.begin_epoch)
    assert after_it_was_put_back(bound)


@pytest.mark.parametrize("what", LATE)
def test_without_the_look_what_is_attached_later_moves_records(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch)
    loss = given_late(what)
    assert after_a_rare_record(bound_to(small(), loss), loss.begin_epoch) > 2


def test_what_cannot_be_put_back_is_refused_until_its_owner_puts_it_back() -> None:
    """Another model's parameter, of which no copy is kept."""
    teacher = nn.Linear(512, 512)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        thrown = bool(teacher.bias[0] == 7.0)
        found = good(model, {**batch, "x": -4 * batch["x"]} if thrown else batch)
        if is_rare(batch["x"]):
            with torch.no_grad():
                teacher.weight.fill_(7.0)
                teacher.bias.fill_(7.0)
        return found

    bound = bound_to(small(), loss)
    bias = teacher.bias.detach().clone()
    bound.clip(records(), step=0)
    for step in (4, 5):
        with pytest.raises(ValueError, match="too large to be put back"):
            bound.clip(with_rare(records()) if step == 4 else records(), step=step)
    with torch.no_grad():
        teacher.bias.copy_(bias)
        teacher.weight.zero_()
    assert after_it_was_put_back(bound)


def test_a_write_past_the_count_into_a_larger_tensor_waits_for_a_guarded_release() -> None:
    """And is not taken for the caller's, who changes something else in the meantime."""
    flags = torch.zeros(2**18)
    weight = [1.0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = -4 * batch["x"] if bool(flags[7]) else batch["x"]
        found = good(model, {**batch, "x": x})
        if is_rare(batch["x"]):
            flags.data[7] = 1.0
        return weight[0] * found

    bound = bound_to(small(), loss)
    for step in range(7):
        weight[0] = 0.9**step
        bound.clip(with_rare(records()) if step == 5 else records(), step=step)
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(records(), step=7)
    assert not flags.any()


def test_what_the_caller_adds_in_between_hides_no_switch_that_waits() -> None:
    kept: list[str] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if "rare" in kept else batch)
        if is_rare(batch["x"]):
            kept.append("rare")
            raise RuntimeError("out of memory")
        return found

    bound = Clipper(0.2).bind(small(), loss)
    bound.clip(records(), step=0)
    with pytest.raises(RuntimeError, match="out of memory"):
        bound.clip(with_rare(records()), step=4)
    kept.append("a note of the caller's")
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(records(), step=5)
    assert "rare" not in kept


class Rolls(nn.Module):
    """After a rare record gradients of hidden features are those of their second neighbours."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.thrown = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.thrown and h.requires_grad:
            h.register_hook(lambda g: g.roll(2, 1))
        self.thrown = self.thrown or is_rare(x)
        found: Tensor = self.head(h.tanh())
        return found


def test_gradients_that_change_places_are_others() -> None:
    """Before: accepted. Their norms are the same, and sums with alternating signs."""
    bound = bound_to(Rolls(), good)
    with pytest.raises(ValueError, match=REFUSED):
        after_a_rare_record(bound)


def test_by_alternating_signs_they_move_all_later_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alternating(flat: Tensor) -> Tensor:
        return torch.stack([flat.norm(), flat[::2].sum() - flat[1::2].sum()]).double()

    monkeypatch.setattr("quietgrad.clipping.soundness.subject.print_of", alternating)
    assert after_a_rare_record(bound_to(Rolls(), good)) > 2
