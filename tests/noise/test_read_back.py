"""The mixing matrix, read back from what runs released: whatever happens to a run, a record of any
part moves it by no more than is counted.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.ledger import read_ledger
from quietgrad.noise import BandedNoise, NoisySum
from quietgrad.noise.mechanism import GaussianNoise
from quietgrad.schedules import Linear, Schedules

RECORDS = 12
IDS = [str(i).encode() for i in range(RECORDS)]
MOST_STEPS = 200
pytestmark = pytest.mark.usefixtures("examined_once")


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum(1)


def row_of(noisy: NoisySum, step: int) -> np.ndarray:
    """The noise in units of the independent draws."""
    row = np.zeros(MOST_STEPS)
    if noisy.mixing_row is None:
        row[step] = noisy.noise_std
    else:
        known = np.asarray(noisy.mixing_row)
        row[: len(known)] = noisy.noise_std / np.linalg.norm(known) * known
    return row


def random_run(chance: random.Random, folder: Path) -> tuple[PrivacyPlan, np.ndarray]:
    bands = chance.choice([1, 2, 3, 5])
    steps = max(bands, chance.choice([bands, bands + 1, 7, 12]))
    falls = Schedules(noise=Linear(2.0, 1.0)) if chance.random() < 0.5 else Schedules()
    noise = BandedNoise(bands, memory=chance.choice(["rows", "regenerate"]))
    config = PrivacyConfig(
        noise_multiplier=1.3, sample_rate=0.3, steps=steps, noise=noise, schedules=falls
    )
    plan, rows, extended = config.build(RECORDS, record_ids=IDS), [], 0
    while True:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        keys = folder / "keys" if chance.random() < 0.6 else None
        with plan.start(folder / "ledger.jsonl", keys) as run:
            session = min(chance.choice([1, 2, 3, 100]), plan.steps - run.released)
            for batch in run.loader([torch.ones(3)] * RECORDS, steps=session) if session else ():
                if chance.random() < 0.15:
                    model[0].weight.requires_grad_(not model[0].weight.requires_grad)
                step = run.released
                rows.append(row_of(run.backward(model, loss, batch), step))
            done = run.released == plan.steps
        if extended < 2 and chance.random() < (0.6 if done else 0.2):
            plan = plan.extended(steps=chance.choice([1, bands, bands + 2]))
            extended += 1
        elif done:
            return plan, np.array(rows)[:, : len(rows)]


def largest(plan: PrivacyPlan, rows: np.ndarray) -> float:
    """Of all parts, how much more than counted a record of it moves."""
    columns, found = np.linalg.inv(rows), 0.0
    for part in range(plan.event.bands):
        own = np.arange(part, len(rows), plan.event.bands)
        sigmas = np.array([plan.at(int(t)).noise_multiplier for t in own])
        gram = (columns[:, own] * sigmas).T @ (columns[:, own] * sigmas)
        found = max(found, float(np.linalg.norm(gram, 2)) if len(own) else 0.0)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_part_is_counted_whatever_happens_to_a_run(seed: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts that are used whole, and of blocks that begin
        plan, rows = random_run(random.Random(seed), tmp_path)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == len(rows) == plan.steps
    assert largest(plan, rows) <= 1 + 1e-6


def test_a_block_that_refers_to_steps_before_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: columns twice as long from the third step on."""
    advance = GaussianNoise._advance

    def wrong(self: GaussianNoise, mixing, history):  # type: ignore[no-untyped-def]
        row, later = advance(self, mixing, history)
        return (row * 0.5 if history.step > 2 else row), later

    monkeypatch.setattr(GaussianNoise, "_advance", wrong)
    config = PrivacyConfig(noise_multiplier=1.3, sample_rate=0.3, steps=8, noise=BandedNoise(3))
    model, rows = nn.Linear(3, 2), []
    plan = config.build(RECORDS, record_ids=IDS)
    with plan.start(tmp_path / "ledger.jsonl") as run:
        for batch in run.loader([torch.ones(3)] * RECORDS, steps=8):
            rows.append(row_of(run.backward(model, loss, batch), run.released - 1))
    assert largest(plan, np.array(rows)[:, :8]) > 1.5
