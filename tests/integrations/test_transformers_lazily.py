"""A loss that keeps something of the first records: the Trainer's look at padding runs it on
training records, before the guard does.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_trainers import classifier, records, trainer
from test_transformers_mixing import padded
from torch import Tensor, nn

import quietgrad.integrations.transformers.collating as looks


class Centred:
    """Takes off the mean of the first batch's logits, for ever."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs = {name: t for name, t in batch.items() if name != "labels"}
        logits = 30 * model(**inputs).logits
        if self.mean is None:
            self.mean = logits.detach().mean(0)
        return F.cross_entropy(logits - self.mean, batch["labels"], reduction="none")


def test_what_a_loss_keeps_of_training_records_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Centred()
    trained = trainer(
        tmp_path / "a", model=classifier(), data_collator=padded, per_example_loss=loss
    )
    with pytest.raises(ValueError, match=r"per_example_loss\.mean keeps something between calls"):
        trained.train()
    assert loss.mean is None
    # With the state that the look at padding leaves, the guard sees a constant.
    monkeypatch.setattr(looks, "as_before", lambda *_: contextlib.nullcontext())
    loss = Centred()
    trainer(tmp_path / "b", model=classifier(), data_collator=padded, per_example_loss=loss).train()
    assert loss.mean is not None


def test_evaluation_records_fill_it(tmp_path: Path) -> None:
    loss, public = Centred(), records(20, seed=1)
    trainer(
        tmp_path,
        model=classifier(),
        data_collator=padded,
        per_example_loss=loss,
        eval_dataset=public,
    ).train()
    assert isinstance(loss.mean, torch.Tensor)
