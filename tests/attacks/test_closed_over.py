"""A loss that reads the batch by itself, through what its function reaches: the guard gives it few
records, and it looks at all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, Loss, good, records, rows, small
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import guard

Batch = dict[str, Tensor]


def variable_of_the_loop(batch: Batch) -> Loss:
    return lambda model, own: good(model, {**own, "x": own["x"] - batch["x"].mean(0)})


def slice_of_the_data_set(batch: Batch) -> Loss:
    everything = batch["x"]
    return lambda model, own: good(model, {**own, "x": own["x"] - everything[:12].mean(0)})


class Trainer:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def loss(self, model: nn.Module, own: Batch) -> Tensor:
        return good(model, {**own, "x": own["x"] - self.batch["x"].mean(0)})


def attribute_of_the_trainer(batch: Batch) -> Loss:
    return Trainer(batch).loss


def labels_alone(batch: Batch) -> Loss:
    """Whole numbers: how often each record's label comes among those beside it."""
    labels = batch["y"]

    def loss(model: nn.Module, own: Batch) -> Tensor:
        near = (labels[:3] == labels[3:6]).float().sum() + labels[0]
        return good(model, {**own, "x": own["x"] * (1 + near)})

    return loss


READING = [variable_of_the_loop, slice_of_the_data_set, attribute_of_the_trainer]


def moved(reads: Callable[[Batch], Loss]) -> float:
    """By how many C the sum moves without the first record, which is far from the others."""
    clip, sums = 0.2, []
    for left_out in (None, 0):
        batch = records()
        batch["x"][0] = 40.0
        kept = rows(batch, *(i for i in range(RECORDS) if i != left_out))
        bound = Clipper(clip, physical_batch_size=RECORDS).bind(small(), reads(kept))
        sums.append(bound.clip(kept).gradients)
    whole, rest = sums
    return sum(float((g - rest[k]).double().pow(2).sum()) for k, g in whole.items()) ** 0.5 / clip


@pytest.mark.parametrize("reads", [*READING, labels_alone])
def test_a_loss_that_reads_the_batch_by_itself_is_refused(reads: Callable[[Batch], Loss]) -> None:
    for engine in ("auto", "one-example"):
        batch = records()
        before = {name: t.clone() for name, t in batch.items()}
        with pytest.raises(ValueError, match="it reads the batch itself, through"):
            Clipper(1.0, engine=engine).bind(small(), reads(batch)).clip(batch)
        assert all(torch.equal(t, before[name]) for name, t in batch.items())


@pytest.mark.parametrize("reads", READING)
def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    reads: Callable[[Batch], Loss], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "require_no_other_records", lambda *_: None)
    assert moved(reads) > 1.5


def test_a_batch_that_is_reached_later_is_seen_at_the_next_guarded_release() -> None:
    batch: Batch = {"x": torch.zeros(RECORDS, 6)}

    def loss(model: nn.Module, own: Batch) -> Tensor:
        return good(model, {**own, "x": own["x"] - batch["x"].mean(0)})

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), loss)
    for step in range(4):
        bound.clip(records(), step=step)
    batch = records()
    bound.clip(batch, step=4)
    with pytest.raises(ValueError, match="it reads the batch itself, through batch"):
        bound.clip(batch, step=7)


def test_a_batch_that_is_reached_and_not_read_is_allowed() -> None:
    class Quiet(Trainer):
        def loss(self, model: nn.Module, own: Batch) -> Tensor:
            return good(model, own)

    batch = records()
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), Quiet(batch).loss)
    for step in range(3):
        bound.clip(batch, step=step)
