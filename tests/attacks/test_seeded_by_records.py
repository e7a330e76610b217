"""Random numbers that are seeded from records: passes that hold randomness still see nothing of it,
and all others' masks change with one record.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records, rows, small, switched_off
from quietgrad.clipping import Clipper
from quietgrad.generators import keyed_generators


def number_of(batch: dict[str, Tensor]) -> int:
    return int(batch["x"].double().sum() * 1e4) % 2**31


def torchs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(number_of(batch))
    return good(model, batch)


def torchs_afterwards(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Which the next micro-batch draws from."""
    losses = good(model, batch)
    torch.manual_seed(number_of(batch))
    return losses


def own_generator(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    draw = torch.Generator().manual_seed(number_of(batch))
    noise = torch.empty_like(batch["x"]).normal_(generator=draw)
    return good(model, {**batch, "x": batch["x"] + 5 * noise})


def pythons(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    random.seed(number_of(batch))
    return good(model, {**batch, "x": batch["x"] * random.gauss(0, 3)})


def numpys(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    np.random.seed(number_of(batch))
    return good(model, {**batch, "x": batch["x"] * float(np.random.randn())})


LOSSES = [torchs, torchs_afterwards, own_generator, pythons, numpys]


def moved(loss: Callable[..., Tensor], micro_batch: int) -> float:
    """By how many C the sum moves when the first record is another one, all else and all seeds the
    same; its own contribution moves by 2 C at most.
    """
    clip, sums = 0.05, []
    for shift in (0.0, 1.0):
        batch = records()
        batch["x"][0] += shift
        torch.manual_seed(3)
        model = small(dropout=0.5).train()
        bound = Clipper(clip, engine="bookkeeping", physical_batch_size=micro_batch)
        with keyed_generators(4):
            sums.append(bound.bind(model, loss).clip(batch).gradients)
    whole, rest = sums
    return sum(float((g - rest[k]).double().pow(2).sum()) for k, g in whole.items()) ** 0.5 / clip


@pytest.mark.parametrize("loss", LOSSES)
def test_numbers_that_are_seeded_from_records_are_refused(loss: Callable[..., Tensor]) -> None:
    for batch in (records(), rows(records(), 0)):
        with pytest.raises(ValueError, match="random numbers are seeded from the records"):
            Clipper(1.0).bind(small(dropout=0.5).train(), loss).clip(batch)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_the_look_one_record_changes_the_numbers_of_all(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    micro_batch = RECORDS // 2
    assert moved(good, micro_batch) < 2.0 + 1e-5 < 2.5 < moved(loss, micro_batch)


def test_a_seed_that_is_the_same_for_all_records_is_allowed() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        return good(model, batch)

    Clipper(1.0, physical_batch_size=RECORDS).bind(small(dropout=0.5).train(), loss).clip(records())
