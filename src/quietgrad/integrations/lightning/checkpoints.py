"""Checkpoints that a full disk or a kill has cut off: seen before anything is loaded from them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from quietgrad.durable import is_intact_archive
from quietgrad.integrations.lightning.session import MARK

_LEGACY = b"\x80"  # what torch.save wrote before its archives begins with a pickle's first byte


def reads_archives(plugin: Any) -> bool:
    """Whether a Trainer's checkpoints are what ``torch.save`` writes: those of a plugin of the
    user's own may be anything, such as encrypted.
    """
    inner = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
    return getattr(type(inner), "load_checkpoint", None) is TorchCheckpointIO.load_checkpoint


def refuse_cut_off(ckpt_path: Any) -> None:
    """Refuses to go on from a file that is not whole, and names the newest beside it that is.

    Args:
        ckpt_path: as the Trainer has it; what is no file of this machine is left to Lightning.

    Raises:
        ValueError: naming the file and what to give instead.
    """
    path = Path(ckpt_path)
    if not path.is_file():
        return
    with open(path, "rb") as opened:
        legacy = opened.read(1) == _LEGACY
    if legacy or is_intact_archive(path):
        return
    beside = [one for one in path.parent.glob("*.ckpt") if one.is_file() and one != path]
    newest_first = sorted(beside, key=lambda one: -one.stat().st_mtime)
    whole = next((one for one in newest_first if _is_whole(one)), None)
    remedy = (
        f"go on from the newest beside it that is whole: ckpt_path={str(whole)!r}"
        if whole is not None
        else "give one that is whole, or, where there is none, begin anew in another "
        "default_root_dir (the epsilons of two runs on the same records add)"
    )
    raise ValueError(
        f"ckpt_path={str(ckpt_path)!r} is no whole checkpoint: it was cut off or changed (a full "
        f"disk, a kill while it was written); {remedy}. The ledger counts every release, those "
        "after that checkpoint too"
    )


def _is_whole(file: Path) -> bool:
    """Whether it is a checkpoint of a private run, as far as that is seen without loading it."""
    if not is_intact_archive(file):
        return False
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return any(MARK.encode() in archive.read(name) for name in names)
