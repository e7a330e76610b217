"""Users are protected in loops of one's own; the doors of other libraries, which know no owners,
refuse before any work starts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightning_modules
import private_trainers
import pytest
import torch

from quietgrad import Users
from quietgrad.integrations.opacus import PrivacyEngine

SAID = r"nothing says whose the records are.*run\.loader.*Trainer, Lightning and Opacus"
pytestmark = lightning_modules.ADVICE


def test_trainer_refuses(tmp_path: Path) -> None:
    privacy = replace(private_trainers.PRIVACY, users=Users())
    with pytest.raises(ValueError, match=SAID):
        private_trainers.trainer(tmp_path, privacy=privacy)
    assert list(tmp_path.iterdir()) == []


def test_lightning_refuses(tmp_path: Path) -> None:
    module = lightning_modules.Small()
    module.privacy = replace(lightning_modules.PRIVACY, users=Users())
    with pytest.raises(ValueError, match=SAID):
        lightning_modules.trainer(tmp_path).fit(module, lightning_modules.records())
    assert not (tmp_path / "ledger.jsonl").exists()


def test_opacus_refuses() -> None:
    model = torch.nn.Linear(3, 2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 3)), 4)
    with pytest.raises((TypeError, ValueError), match="record_owner is not an argument here"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=data,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            record_owner=list(range(8)),
        )
