"""Losses that count the records of a class in the batch, and weigh or drop them beyond a number:
ordinary batches may stay below it, and then one record more changes what all others of its class
contribute.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import good, records, small
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import guard, mixing

MOST, TOGETHER = 22, 64
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Classes that are too frequent weigh less."""
    many = torch.bincount(batch["y"], minlength=3) > MOST
    return good(model, batch) * torch.where(many, 0.05, 1.0)[batch["y"]]


def first_ones(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """So many of a class, and no more."""
    same = batch["y"][:, None] == batch["y"]
    return good(model, batch) * (same.tril().sum(1) <= MOST)


LOSSES = {"weighted": weighted, "dropped": first_ones}


def of_classes(*counts: int) -> dict[str, Tensor]:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return {"x": records(len(labels))["x"], "y": labels}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_counts_a_class_is_refused_on_batches_below_its_limit(loss: str) -> None:
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, physical_batch_size=TOGETHER).clip(
            small(), LOSSES[loss], of_classes(22, 21, 21)
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_looked_at_again_where_more_records_come_together(loss: str) -> None:
    """Of sixteen records none can be too many."""
    bound = Clipper(1.0, physical_batch_size=TOGETHER).bind(small(), LOSSES[loss])
    bound.clip(of_classes(6, 5, 5), step=0)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(of_classes(22, 21, 21), step=2)


def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixing, "require_room_for_all", lambda *_, **__: None)
    clip, batch, more = 1.0, of_classes(22, 21, 20), of_classes(23, 21, 20)
    more["x"] = torch.cat([batch["x"][:1], batch["x"]])
    bound = Clipper(clip, physical_batch_size=TOGETHER).bind(small(), weighted)
    bound.clip(of_classes(22, 21, 21), step=0)
    assert not guard.is_guarded(2)
    sums = [bound.clip(one, step=2).gradients for one in (batch, more)]
    moved = sum(float((sums[1][name] - g).double().pow(2).sum()) for name, g in sums[0].items())
    assert moved**0.5 > 5 * clip
