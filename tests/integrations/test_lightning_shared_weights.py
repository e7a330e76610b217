"""A network that a private run trained, in another module: the two epsilons add."""

from __future__ import annotations

from pathlib import Path

import private_trainers
import pytest
from lightning_modules import ADVICE, Small, records, trainer
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateTrainer
from quietgrad.training.files.provenance import KEY

PROTECTING = PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, steps=2)
pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]


def test_a_network_of_an_earlier_module_is_no_silent_start(tmp_path: Path) -> None:
    """Before: each run told its own epsilon, of weights that both trained."""
    first = Small(privacy=PROTECTING)
    trainer(tmp_path / "one").fit(first, records())
    second = Small(privacy=PROTECTING)
    second.net = first.net
    with pytest.raises(ValueError, match="whose epsilon adds to this one's"):
        trainer(tmp_path / "two").fit(second, records())
    assert not (tmp_path / "two" / "ledger.jsonl").exists()
    second.accept_start = "epsilons-add"
    trainer(tmp_path / "two").fit(second, records())
    assert second._steps is not None and second._steps.session is not None
    record = second._steps.session.mark(2)[KEY]
    assert record["started_from"][0]["steps"] == 2


def test_a_network_of_another_trainer_is_none_either(tmp_path: Path) -> None:
    data = [{"x": x, "labels": y} for x, y in records()]

    class Model(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

    def loss(model: nn.Module, batch: dict[str, object]) -> object:
        logits = model.net(batch["x"])  # type: ignore[operator]
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    module = Small(privacy=PROTECTING)
    PrivateTrainer(
        Model(module.net),
        private_trainers.arguments(tmp_path / "one", remove_unused_columns=False),
        train_dataset=data,
        privacy=PROTECTING,
        per_example_loss=loss,
    ).train()
    with pytest.raises(ValueError, match="whose epsilon adds to this one's"):
        trainer(tmp_path / "two").fit(module, records())
