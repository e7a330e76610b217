"""Models in which a record's contribution follows from how long others are. The first batch holds
texts of one length, which shows nothing; then comes one that is shorter, empty or longer.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, switched_off
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import mixing
from quietgrad.clipping.soundness.company import lengths
from quietgrad.clipping.soundness.company.lengths import longest, shortened

WORDS, LENGTH, UNGUARDED = 20, 12, 2
Cut = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Text(nn.Module):
    """The mean of a text's words, after something was done to the batch."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.cut = nn.Embedding(WORDS, 8), nn.Linear(8, 3), cut

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        ids, mask = self.cut(ids, mask)
        shown = mask.unsqueeze(-1).float()
        found: Tensor = self.head((self.words(ids) * shown).sum(1) / shown.sum(1).clamp(min=1))
        return found


def as_they_are(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ids, mask


def to_the_longest(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Saves work, and changes nothing."""
    n = max(int(mask.sum(1).max()), 1)
    return ids[:, :n], mask[:, :n]


def to_the_shortest(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    n = max(int(mask.sum(1).min()), 1)
    return ids[:, :n], mask[:, :n]


def nothing_beside_an_empty_one(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ids, mask * bool((mask.sum(1) > 0).all())


def by_length(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """And never put back."""
    order = mask.sum(1).argsort(descending=True, stable=True)
    return ids[order], mask[order]


def by_length_shortest_first(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    order = mask.sum(1).argsort(stable=True)
    return ids[order], mask[order]


def nothing_beside_one_word(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ids, mask * bool((mask.sum(1) != 1).all())


# name -> what is done, and the odd text's length
ATTACKS: dict[str, tuple[Cut, int]] = {
    "cut-to-the-shortest": (to_the_shortest, 2),
    "nothing-beside-an-empty-one": (nothing_beside_an_empty_one, 0),
    "sorted-by-length": (by_length, LENGTH),
    "sorted-shortest-first": (by_length_shortest_first, 2),
    "nothing-beside-one-word": (nothing_beside_one_word, 1),
}
FORMS = ["mask", "boolean-mask", "padding-word", "lengths", "series"]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Takes every form in which lengths come."""
    mask = batch.get("mask")
    if "lengths" in batch:
        mask = torch.arange(LENGTH) < batch["lengths"].unsqueeze(1)
    elif "x" in batch:
        mask = (batch["x"] != 0).any(2)
        return F.cross_entropy(
            model(batch["x"][:, :, 0].long(), mask), batch["y"], reduction="none"
        )
    elif mask is None:
        mask = batch["ids"] != model.words.padding_idx  # type: ignore[union-attr]
    return F.cross_entropy(model(batch["ids"], mask), batch["y"], reduction="none")


def texts(form: str, odd: int = 10) -> dict[str, Tensor]:
    """Of length 10, one of them of another."""
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS - 1, (RECORDS, LENGTH), generator=source)
    lengths = torch.full((RECORDS,), 10)
    lengths[5] = odd
    y = torch.randint(0, 3, (RECORDS,), generator=source)
    mask = torch.arange(LENGTH) < lengths.unsqueeze(1)
    if form == "mask":
        return {"ids": ids * mask, "mask": mask.long(), "y": y}
    if form == "boolean-mask":
        return {"ids": ids * mask, "mask": mask, "y": y}
    if form == "padding-word":
        return {"ids": torch.where(mask, ids, WORDS - 1), "y": y}
    if form == "lengths":
        return {"ids": ids * mask, "lengths": lengths, "y": y}
    return {"x": (ids * mask).unsqueeze(2).expand(-1, -1, 2).float(), "y": y}


def model_of(cut: Cut, form: str) -> nn.Module:
    model = Text(cut)
    if form == "padding-word":
        model.words.padding_idx = WORDS - 1
    return model


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("form", FORMS)
def test_it_is_refused_on_texts_of_one_length(form: str, attack: str) -> None:
    batch = texts(form)
    if form == "lengths":  # padded to the longest, as batches are
        batch["lengths"] += 2
    model = model_of(ATTACKS[attack][0], form)
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, physical_batch_size=RECORDS).clip(model, loss, batch)


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("together", [2, 3])
def test_it_is_refused_by_looks_of_few(together: int, attack: str) -> None:
    """Micro-batches so small that lengths are looked at a few at a time."""
    model = model_of(ATTACKS[attack][0], "mask")
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, engine="bookkeeping", physical_batch_size=together).clip(
            model, loss, texts("mask")
        )


