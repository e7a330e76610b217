"""Rows of a loop's own beside records, and what it carries from one batch to the next. Numbers in
comments are as in ``test_opacus``: the largest distance of two clipped sums before the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attacks.test_opacus import distance, made, step


def linear_weights(model: Any, x: Tensor, y: Tensor) -> None:
    weight = torch.linspace(0, 1, len(x))
    (weight * F.cross_entropy(model(x), y, reduction="none")).mean().backward()


def numbered_inputs(model: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x + torch.arange(len(x)).unsqueeze(1)), y).backward()


def halves(model: Any, x: Tensor, y: Tensor) -> None:
    labels = torch.zeros(len(x))
    labels[len(x) // 2 :] = 1
    F.binary_cross_entropy_with_logits(model(x)[:, 0], labels).backward()


def one_hot_places(model: Any, x: Tensor, y: Tensor) -> None:
    places = F.one_hot(torch.arange(len(x)) % 3, 3).float()
    F.mse_loss(model(x), places).backward()


PLACES = [linear_weights, numbered_inputs, halves, one_hot_places]


@pytest.mark.parametrize("body", PLACES, ids=lambda body: body.__name__)
def test_rows_by_place_in_the_batch_are_refused(body: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="places in the batch"):
        distance(body)


def test_rows_that_are_drawn_or_the_same_are_not() -> None:
    engine, model, optimizer, loader = made()
    for x, y in loader:
        noisy = x + torch.randn(x.shape)
        loss = F.cross_entropy(model(noisy), y)
        labels = torch.randint(0, 3, (len(x),))
        loss = loss + F.cross_entropy(model(x * torch.ones(len(x), 1)), labels)
        loss.backward()
        optimizer.step()
    assert len(engine.accountant.history) == 1


def test_equal_rows_that_follow_the_number_of_records_are_refused() -> None:
    _, model, optimizer, loader = made(batch_size=4)
    with pytest.raises(ValueError, match="number of records"):
        for _ in range(30):
            for x, y in loader:
                if len(x):
                    weight = torch.full((len(x),), 1 / (len(x)))
                    (F.cross_entropy(model(x), y, reduction="none") * weight).mean().backward()
                    optimizer.step()


def test_a_loss_that_was_read_scales_no_later_batch() -> None:
    _, model, optimizer, loader = made(batch_size=4)
    before = 1.0
    with pytest.raises(ValueError, match="an earlier batch's"):
        for _ in range(5):
            for x, y in loader:
                if len(x):
                    loss = F.cross_entropy(model(x), y)
                    (loss / before).backward()
                    optimizer.step()
                    before = loss.item()


def test_functions_of_torch_that_pass_the_engine_by_name_the_remedy() -> None:
    engine, model, optimizer, loader = made()
    for x, y in loader:
        with pytest.raises(RuntimeError, match=r"call loss\.backward"):
            torch.autograd.backward(F.cross_entropy(model(x), y))
        step(model, optimizer, x, y)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        with pytest.raises(RuntimeError, match="GradScaler is not for private training"):
            scaler.step(optimizer)
        break
    assert engine.accountant.history == [(1.0, 1.0, 1)]
