"""A checkpoint of Lightning that a full disk or a kill has cut off."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning_modules import ADVICE, Small, StopAt, records, saving, trainer

from quietgrad import PrivacyConfig
from quietgrad.integrations.lightning import strategies
from quietgrad.integrations.lightning.checkpoints import reads_archives
from quietgrad.ledger import read_ledger

OWN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=4)
pytestmark = [*ADVICE, pytest.mark.usefixtures("examined_once")]


def stopped(folder: Path) -> Path:
    """A fit that ended after three of four releases; its last checkpoint, cut off."""
    options = saving(folder)
    options["callbacks"].append(StopAt(3))
    trainer(folder, **options).fit(Small(privacy=OWN), records())
    last = folder / "kept" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:3000])
    return last


def test_a_checkpoint_that_was_cut_off_names_the_one_to_go_on_from(tmp_path: Path) -> None:
    # Before: torch's own error of a zip archive, which says nothing of what to do.
    last = stopped(tmp_path)
    shutil.copy(last, last.with_name("newer.ckpt"))  # not whole either
    (whole,) = last.parent.glob("epoch*.ckpt")
    with pytest.raises(ValueError, match="is no whole checkpoint") as refused:
        trainer(tmp_path).fit(Small(privacy=OWN), records(), ckpt_path=str(last))
    said = str(refused.value)
    assert f"ckpt_path={str(whole)!r}" in said and "\n" not in said
    assert len(read_ledger(tmp_path).sessions) == 1  # no start was written down
    trainer(tmp_path, **saving(tmp_path)).fit(Small(privacy=OWN), records(), ckpt_path=str(whole))
    assert read_ledger(tmp_path).releases == 4


@pytest.mark.parametrize("left", [0, 1, 3000])
def test_where_no_other_is_whole_it_says_so(left: int, tmp_path: Path) -> None:
    last = stopped(tmp_path)
    for other in last.parent.glob("epoch*.ckpt"):
        other.unlink()
    os.truncate(last, left)
    with pytest.raises(ValueError, match="begin anew in another default_root_dir"):
        trainer(tmp_path).fit(Small(privacy=OWN), records(), ckpt_path=str(last))


class Turned(TorchCheckpointIO):
    """Files of the user's own kind: every byte turned round."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self._turn(path)

    def load_checkpoint(self, path: Any, *given: Any, **options: Any) -> Any:
        self._turn(path)
        try:
            return super().load_checkpoint(path, *given, **options)
        finally:
            self._turn(path)

    @staticmethod
    def _turn(path: Any) -> None:
        Path(path).write_bytes(bytes(255 - byte for byte in Path(path).read_bytes()))


def test_files_of_a_plugin_are_the_plugins_to_judge(tmp_path: Path) -> None:
    # Before: refused as cut off, whatever they were.
    assert reads_archives(AsyncCheckpointIO(TorchCheckpointIO()))
    assert not reads_archives(AsyncCheckpointIO(Turned()))
    options = saving(tmp_path)
    options["callbacks"].append(StopAt(3))
    trainer(tmp_path, plugins=[Turned()], **options).fit(Small(privacy=OWN), records())
    last = tmp_path / "kept" / "last.ckpt"
    again = trainer(tmp_path, plugins=[Turned()], **saving(tmp_path))
    again.fit(Small(privacy=OWN), records(), ckpt_path=str(last))
    assert read_ledger(tmp_path).releases == 4


def test_without_the_look_torch_says_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = stopped(tmp_path)
    monkeypatch.setattr(strategies, "refuse_cut_off", lambda _: None)
    with pytest.raises(Exception, match="zip archive"):
        trainer(tmp_path).fit(Small(privacy=OWN), records(), ckpt_path=str(last))
