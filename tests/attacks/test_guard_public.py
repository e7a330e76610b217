"""A few public records for the guard, and mixing that begins with more records than these: where
they are fewer than a micro-batch they come again, as often as it takes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import With, good, plan_of, records, rows, small
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness.guard import Guard

PUBLIC, TOGETHER, MOST = 8, 48, 12
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def in_chunks(model: With, h: Tensor) -> Tensor:
    """Statistics of sixteen records at a time (ghost batch normalization)."""
    if len(h) < 16:
        return h
    return torch.cat([c - c.detach().mean(0) if len(c) == 16 else c for c in h.split(16)])


def by_their_number(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, batch) * (1.0 if len(batch["y"]) < TOGETHER else 0.02)


def some_of_a_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    same = batch["y"][:, None] == batch["y"]
    return good(model, batch) * (same.tril().sum(1) <= MOST)


PAIRS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "chunks": lambda: (With(in_chunks), good),
    "number": lambda: (small(), by_their_number),
    "class": lambda: (small(), some_of_a_class),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_what_begins_with_more_records_is_refused_at_the_first_release(pair: str) -> None:
    model, loss = PAIRS[pair]()
    bound = Clipper(1.0, physical_batch_size=TOGETHER).bind(model, loss)
    bound.check(records(PUBLIC, seed=1))
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(TOGETHER), step=0)


@pytest.mark.parametrize("pair", PAIRS)
def test_it_is_refused_where_more_come_between_the_guards_releases(pair: str) -> None:
    model, loss = PAIRS[pair]()
    bound = Clipper(1.0, physical_batch_size=TOGETHER).bind(model, loss)
    bound.check(records(PUBLIC, seed=1))
    bound.clip(records(PUBLIC), step=0)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(TOGETHER), step=2)


def test_a_good_model_is_taken_and_public_records_are_all_that_is_looked_at() -> None:
    with plan_of(steps=3).start() as run:
        run.check(small(), good, records(2, seed=1))
        model = small()
        run.check(model, good, records(2, seed=1))
        for indices in run.batches(3):
            run.backward(model, good, rows(records(), *indices))
        assert run.released == 3


def test_without_it_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Guard, "_wants", lambda self, known, size: not known.together)
    bound = Clipper(0.3, physical_batch_size=TOGETHER).bind(small(), by_their_number)
    bound.check(records(PUBLIC, seed=1))
    batch = records(TOGETHER) | {"y": torch.zeros(TOGETHER, dtype=torch.long)}
    sums = [bound.clip(rows(batch, *range(n)), step=0).gradients for n in (TOGETHER, TOGETHER - 1)]
    moved = sum(float((sums[1][name] - g).double().pow(2).sum()) for name, g in sums[0].items())
    assert moved**0.5 > 2 * 0.3