@pytest.mark.parametrize("at_once", [2, 3, 4, 8])
@pytest.mark.parametrize("shares", [lengths.THOROUGH, lengths.LATER])
def test_every_shorter_text_stands_beside_a_whole_one(
    shares: tuple[float, ...], at_once: int
) -> None:
    made = lengths._companies(shares, at_once)
    assert all(one[0] == 1.0 and 2 <= len(one) <= at_once for one in made)
    assert [share for one in made for share in one[1:]] == list(shares[1:])


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: all else of the guard stays."""
    monkeypatch.setattr(mixing, "require_lengths_apart", lambda *arguments: None)
    cut, odd = ATTACKS[attack]
    clipper = Clipper(0.1, engine="bookkeeping", physical_batch_size=RECORDS)
    bound = clipper.bind(Text(cut), loss)
    bound.clip(texts("mask"), step=0)
    whole = texts("mask", odd)
    rest = {name: t[torch.arange(RECORDS) != 5] for name, t in whole.items()}
    one, other = (bound.clip(b, step=UNGUARDED).gradients for b in (whole, rest))
    moved = sum(float((g - other[name]).double().pow(2).sum()) for name, g in one.items())
    assert moved**0.5 > 1.5 * 0.1


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a != "nothing-beside-one-word"])
def test_it_is_seen_at_a_later_look(attack: str) -> None:
    opened: list[bool] = []

    def later(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (ATTACKS[attack][0] if opened else as_they_are)(ids, mask)

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(Text(later), loss)
    bound.clip(texts("mask"), step=0)
    opened.append(True)
    with pytest.raises(ValueError, match="depends on other"):
        bound.clip(texts("mask"), step=1)


def of_so_many(least: int, opened: list[bool]) -> Cut:
    """Cut to the shortest, by a model that takes no shorter ones than these."""

    def cut(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if int(mask.sum(1).min()) < least:
            raise ValueError("a convolution is wider than a text")
        return (to_the_shortest if opened else as_they_are)(ids, mask)

    return cut


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("least", [1, 3])
def test_it_is_seen_where_a_model_takes_no_text_of_few_words(least: int, step: int) -> None:
    """As convolutions over words: then there is no company with an empty one, nor with one word."""
    opened = [True] * (step == 0)
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(Text(of_so_many(least, opened)), loss)
    if step:
        bound.clip(texts("mask"), step=0)
        opened.append(True)
    with pytest.raises(ValueError, match="depends on other"):
        bound.clip(texts("mask"), step=step)


def test_without_such_a_look_one_record_moves_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lengths._shares
    monkeypatch.setattr(lengths, "_shares", lambda *given: list(right(*given))[:2])
    clipper = Clipper(0.1, engine="bookkeeping", physical_batch_size=RECORDS)
    bound = clipper.bind(Text(of_so_many(3, [True])), loss)
    bound.clip(texts("mask"), step=0)
    whole = texts("mask", 3)
    rest = {name: t[torch.arange(RECORDS) != 5] for name, t in whole.items()}
    one, other = (bound.clip(b, step=UNGUARDED).gradients for b in (whole, rest))
    moved = sum(float((g - other[name]).double().pow(2).sum()) for name, g in one.items())
    assert moved**0.5 > 1.5 * 0.1


def test_it_is_seen_in_gradients_alone() -> None:
    """They follow from the shortest text, and no loss does."""

    def steeper(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = loss(model, batch)
        return found + float(batch["mask"].sum(1).min()) * (found - found.detach())

    with pytest.raises(ValueError, match="depends on other"):
        Clipper(1.0, physical_batch_size=RECORDS).clip(Text(as_they_are), steeper, texts("mask"))


@pytest.mark.parametrize("words", [2, 5])
def test_it_is_seen_in_texts_of_few_words(words: int) -> None:
    batch = {name: t[:, :words] if t.dim() > 1 else t for name, t in texts("mask").items()}
    with pytest.raises(ValueError, match="depends on other"):
        Clipper(1.0, physical_batch_size=RECORDS).clip(Text(to_the_shortest), loss, batch)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [as_they_are, to_the_longest])
def test_texts_of_their_own_are_taken(cut: Cut, form: str) -> None:
    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=RECORDS).bind(
        model_of(cut, form), loss
    )
    for odd in (10, 3, 0):
        bound.clip(texts(form, odd))
    assert next(iter(bound._guard._verdicts.values())).together == RECORDS


class Packed(nn.Module):
    """A recurrence that takes no empty text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.cell, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8), nn.Linear(8, 3)
        self.cell.requires_grad_(False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(ids).transpose(0, 1), mask.sum(1), enforce_sorted=False
        )
        found: Tensor = self.head(self.cell(packed)[1][0])
        return found


