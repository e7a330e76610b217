"""Runs with a ledger to attack, and what reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from plans import changed

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.noise import BandedNoise
from quietgrad.plan import PrivateRun

RECORDS = 80
SEED = "9c41d07be25f83a6b8e4f10c27d95a36"
CONFIG = PrivacyConfig(noise_multiplier=1.1, expected_batch_size=8, steps=12)
BANDED = replace(CONFIG, noise=BandedNoise(3))
LARGE = replace(CONFIG, expected_batch_size=40)  # no batch is empty


def plan_of(config: PrivacyConfig = CONFIG, **changes: object) -> PrivacyPlan:
    return changed(config, **changes).build(RECORDS)


def release(run: PrivateRun, value: float = 0.0, width: int = 3) -> torch.Tensor:
    """The next release, of a sum that is ``value`` in its first entry."""
    examples = len(next(run.batches()))
    rows = torch.zeros(examples, width)
    if examples:
        rows[0, 0] = value
    return run.release(run.contribution({"w": rows}, examples)).gradients["w"]


def made(
    path: Path, count: int = 5, config: PrivacyConfig = CONFIG, **changes: object
) -> list[torch.Tensor]:
    with plan_of(config, **changes).start(path) as run:
        return [release(run) for _ in range(count)]


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)
