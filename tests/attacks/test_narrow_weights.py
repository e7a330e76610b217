"""Weights in half precision, as checkpoints come: epsilon does not cover how crowds round."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.checks import RoundingWarning


def loss(model: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).float(), torch.zeros(len(batch)).long(), reduction="none")


def autocast_inside(model: Any, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


def released(model: nn.Module, public: bool = False, of: Any = loss) -> None:
    """Five releases of 20 records."""
    dtype = next(model.parameters()).dtype
    records = torch.randn(20, 4).to(dtype)
    config = PrivacyConfig(
        noise_multiplier=1.0, expected_batch_size=10, steps=5, data_are_public=public
    )
    plan = config.build(dataset_size=20)
    with plan.start() as run:
        for indices in run.batches():
            run.backward(model, of, records[indices])


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.bfloat16, r"weights of torch\.bfloat16 rounds coarsely"),
        (torch.float16, r"weights of torch\.float16 \(what AdamW makes NaN\) rounds coarsely"),
    ],
)
def test_they_are_said_to_be_coarse_once(dtype: torch.dtype, said: str) -> None:
    """Before: in a loop, and for a checkpoint that a Trainer was given, nothing was said."""
    with pytest.warns(RoundingWarning, match=said + ".*dtype=torch.float32") as found:
        released(nn.Linear(4, 2).to(dtype))
    assert len(found) == 1


def test_frozen_ones_below_an_adapter_round_as_much() -> None:
    class Adapted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x).float())

    model = Adapted(nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(4, 2))
    with pytest.warns(RoundingWarning, match=r"torch\.bfloat16 rounds coarsely"):
        released(model)


def around(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        released(model)


@pytest.mark.parametrize(
    "step", [lambda model: released(model, of=autocast_inside), around], ids=["inside", "around"]
)
def test_a_loops_own_autocast_is_said_to_be_coarse_once(step: Any) -> None:
    with pytest.warns(RoundingWarning, match=r"torch\.autocast.* rounds coarsely") as found:
        step(nn.Linear(4, 2))
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(3))
def test_when_autocast_is_told_says_of_no_batch_that_it_was_empty(seed: int) -> None:
    """Before: at the first batch with records."""
    drawn = hashlib.sha256(bytes([seed])).hexdigest()
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=2, steps=22, seed=drawn)
    told, empty = [], []
    model, records = nn.Linear(4, 2), torch.randn(20, 4)
    with config.build(dataset_size=20).start() as run:
        for indices in run.batches():
            empty.append(not len(indices))
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                run.backward(model, autocast_inside, records[indices])
            told.append(any(one.category is RoundingWarning for one in found))
    assert any(empty) and told.index(True) == 19 and sum(told) == 1


def test_of_float32_and_of_public_records_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundingWarning)
        released(nn.Linear(4, 2))
        released(nn.Linear(4, 2).to(torch.bfloat16), public=True)
        released(nn.Linear(4, 2), public=True, of=autocast_inside)