def test_a_model_that_takes_no_empty_text_is_decided() -> None:
    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=RECORDS).bind(Packed(), loss)
    bound.clip(texts("mask", 3))
    assert next(iter(bound._guard._verdicts.values())).together == RECORDS


def test_records_are_shortened_in_every_form() -> None:
    batch = {
        "ids": torch.tensor([[7, 8, 9, 3]] * 3),
        "mask": torch.ones(3, 4),
        "labels": torch.tensor([[5, 6, 7, -100]] * 3),
        "n": torch.tensor([4, 4, 3]),
        "y": torch.tensor([0, 1, 2]),
        "image": torch.full((3, 2, 4, 4), 0.5),
    }
    found: Any = shortened(batch, (1.0, 0.5, 0.0), padding=9)
    assert found["ids"].tolist() == [[7, 8, 9, 3], [7, 8, 9, 9], [9, 9, 9, 9]]
    assert found["mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert found["labels"].tolist() == [[5, 6, 7, -100], [5, 6, 7, -100], [-100] * 4]
    assert found["n"].tolist() == [4, 3, 0]
    assert torch.equal(found["y"], batch["y"]) and torch.equal(found["image"], batch["image"])
    assert longest({"x": torch.ones(3, 5) * 2, "image": batch["image"]}) == 0


def passes(model: nn.Module, batch: Any, step: int) -> tuple[int, int]:
    """How many examples went forward and backward; counted where the guard puts nothing back."""
    forward: queue.Queue[int] = queue.Queue()
    backward: queue.Queue[int] = queue.Queue()

    def counting(model: nn.Module, batch: Any) -> Tensor:
        forward.put(len(batch[1]))
        found = F.cross_entropy(model(batch[0]).flatten(1), batch[1], reduction="none")
        found.register_hook(lambda g: backward.put(len(g)))
        return found

    clipper = Clipper(1.0, engine="bookkeeping", physical_batch_size=32)
    clipper.bind(model, counting).clip(batch, step=step)
    return sum(forward.queue), sum(backward.queue)


def images() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    return model, (torch.randn(32, 3, 8, 8), torch.arange(32) % 3)


def words() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Embedding(30, 2), nn.Flatten(), nn.Linear(32, 3))
    return model, (torch.randint(1, 30, (32, 16)), torch.arange(32) % 3)


def test_images_cost_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = images()
    before = passes(model, batch, 0)
    monkeypatch.setattr(mixing, "require_lengths_apart", lambda *arguments: None)
    assert passes(model, batch, 0) == before


@pytest.mark.parametrize("make, forward, backward", [(images, 221, 130), (words, 212, 144)])
def test_a_first_look_costs_what_the_page_says(make: Any, forward: int, backward: int) -> None:
    """Of a step of 32 records, which are 32 of either (docs/clipping/guard.md, "Cost")."""
    torch.manual_seed(0)
    found = passes(*make(), 0)
    assert found[0] <= forward and found[1] <= backward


def test_the_guard_is_what_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    switched_off(monkeypatch)
    for cut, odd in ATTACKS.values():
        Clipper(1.0, physical_batch_size=RECORDS).clip(Text(cut), loss, texts("mask", odd))
