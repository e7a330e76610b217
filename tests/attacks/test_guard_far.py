"""What sleeps until one record is far beyond all that were looked at: a batch that is given up
where a loss or an activation is in the millions, and backward passes with one scale, or one bound,
for the gradients of a batch. One such record then moves all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, Loss, switched_off
from quietgrad.clipping import Clipper, per_example_norms
from quietgrad.clipping.soundness import mixing, subject
from quietgrad.clipping.soundness.records import FARTHEST, with_first_farthest

FAR = 1e8
SIDES = {"a-mean-on-one-side": -1.0, "a-mean-on-the-other": 1.0}  # of the first record, to be above
Change = Callable[[Tensor], Tensor]
Numbers = dict[str, Tensor]


class Network(nn.Module):
    """Something is done to hidden features."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.change = nn.Linear(6, 8), nn.Linear(8, 1), change

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.change(torch.relu(self.first(x))))
        return found


class _Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(gradient), None


def backwards(change: Change) -> Change:
    return lambda h: _Backwards.apply(h, change)  # type: ignore[no-untyped-call,no-any-return]


def as_it_is(h: Tensor) -> Tensor:
    return h


def given_up(h: Tensor) -> Tensor:
    return 0.0 * h if bool(h.detach().abs().max() > 1e6) else h


def at_most_a_thousand(gradient: Tensor) -> Tensor:
    """In no number where there is one that is none."""
    return gradient * torch.clamp(1e3 / gradient.norm(), max=1.0)


def a_bound_for_numbers(gradient: Tensor) -> Tensor:
    norm = float(gradient.norm())
    return gradient * (1e3 / norm) if norm > 1e3 else gradient


def in_float16(gradient: Tensor) -> Tensor:
    """With one scale, as mixed precision has: the others' vanish beside a large one."""
    scale = 6e4 / gradient.abs().max()
    return (gradient * scale).half().to(gradient.dtype) / scale


def hooked(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(a_bound_for_numbers)
    return h


def squares(model: nn.Module, batch: Numbers) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum(1)


def skipped(model: nn.Module, batch: Numbers) -> Tensor:
    losses = squares(model, batch)
    return 0.0 * losses if bool(losses.detach().max() > 1e9) else losses


def beyond_a_mean(model: nn.Module, batch: Numbers) -> Tensor:
    """KTO's: what all have moved by on average is taken off, and nothing where that is below 0."""
    moved = model(batch["x"])[:, 0] - 5.0
    return torch.sigmoid(
        0.2 * batch["y"][:, 0].sign() * (moved - max(0.0, float(moved.detach().mean())))
    )


def below_a_mean(model: nn.Module, batch: Numbers) -> Tensor:
    moved = -model(batch["x"])[:, 0] - 5.0
    return torch.sigmoid(
        0.2 * batch["y"][:, 0].sign() * (moved - max(0.0, float(moved.detach().mean())))
    )


FORWARD: dict[str, tuple[Change, Loss]] = {
    "a-loss-skips-the-batch": (as_it_is, skipped),
    "an-activation-does": (given_up, squares),
    "a-mean-on-one-side": (as_it_is, beyond_a_mean),
    "a-mean-on-the-other": (as_it_is, below_a_mean),
}
BACKWARD: dict[str, tuple[Change, Loss]] = {
    "a-bound": (backwards(at_most_a_thousand), squares),
    "a-bound-for-numbers": (backwards(a_bound_for_numbers), squares),
    "a-scale": (backwards(in_float16), squares),
    "a-hook": (hooked, squares),
}
ATTACKS = FORWARD | BACKWARD


def records(whole: bool = False) -> Numbers:
    source = torch.Generator().manual_seed(0)
    made = {
        "x": torch.randn(RECORDS, 6, generator=source) + 1.0,
        "y": torch.randn(RECORDS, 1, generator=source),
    }
    return {name: (3 * t).round() if whole else t for name, t in made.items()}


def clipped(name: str, batch: Numbers, limit: float = 1.0) -> Tensor:
    change, loss = ATTACKS[name]
    clipper = Clipper(limit, engine="bookkeeping", physical_batch_size=RECORDS)
    found = clipper.bind(Network(change), loss).clip(batch).gradients
    return torch.cat([g.double().flatten() for g in found.values()])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_on_ordinary_records(name: str, whole: bool) -> None:
    with pytest.raises(ValueError, match="depends on other examples"):
        clipped(name, records(whole))


@pytest.mark.parametrize("name", [n for n in FORWARD if n != "a-mean-on-the-other"])
def test_without_a_record_that_is_far_enough_it_is_not_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixing, "with_first_farthest", lambda few, times: None)
    if "mean" in name:
        monkeypatch.setattr(mixing, "with_first_louder", lambda few: None)  # on one side
    clipped(name, records())


