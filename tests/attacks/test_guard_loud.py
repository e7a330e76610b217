"""Mixing that sleeps on ordinary records, and that one record with a missing value (no number) or
with large activations wakes: then all others change.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, Loss, With, good, records, rows, small, switched_off
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import mixing

LIMIT = 0.05


def softmax_by_the_largest_of_all(model: With, h: Tensor) -> Tensor:
    e = torch.exp(12 * h - (12 * h).max())
    return e / e.sum(1, keepdim=True)


def in_twelve_bits(model: With, h: Tensor) -> Tensor:
    scale = h.detach().abs().max() / 2047
    return h + ((h / scale).round() * scale - h).detach()


def as_it_is_where_all_are_small(model: With, h: Tensor) -> Tensor:
    return h if float(h.detach().abs().max()) < 50 else 0.1 * h


def skipped_where_one_is_not_finite(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = good(model, batch)
    return torch.where(losses.detach().isfinite().all(), losses, torch.zeros_like(losses))


def by_hand_with_the_largest_of_all(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Right for finite numbers, whoever is there."""
    logits = model(batch["x"])
    e = torch.exp(logits - logits.detach().max())
    return -torch.log(e.gather(1, batch["y"].unsqueeze(1))[:, 0] / e.sum(1))


def at_most_twenty_means(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = good(model, batch)
    return losses.clamp(max=float(losses.detach().mean()) * 20)


def scaled_by_the_largest_input(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    top = batch["x"].abs().max()
    return good(model, batch | {"x": batch["x"] * (1.0 if bool(top < 1e3) else 0.0)})


def skipped_where_an_input_is_missing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = good(model, batch)
    return torch.where(batch["x"].isfinite().all(), losses, torch.zeros_like(losses))


ATTACKS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "skipped-where-an-input-is-missing": (small, skipped_where_an_input_is_missing),
    "softmax-by-the-largest-of-all": (lambda: With(softmax_by_the_largest_of_all), good),
    "in-twelve-bits": (lambda: With(in_twelve_bits), good),
    "as-it-is-where-all-are-small": (lambda: With(as_it_is_where_all_are_small), good),
    "skipped-where-one-is-not-finite": (small, skipped_where_one_is_not_finite),
    "by-hand-with-the-largest-of-all": (small, by_hand_with_the_largest_of_all),
    "at-most-twenty-means": (small, at_most_twenty_means),
    "scaled-by-the-largest-input": (small, scaled_by_the_largest_input),
}


def gated(name: str) -> tuple[nn.Module, Loss, Callable[[], None]]:
    """Model and loss of an attack that begins once the third is called."""
    make, bad = ATTACKS[name]
    model, open_now = make(), [False]
    change = getattr(model, "change", None)
    if change is not None:
        model.change = lambda one, h: change(one, h) if open_now[0] else h  # type: ignore[assignment]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (bad if open_now[0] else good)(model, batch)

    def begin() -> None:
        open_now[0] = True

    return model, loss, begin


def clipped(name: str, batch: dict[str, Tensor]) -> Tensor:
    make, loss = ATTACKS[name]
    bound = Clipper(LIMIT, engine="bookkeeping", physical_batch_size=64).bind(make(), loss)
    return torch.cat([g.double().flatten() for g in bound.clip(batch, step=0).gradients.values()])


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_on_ordinary_records(name: str) -> None:
    with pytest.raises(ValueError, match="depends on other examples"):
        clipped(name, records())


@pytest.mark.parametrize("name", ATTACKS)
def test_what_begins_later_is_refused_at_the_next_look(name: str) -> None:
    model, loss, begin = gated(name)
    bound = Clipper(LIMIT, engine="bookkeeping", physical_batch_size=64).bind(model, loss)
    bound.clip(records(), step=0)
    begin()
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=1)


def test_a_later_look_without_a_loud_record_does_not_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, loss, begin = gated("skipped-where-one-is-not-finite")
    bound = Clipper(LIMIT, engine="bookkeeping", physical_batch_size=64).bind(model, loss)
    bound.clip(records(), step=0)
    begin()
    monkeypatch.setattr(mixing, "_require_deaf", lambda subject, few: None)
    for step in (1, 3, 7, 15):
        bound.clip(records(), step=step)


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_loud_record_it_is_not_seen_and_does_harm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record without a number, which adds nothing, moves the others by up to 8 C."""
    monkeypatch.setattr(mixing, "_require_deaf", lambda subject, few: None)
    for made in ("with_first_louder", "with_first_farthest"):  # see some of it, too
        monkeypatch.setattr(mixing, made, lambda few, times=0.0: None)
    ordinary = clipped(name, records())
    switched_off(monkeypatch)
    batch = records(RECORDS + 1)
    batch["x"][:RECORDS], batch["y"][:RECORDS] = records()["x"], records()["y"]
    batch["x"][RECORDS] = float("nan")
    assert float((clipped(name, batch) - ordinary).norm()) > 2 * LIMIT


class _Strict(nn.Module):
    """Refuses what is no number, and what is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not bool((h.abs() < 12).all()):
            raise ValueError("out of range")
        return self.head(h)


def test_models_that_check_their_numbers_are_not_refused() -> None:
    bound = Clipper(1.0, engine="bookkeeping").bind(_Strict(), good)
    assert any(bool(g.any()) for g in bound.clip(records()).gradients.values())


def test_a_model_that_refuses_large_numbers_is_tried_without_numbers_all_the_same() -> None:
    """Mutant: what comes after a loud record that the model does not take is left out."""

    model, most = small(), 1.5 * float(small()(records()["x"]).detach().abs().max())

    def refusing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if bool((model(batch["x"]).abs() > most).any()):
            raise ValueError("out of range")
        return skipped_where_one_is_not_finite(model, batch)

    with pytest.raises(ValueError, match="beside one that is loud, or no number"):
        Clipper(LIMIT, engine="bookkeeping", physical_batch_size=64).bind(model, refusing).clip(
            records()
        )


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


@pytest.mark.parametrize("global_scale", [False, True])
def test_words_have_loud_layers_too(global_scale: bool) -> None:
    """No number of theirs could be made louder."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        if global_scale:
            logits = logits / logits.detach().abs().max().clamp(min=3.0)
        return F.cross_entropy(logits, batch["y"], reduction="none")

    batch = rows(records(), *range(12))
    batch["x"] = torch.randint(0, 9, (12, 4))
    bound = Clipper(1.0, engine="bookkeeping").bind(_Words(), loss)
    if not global_scale:
        bound.clip(batch)
        return
    with pytest.raises(ValueError, match="beside one that is loud, or no number"):
        bound.clip(batch)


def test_words_whose_layers_give_no_number_wake_it_too() -> None:
    """Mutant: records alone are tried without numbers, and words have none."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return torch.where(losses.detach().isfinite().all(), losses, torch.zeros_like(losses))

    batch = rows(records(), *range(12))
    batch["x"] = torch.randint(0, 9, (12, 4))
    with pytest.raises(ValueError, match="beside one that is loud, or no number"):
        Clipper(1.0, engine="bookkeeping").bind(_Words(), loss).clip(batch)
