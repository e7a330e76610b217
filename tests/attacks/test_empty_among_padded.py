"""Empty texts among those that ``collate_fn`` brings to one size. A model that has nothing to say
of one by itself must not hide what padding does to the others; and one that masks padding by large
negative numbers spreads its attention over all of it, where there is nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.test_unmasked_padding import (
    REFUSED,
    USUAL,
    LastState,
    Record,
    Records,
    Series,
    masked,
    padded,
    released,
)
from quietgrad.clipping.soundness.company import padding
from quietgrad.loading.padding import PaddingLooks

LIMIT = 0.05  # the clipping norm of ``released``


class WithEmpty(Records):
    """Some of the records are empty."""

    def __init__(self, last: int = USUAL, empty: range = range(3, 4)) -> None:
        super().__init__(last)
        self.empty = empty

    def __getitem__(self, index: int) -> Record:
        x, y = super().__getitem__(index)
        return (x[:0] if index in self.empty else x), y


class Attends(nn.Module):
    """Exact for texts that have a word, however long the others are."""

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.score, self.head = nn.Linear(2, 8), nn.Linear(8, 1), nn.Linear(8, 3)
        self.strict = strict

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.strict and not x.shape[1]:
            raise ValueError("no positions")
        places = torch.arange(x.shape[1]) / 8.0
        h = torch.tanh(self.first(x + places[:, None]))
        scores = self.score(h)[..., 0].masked_fill(mask == 0, -1e9)
        found: Tensor = self.head((h * scores.softmax(1)[..., None]).sum(1))
        return found


class Masks(Attends):
    """Nothing of an empty text."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * mask[..., None]
        found: Tensor = self.head(h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1.0))
        return found


MANY = range(3, 20)


def moved(model: type[nn.Module], collate: Any, empty: range) -> float:
    """By how many C another record in the last one's place moves the sum, where nobody looks."""
    one, other = (released(model(), collate, WithEmpty(last, empty)) for last in (USUAL, 6 * USUAL))
    squares = sum(float((one[name] - other[name]).double().pow(2).sum()) for name in one)
    return squares**0.5 / LIMIT


def test_an_empty_record_does_not_hide_what_padding_does_to_others() -> None:
    """Before: taken, and 23 C."""
    with pytest.raises(ValueError, match=REFUSED):
        released(LastState(), padded, WithEmpty(6 * USUAL))


@pytest.mark.parametrize("strict", [False, True])
def test_attention_over_nothing_but_padding_is_refused(strict: bool) -> None:
    """Before: taken where the model cannot take an empty record alone, and 13 C."""
    with pytest.raises(ValueError, match=REFUSED):
        released(Attends(strict), masked, WithEmpty(6 * USUAL, MANY))


def test_an_empty_record_that_adds_something_beside_others_alone_is_refused() -> None:
    """Of nothing a mean is no number, of padding it is one."""
    with pytest.raises(ValueError, match=REFUSED):
        released(Series(), padded, WithEmpty())


@pytest.mark.parametrize("last", [1, USUAL, 6 * USUAL])
@pytest.mark.parametrize("model", [Masks, Attends])
def test_what_masks_all_of_it_is_taken(model: type[nn.Module], last: int) -> None:
    """With empty records, or without."""
    assert released(model(), masked, WithEmpty(last, MANY if model is Masks else range(0)))


def test_where_all_are_empty_nothing_is_filled_up() -> None:
    assert released(Masks(), masked, WithEmpty(0, range(24)))


def test_without_the_look_one_record_moves_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaddingLooks, "look", lambda *_: None)
    assert moved(LastState, padded, range(3, 4)) > 10.0
    assert moved(Attends, masked, MANY) > 5.0


def test_records_that_a_model_cannot_take_alone_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant: the first of them ends the look, as it did."""
    taken = padding._require_same

    def all_or_none(subject: Any, together: Any, alone: Any, thorough: bool) -> None:
        for _, one in alone:
            subject.losses(one)
        taken(subject, together, alone, thorough)

    monkeypatch.setattr(padding, "_require_same", all_or_none)
    assert released(LastState(), padded, WithEmpty(6 * USUAL))
