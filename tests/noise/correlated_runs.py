"""Noise of correlated mechanisms as rows [T, n], and the verdict whether they have the covariance
of their matrix.

Whitening: noise rows W [T, n] of one parameter with covariance (C^T C)^-1 have C W / (sigma C_clip)
independent standard normal. n squares a row are chi-square with n degrees of freedom, and sqrt(n)
times the cosine of two rows is nearly standard normal. ``rejected`` compares all T rows and all
pairs of rows at FALSE_ALARM in total, so a right implementation fails one of the statistical tests
that use it with probability under 1e-7 altogether; seeds are fixed, so in fact it fails always or
never.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from plans import changed
from scipy import stats
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import ClippedSum
from quietgrad.events import SensitivityClaim
from quietgrad.noise import BandedNoise, GaussianNoise, NoisySum, PrefixSums, mixing_matrix
from quietgrad.noise.correlation.banded import BandedLower, Floats
from quietgrad.noise.correlation.solver import unit_columns
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.randomness import RandomKey

FALSE_ALARM = 1e-8
SIGMA, CLIP = 1.7, 0.3
STEPS, BANDS = 64, 8
ENTRIES = 20_000
KEY = RandomKey.from_seed(11)
MEMORIES = ("rows", "regenerate")
Rows = Floats  # [steps, entries]


@cache
def mixing(steps: int = STEPS, bands: int = BANDS) -> BandedLower:
    """The best one for prefix sums: no two columns alike, so rows cannot be taken for columns."""
    return mixing_matrix(PrefixSums(steps), bands).banded


def random_mixing(steps: int, bands: int, seed: int) -> BandedLower:
    columns = np.random.default_rng(seed).uniform(-1, 1, (steps, bands)) / bands
    columns[:, 0] = np.abs(columns[:, 0]) + 0.5
    return BandedLower(unit_columns(columns))


def zero_sum(entries: int = 3) -> ClippedSum:
    return ClippedSum({"w": torch.zeros(entries)}, SensitivityClaim(CLIP))


def releases(
    noise: GaussianNoise,
    clipped: ClippedSum,
    steps: Iterable[int],
    key: RandomKey = KEY,
    since: int = 0,
) -> list[NoisySum]:
    """The releases of a block, from its first step on."""
    history, made = noise.init(since), []
    for _ in steps:
        noisy, history = noise.update(clipped, lambda _: key, history)
        made.append(noisy)
    return made


def of_run(
    run: PrivateRun, count: int, entries: int = 3, dtype: torch.dtype = torch.float32
) -> list[NoisySum]:
    """The next releases of a run, of nothing: the noise."""
    batches, made = run.batches(), []
    for _ in range(count):
        examples = len(next(batches))
        made.append(
            run.release(
                run.contribution({"w": torch.zeros(examples, entries, dtype=dtype)}, examples)
            )
        )
    return made


def rows_of(made: Iterable[NoisySum], name: str = "w") -> Rows:
    return np.stack([m.gradients[name].double().flatten().numpy() for m in made])


# The covariance


def rejected(rows: Rows, matrix: Floats, std: float = SIGMA * CLIP) -> bool:
    """Whether the rows do not have the covariance std^2 (C^T C)^-1."""
    white = matrix @ rows / std
    steps, entries = white.shape
    gram = white @ white.T
    squares = np.diagonal(gram)
    cosines = (gram / np.sqrt(np.outer(squares, squares)))[np.tril_indices(steps, -1)] * np.sqrt(
        entries
    )
    tail = FALSE_ALARM / (2 * (steps + cosines.size))
    outside = (squares < stats.chi2.ppf(tail, entries)) | (squares > stats.chi2.isf(tail, entries))
    return bool(outside.any() or (np.abs(cosines) > stats.norm.isf(tail)).any())


RECORDS, PLAN_STEPS, PLAN_BANDS = 120, 12, 4
CONFIG = PrivacyConfig(
    noise_multiplier=SIGMA,
    max_grad_norm=CLIP,
    expected_batch_size=12,
    steps=PLAN_STEPS,
    noise=BandedNoise(PLAN_BANDS),
    seed=5,
    data_are_public=True,
)


def plan_of(**changes: object) -> PrivacyPlan:
    return changed(CONFIG, **changes).build(RECORDS)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(count: int = RECORDS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 6, generator=generator), torch.randint(
        0, 3, (count,), generator=generator
    )


def run_whole(run: PrivateRun) -> list[NoisySum]:
    model, (x, y) = build(), data()
    return [run.step(model, loss, (x[indices], y[indices])) for indices in run.batches()]


def run_in_parts(run: PrivateRun, parts: int) -> list[NoisySum]:
    model, (x, y) = build(), data()
    made = []
    for indices in run.batches():
        clipped = [
            run.clip(model, loss, (x[part], y[part])) for part in np.array_split(indices, parts)
        ]
        total = clipped[0]
        for part in clipped[1:]:
            total = total + part
        made.append(run.release(total))
    return made
