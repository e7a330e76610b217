"""Secret files that cannot be written: a start says so, and costs nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.keyring import places_path
from quietgrad.ledger import read_ledger
from quietgrad.noise import BandedNoise

CONFIG = PrivacyConfig(
    noise_multiplier=1.0, expected_batch_size=8, steps=4, noise=BandedNoise(bands=2)
)
RECORDS = [(torch.ones(2) * i, i % 2) for i in range(32)]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def released(ledger: Path, keys: Path) -> int:
    with CONFIG.build(len(RECORDS)).start(ledger, keys) as run:
        model = nn.Linear(2, 2)
        for batch in run.loader(RECORDS, steps=2):
            run.backward(model, loss, batch)
        return run.released


def test_the_folder_of_the_keys_is_made(tmp_path: Path) -> None:
    # Before: FileNotFoundError, after the ledger was begun.
    keys = tmp_path / "secret" / "of this run" / "keys.json"
    assert released(tmp_path / "ledger.jsonl", keys) == 2
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600


def test_keys_that_cannot_be_written_are_named_and_nothing_is_counted(tmp_path: Path) -> None:
    # Before: NotADirectoryError, with the name of a temporary file and no remedy.
    ledger, file = tmp_path / "ledger.jsonl", tmp_path / "file"
    file.write_text("of somebody else")
    with pytest.raises(ValueError, match=r"keys=.*cannot be written.*nothing was released"):
        released(ledger, file / "keys.json")
    assert read_ledger(ledger).releases == 0
    assert released(ledger, tmp_path / "keys.json") == 2


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    ledger, keys = tmp_path / "ledger.jsonl", tmp_path / "keys.json"
    in_the_way = places_path(keys)
    (in_the_way / "of somebody else").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"keys\.json\.places.*cannot be written.*start again"):
        released(ledger, keys)
    (in_the_way / "of somebody else").rmdir()
    in_the_way.rmdir()
    assert released(ledger, keys) == 2