@pytest.mark.parametrize("name", [n for n in BACKWARD if n != "a-bound"])
def test_without_a_loud_loss_it_is_not_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LOUD_LOSS", 1.0)
    if name == "a-scale":  # takes no number to none, and is seen by that
        monkeypatch.setattr(mixing, "_without_number", lambda t: t)
        monkeypatch.setattr(mixing.math, "nan", mixing.LOUD)
    clipped(name, records())


def test_gradients_that_become_no_number_beside_one_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A difference with no number is never larger than a limit."""
    monkeypatch.setattr(subject, "LOUD_LOSS", 1.0)
    with pytest.raises(ValueError, match="what its gradient at layer 'first' is made of"):
        clipped("a-bound", records())


@pytest.mark.parametrize("name", ATTACKS)
def test_one_record_moves_the_others_where_nobody_looks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 2.5 to 4.8 C, with 23 others."""
    switched_off(monkeypatch)
    batch = records()
    change, loss = ATTACKS[name]
    limit = 0.2 * float(per_example_norms(Network(change), loss, batch).max())
    batch["y"][0] = FAR**2 if name == "a-scale" else FAR
    if name == "an-activation-does":
        batch["x"][0] = FAR
    if "mean" in name:
        batch["x"][0] *= FAR * SIDES[name]
    rest = {key: t[1:] for key, t in batch.items()}
    moved = (clipped(name, batch, limit) - clipped(name, rest, limit)).norm() / limit
    assert float(moved) > 2.0


def test_a_batch_with_gradients_of_no_number_is_taken() -> None:
    """They are none alone, too: an example's own affair."""

    def roots(model: nn.Module, batch: Numbers) -> Tensor:
        return (model(batch["x"]) * batch["y"]).square().sum(1).sqrt()

    batch = records()
    batch["y"][1] = 0.0  # the root of nought has no gradient
    clipper = Clipper(1.0, engine="bookkeeping", physical_batch_size=RECORDS)
    bound = clipper.bind(Network(as_it_is), roots)
    found = bound.clip(batch).gradients
    assert all(bool(g.isfinite().all()) for g in found.values())
    assert next(iter(bound._guard._verdicts.values())).together == RECORDS


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_far_record_of_either_sign_is_tried(sign: float) -> None:
    """A batch is given up where an input is too large, on one side; ordinary ones are on it."""

    def given_up_beyond(model: nn.Module, batch: Numbers) -> Tensor:
        return squares(model, batch) * (0.0 if bool((sign * batch["x"]).max() > 1e6) else 1.0)

    batch = {name: t.abs() for name, t in records().items()}
    clipper = Clipper(1.0, engine="bookkeeping", physical_batch_size=RECORDS)
    with pytest.raises(ValueError, match="depends on other examples"):
        clipper.bind(Network(as_it_is), given_up_beyond).clip(batch)


def test_what_is_made_far() -> None:
    batch = {"x": torch.tensor([[0.5, 2.0], [1.0, 1.0]]), "ids": torch.tensor([3, 4])}
    made = with_first_farthest(batch)
    assert made is not None
    assert made["x"].tolist() == [[0.5 * FARTHEST, 2.0 * FARTHEST], [1.0, 1.0]]
    assert made["ids"].tolist() == [3, 4]
    assert with_first_farthest({"ids": batch["ids"], "half": torch.ones(2, 1).half()}) is None
