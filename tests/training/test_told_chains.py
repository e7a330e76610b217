"""Runs between whose names tell nobody apart: what they began with is told all the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.ledger import LedgerWriter, read_ledger
from quietgrad.ledger.earlier import PUBLIC_NAME, RUN, tells_of
from quietgrad.ledger.records import EarlierRun

ADDS = "trained by another private run"
FIXED: dict[str, Any] = {"seed": 1, "data_are_public": True}


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def looped(model: nn.Module, ledger: Path, **changes: Any) -> None:
    x = torch.randn(60, 6)
    y = (x[:, 0] > 0).long()
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=2, **changes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with config.build(len(x)).start(ledger) as run:
        for indices in run.batches():
            run.backward(model, loss, (x[indices], y[indices]))
            optimizer.step()


@pytest.mark.parametrize("between", [1, 2, 3])
def test_a_private_run_before_public_ones_of_one_name_is_told(between: int, tmp_path: Path) -> None:
    # Before: the second public run took the first one for itself, and the private one was lost.
    model = nn.Linear(6, 2)
    looped(model, tmp_path / "private")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(between):
            looped(model, tmp_path / f"public {number}", **FIXED)
    with pytest.warns(UserWarning, match=ADDS):
        looped(model, tmp_path / "last")
    first = read_ledger(tmp_path / "private").sessions[0].name
    assert first in [record[RUN] for record in read_ledger(tmp_path / "last").started_from]


def test_a_file_of_a_public_run_tells_of_no_other_of_its_name() -> None:
    record = {RUN: PUBLIC_NAME, "steps": 9, "private": True, "data_declared_public": True}
    assert not tells_of(record, PUBLIC_NAME, 2)
    assert tells_of(record | {RUN: "a"}, "a", 2)
    assert not tells_of(record | {RUN: "a"}, "a", 10)  # it went on since
    assert tells_of(record | {"started_from": [record | {RUN: "a"}]}, "a", 9)


def test_a_line_of_an_earlier_run_is_of_the_releases_before_it(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    looped(nn.Linear(6, 2), ledger)
    with LedgerWriter(ledger) as writer:
        writer._append(EarlierRun(1, {RUN: "a"}))
    with pytest.raises(ValueError, match="it is of step 1, and 2 releases come before it"):
        read_ledger(ledger)
