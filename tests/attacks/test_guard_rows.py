"""Positions that are picked out of records, of which ordinary records have one each (a mask to be
filled, a marked word, texts of one word without padding): as many rows as records, until one record
has two and another none. Then every row between them would be taken for another record's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import mixing

MARK, WORDS, POSITIONS, LIMIT, UNGUARDED = 2, 30, 6, 0.1, 2
Texts = dict[str, Tensor]
Engine = Any


class Picks(nn.Module):
    """Learns of the picked positions alone, and adds them up record by record: nothing mixes."""

    def __init__(self, picked: Callable[[Texts], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.words.requires_grad_(False)
        self.picked = picked

    def forward(self, batch: Texts) -> Tensor:
        keep = self.picked(batch)
        place = torch.arange(len(keep)).unsqueeze(1).expand_as(keep)[keep]
        x = self.words(batch["ids"]).cumsum(1)[keep]
        h = torch.zeros(len(keep), 8).index_add(0, place, torch.tanh(self.inner(x)))
        found: Tensor = self.head(h)
        return found


def marked(batch: Texts) -> Tensor:
    return batch["ids"] == MARK


def not_padding(batch: Texts) -> Tensor:
    return batch["mask"] == 1


def loss(model: nn.Module, batch: Texts) -> Tensor:
    return F.cross_entropy(model(batch), batch["y"], reduction="none")


def texts(counts: list[int], seed: int = 0) -> Texts:
    """So many marks in each text, at its end, and so many positions that a mask leaves."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (len(counts), POSITIONS), generator=source)
    count = torch.tensor(counts).unsqueeze(1)
    ids[torch.arange(POSITIONS) >= POSITIONS - count] = MARK
    mask = (torch.arange(POSITIONS) < count).long()
    return {"ids": ids, "mask": mask, "y": torch.randint(0, 3, (len(counts),), generator=source)}


ONES, UNEVEN = texts([1] * 16), texts([0, 2] * 8, seed=1)
PICKED = {"marked": marked, "not-padding": not_padding}


def moved(picked: Callable[[Texts], Tensor]) -> float:
    """By how many C the first record, of which nothing is picked, moves the sum."""
    clipper = Clipper(LIMIT, engine="auto", physical_batch_size=16)
    bound = clipper.bind(Picks(picked), loss)
    bound.clip(ONES, step=0)
    rest = {name: t[1:] for name, t in UNEVEN.items()}
    one, other = (bound.clip(b, step=UNGUARDED).gradients for b in (UNEVEN, rest))
    return sum(float((g - other[n]).double().pow(2).sum()) for n, g in one.items()) ** 0.5 / LIMIT


@pytest.mark.parametrize("name", PICKED)
def test_rows_of_picked_positions_are_no_records(name: str) -> None:
    assert moved(PICKED[name]) <= 1.001


@pytest.mark.parametrize("name", PICKED)
def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixing, "require_rows_of_records", lambda subject, records: None)
    assert moved(PICKED[name]) > 1.5


@pytest.mark.parametrize("name", PICKED)
def test_book_keeping_refuses_them_with_the_remedy(name: str) -> None:
    bound = Clipper(LIMIT, engine="bookkeeping", physical_batch_size=16)
    with pytest.raises(ValueError, match=r"first dimension is not the example.*one-example"):
        bound.clip(Picks(PICKED[name]), loss, ONES)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_mark_that_a_model_cannot_do_without_hides_nothing(at_the_end: bool) -> None:
    """The half without one raises; the half with two is looked at all the same."""

    def strict(batch: Texts) -> Tensor:
        if not bool(marked(batch).any(1).all()):
            raise ValueError("a text has no mark")
        return marked(batch)

    batch = ONES if at_the_end else {**ONES, "ids": ONES["ids"].flip(1)}
    bound = Clipper(LIMIT, engine="bookkeeping", physical_batch_size=16)
    with pytest.raises(ValueError, match="first dimension is not the example"):
        bound.clip(Picks(strict), loss, batch)


def test_models_of_whole_texts_are_taken_together() -> None:
    class Whole(Picks):
        def forward(self, batch: Texts) -> Tensor:
            x = torch.tanh(self.inner(self.words(batch["ids"])))
            found: Tensor = self.head((x * batch["mask"].unsqueeze(-1)).sum(1))
            return found

    bound = Clipper(LIMIT, engine="bookkeeping", physical_batch_size=16).bind(Whole(marked), loss)
    bound.clip(ONES)
    assert next(iter(bound._guard._verdicts.values())).together == 16
