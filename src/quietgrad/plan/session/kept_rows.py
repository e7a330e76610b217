"""The last rows of correlated noise in a secret file: a resume draws again only the steps after
them, instead of the whole block.

A file is used only where it is of this ledger's draws: the same matrix, way of drawing and block,
and the same sessions up to its step, known by their seals. Otherwise, and where it is damaged, the
block is drawn again from its roots: slower, and the same numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quietgrad.durable import is_intact_archive, replacing
from quietgrad.keyring import Session
from quietgrad.noise.mechanism import GaussianNoise, NoiseHistory
from quietgrad.plan.session.starts import drew


def save_rows(
    path: Path, noise: GaussianNoise, history: NoiseHistory, how: str, sessions: tuple[Session, ...]
) -> None:
    """Replaces the file, readable by its owner alone.

    Args:
        path: the secret file of rows.
        noise, history: whose rows.
        how: how they were drawn.
        sessions: of the run; those that drew the block are named in the file.
    """
    record = _facts(noise, how, sessions, history.since, history.step)
    record["rows"] = [
        {name: row.detach().cpu() for name, row in rows.items()} for rows in history.rows
    ]
    with replacing(path, secret=True) as file:
        torch.save(record, file)


def load_rows(
    path: Path,
    noise: GaussianNoise,
    like: Mapping[str, Tensor],
    how: str,
    sessions: tuple[Session, ...],
    since: int,
    step: int,
) -> NoiseHistory | None:
    """The kept history of this block, at ``step`` or before it; None where there is none that fits.

    Args:
        path: the secret file of rows.
        noise: what goes on.
        like: tensors in the shape, dtype and device of the gradients.
        how: how this session draws.
        sessions: of the run, by the ledger.
        since, step: first step of the block, step that comes next.
    """
    if not is_intact_archive(path):
        return None
    try:
        record = torch.load(path, weights_only=True, map_location="cpu")
        at, rows = record["step"], record["rows"]
        fits = (
            noise.memory == "rows"
            and since < at <= step
            and len(rows) == min(noise.bands - 1, at - since)
            and {k: v for k, v in record.items() if k != "rows"}
            == _facts(noise, how, sessions, since, at)
            and all(_shapes(row) == _shapes(like, noise) for row in rows)
        )
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        EOFError,
        AttributeError,
        pickle.UnpicklingError,
    ):
        return None
    if not fits:
        return None
    moved = tuple(
        {name: row[name].to(tensor.device) for name, tensor in like.items()} for row in rows
    )
    return NoiseHistory(at, since, moved)


def _facts(
    noise: GaussianNoise, how: str, sessions: tuple[Session, ...], since: int, step: int
) -> dict[str, Any]:
    drawn = [
        [session.step, session.name, session.root.seal()] for session in drew(sessions, since, step)
    ]
    return {"step": step, "since": since, "mixing": noise.digest, "drawn": how, "sessions": drawn}


def _shapes(
    tensors: Mapping[str, Tensor], noise: GaussianNoise | None = None
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Of rows; of gradients, the shapes of the rows that ``noise`` would draw for them: on a grid,
    rows are float64.
    """
    exact = noise is not None and noise.source.grid > 0
    return {name: (t.shape, torch.float64 if exact else t.dtype) for name, t in tensors.items()}
