"""What is made of the first records and kept for ever: refused before a private record is clipped,
and put back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attacks.guarded import RECORDS, records, rows, switched_off
from attacks.lazies import HIDDEN, PLACES, Pair
from quietgrad.clipping import Clipper


def contribution(build: Callable[[], Pair], out: int = 0, clip: float = 0.2) -> float:
    """By how many C the sum moves, where each run begins anew with or without a record."""
    sums: list[dict[str, Tensor]] = []
    for left_out in (None, out):
        model, loss = build()
        batch = records()
        batch["x"][out] = 40.0
        kept = [i for i in range(RECORDS) if i != left_out]
        bound = Clipper(clip, engine="bookkeeping", physical_batch_size=RECORDS).bind(model, loss)
        sums.append(bound.clip(rows(batch, *kept)).gradients)
    whole, rest = sums
    moved = sum(float((g - rest[name]).double().pow(2).sum()) for name, g in whole.items())
    return moved**0.5 / clip


@pytest.mark.parametrize("where", PLACES)
def test_what_is_made_of_the_first_records_and_kept_is_refused(where: str) -> None:
    for engine in ("auto", "bookkeeping", "one-example"):
        model, loss = PLACES[where]()
        with pytest.raises(ValueError, match="which example the model and the loss met first"):
            Clipper(1.0, engine=engine).bind(model, loss).clip(records())


@pytest.mark.parametrize("where", PLACES)
def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    assert contribution(PLACES[where]) > 1.5


@pytest.mark.parametrize("where", HIDDEN)
def test_what_is_out_of_reach_is_filled_by_a_made_up_record(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contribution(HIDDEN[where]) < 1.0 + 1e-5
    switched_off(monkeypatch)
    assert contribution(HIDDEN[where]) > 1.5
