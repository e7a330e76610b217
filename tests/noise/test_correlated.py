"""Noise correlated across steps: its covariance, what every release says of it, and that neither
cutting, sharding, stopping nor processes change it.

Whitening: noise rows W [T, n] of one parameter with covariance (C^T C)^-1 have C W / (sigma C_clip)
independent standard normal. n squares a row are chi-square with n degrees of freedom, and sqrt(n)
times the cosine of two rows is nearly standard normal. ``rejected`` compares all T rows and all
pairs of rows at FALSE_ALARM in total, so a right implementation fails one of the statistical tests
below with probability under 1e-7 altogether; seeds are fixed, so in fact it fails always or never.
The same verdict has to reject every wrong mechanism of a list.
"""

from __future__ import annotations

import json
import shutil
import stat
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plans import changed
from scipy import stats
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import ClippedSum
from quietgrad.events import SensitivityClaim
from quietgrad.keyring import KeyRing, Secrets, read_secrets, write_secrets
from quietgrad.ledger import read_ledger
from quietgrad.noise import (
    BandedNoise,
    GaussianNoise,
    MixingMatrix,
    NoisySum,
    PrefixSums,
    mixing_matrix,
)
from quietgrad.noise.correlation.banded import BandedLower, Floats
from quietgrad.noise.correlation.solver import unit_columns
from quietgrad.noise.sources.keyed import normal
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


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 1])
def test_covariance_over_the_steps_is_that_of_the_matrix(seed: int) -> None:
    made = releases(
        GaussianNoise(SIGMA, mixing()), zero_sum(ENTRIES), range(STEPS), RandomKey.from_seed(seed)
    )
    assert not rejected(rows_of(made), mixing().dense())


@pytest.mark.statistical
def test_covariance_of_regenerated_noise_is_the_same() -> None:
    noise = GaussianNoise(SIGMA, mixing(), "regenerate")
    assert not rejected(rows_of(releases(noise, zero_sum(5_000), range(STEPS))), mixing().dense())


@pytest.mark.statistical
def test_covariance_of_a_plans_run_is_that_of_its_matrix() -> None:
    config = PrivacyConfig(
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=10,
        steps=STEPS,
        noise=BandedNoise(BANDS),
        seed=3,
        data_are_public=True,
    )
    plan = config.build(1000)
    assert not rejected(rows_of(of_run(plan.start(), STEPS, ENTRIES)), plan.mixing.matrix)


def draws(rows: int = STEPS, name: str = "w") -> Rows:
    """z, the independent draws."""
    return np.stack([normal(torch.zeros(ENTRIES), KEY, t, name).numpy() for t in range(rows)])


def substituted(
    z: Rows,
    band_of: Callable[[int], Floats] = lambda t: mixing().row(t),
    sign: float = -1.0,
    divided: bool = True,
    kept: int = BANDS - 1,
) -> Rows:
    """Forward substitution, with a place for every mistake."""
    made = np.zeros_like(z)
    for t in range(len(z)):
        band = band_of(t)
        for m in range(1, min(kept, t, len(band) - 1) + 1):
            made[t] += sign * band[m] * made[t - m]
        made[t] += z[t]
        if divided:
            made[t] /= band[0]
    return SIGMA * CLIP * made


def column(t: int) -> Floats:
    return mixing().columns[t]


def row_before(t: int) -> Floats:
    return mixing().row(max(t - 1, 0))


def shifted_row(t: int) -> Floats:
    """C[t, t - m - 1] in the place of C[t, t - m]."""
    row = mixing().row(t)
    return np.concatenate([row[:1], row[2:], np.zeros(1)])


def reversed_row(t: int) -> Floats:
    row = mixing().row(t)
    return np.concatenate([row[:1], row[:0:-1]])


def plain_cholesky() -> Floats:
    c = mixing().dense()
    return np.linalg.cholesky(c.T @ c)


BROKEN: dict[str, Callable[[], Rows]] = {
    "independent noise": lambda: SIGMA * CLIP * draws(),
    "independent noise of the right size": lambda: (
        SIGMA * CLIP * np.linalg.norm(np.linalg.inv(mixing().dense()), axis=1)[:, None] * draws()
    ),
    "two thirds of sigma": lambda: 2 / 3 * substituted(draws()),
    "one and a half sigma": lambda: 1.5 * substituted(draws()),
    "without the clipping norm": lambda: substituted(draws()) / CLIP,
    "plain Cholesky factor": lambda: SIGMA * CLIP * np.linalg.solve(plain_cholesky(), draws()),
    "multiplied by C, not solved": lambda: SIGMA * CLIP * mixing().dense() @ draws(),
    "transposed": lambda: SIGMA * CLIP * np.linalg.solve(mixing().dense().T, draws()),
    "added twice": lambda: substituted(draws()) + substituted(draws(name="v")),
    "history not carried": lambda: substituted(draws(), kept=0),
    "history one row short": lambda: substituted(draws(), kept=BANDS - 2),
    "sign flipped": lambda: substituted(draws(), sign=1.0),
    "not divided by the diagonal": lambda: substituted(draws(), divided=False),
    "row of the step before": lambda: substituted(draws(), row_before),
    "coefficients one off": lambda: substituted(draws(), shifted_row),
    "coefficients in reverse": lambda: substituted(draws(), reversed_row),
    "columns for rows": lambda: substituted(draws(), column),
    "same draw at every step": lambda: substituted(np.tile(draws(1), (STEPS, 1))),
    "one draw used twice": lambda: substituted(np.concatenate([draws(STEPS - 1), draws(1)])),
    "restarted in the middle": lambda: np.concatenate([substituted(draws())[:30], restarted(30)]),
}


def restarted(step: int) -> Rows:
    """The steps from ``step`` on of a second block."""
    return rows_of(
        releases(GaussianNoise(SIGMA, mixing()), zero_sum(ENTRIES), range(step, STEPS), since=step)
    )


@pytest.mark.statistical
def test_forward_substitution_written_out_is_accepted() -> None:
    # Or the mistakes below might be rejected for another reason; and it is what the library draws.
    right = substituted(draws())
    assert not rejected(right, mixing().dense())
    made = rows_of(releases(GaussianNoise(SIGMA, mixing()), zero_sum(ENTRIES), range(STEPS)))
    np.testing.assert_allclose(made, right, rtol=0, atol=1e-5)


@pytest.mark.statistical
@pytest.mark.parametrize("mistake", BROKEN)
def test_broken_mechanisms_are_rejected(mistake: str) -> None:
    assert rejected(BROKEN[mistake](), mixing().dense())


# What a release says of its noise


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("steps", "bands"), [(1, 1), (12, 1), (12, 2), (40, 8), (20, 20)])
def test_noise_std_and_mixing_row_are_those_of_the_dense_inverse(
    memory: str, steps: int, bands: int
) -> None:
    matrix = random_mixing(steps, bands, seed=steps)
    inverse = np.linalg.inv(matrix.dense())
    made = releases(GaussianNoise(SIGMA, matrix, memory), zero_sum(), range(steps))
    for t, noisy in enumerate(made):
        np.testing.assert_allclose(noisy.mixing_row, inverse[t, : t + 1], rtol=0, atol=1e-12)
        assert noisy.noise_std == pytest.approx(
            SIGMA * CLIP * np.linalg.norm(inverse[t]), rel=1e-12
        )
        assert not noisy.denoised


def test_noise_follows_the_clipping_norm_and_is_added_to_the_sum() -> None:
    noise = GaussianNoise(SIGMA, mixing())
    entries = torch.linspace(-5, 5, 100, dtype=torch.float64)
    alone = releases(
        noise, ClippedSum({"w": torch.zeros_like(entries)}, SensitivityClaim(1.0)), range(10)
    )
    added = releases(noise, ClippedSum({"w": entries}, SensitivityClaim(4.0)), range(10))
    for one, other in zip(alone, added):
        torch.testing.assert_close(other.gradients["w"], entries + 4 * one.gradients["w"])
        assert other.noise_std == pytest.approx(4 * one.noise_std)


def test_float64_noise_is_the_inverse_times_the_draws_to_rounding() -> None:
    zero = torch.zeros(7, dtype=torch.float64)
    z = np.stack([normal(zero, KEY, t, "w").numpy() for t in range(STEPS)])
    for memory in MEMORIES:
        made = releases(
            GaussianNoise(SIGMA, mixing(), memory),
            ClippedSum({"w": zero}, SensitivityClaim(CLIP)),
            range(STEPS),
        )
        expected = SIGMA * CLIP * np.linalg.solve(mixing().dense(), z)
        np.testing.assert_allclose(rows_of(made), expected, rtol=0, atol=1e-10)
        assert not np.array_equal(rows_of(made), rows_of(made).astype(np.float32))


# Memory, micro-batches, shards


@pytest.mark.parametrize("bands", [1, 2, 5, 30])
def test_both_memories_make_the_same_noise(bands: int) -> None:
    matrix = random_mixing(30, bands, seed=bands)
    clipped = ClippedSum({"w": torch.zeros(4, 5), "b": torch.zeros(3)}, SensitivityClaim(CLIP))
    kept, anew = (
        releases(GaussianNoise(SIGMA, matrix, memory), clipped, range(30)) for memory in MEMORIES
    )
    for one, other in zip(kept, anew, strict=True):
        assert one.noise_std == other.noise_std
        for name in ("w", "b"):
            torch.testing.assert_close(
                one.gradients[name], other.gradients[name], rtol=1e-5, atol=1e-5
            )


def test_rows_keeps_bands_less_one_copies_and_regenerate_none() -> None:
    for memory, most in (("rows", BANDS - 1), ("regenerate", 0)):
        noise = GaussianNoise(SIGMA, mixing(), memory)
        history = noise.init()
        for t in range(20):
            _, history = noise.update(zero_sum(), lambda _: KEY, history)
            assert len(history.rows) == min(most, t + 1)
            assert len(history.coefficients) == min(BANDS - 1, t + 1)
            assert (history.step, history.since) == (t + 1, 0)


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


@pytest.mark.parametrize("memory", MEMORIES)
def test_noise_does_not_depend_on_the_micro_batches(memory: str) -> None:
    whole = run_whole(plan_of(memory=memory).start())
    assert len(whole) == PLAN_STEPS
    others = [
        run_whole(plan_of(memory=memory, max_physical_batch_size=size).start()) for size in (1, 3)
    ] + [run_in_parts(plan_of(memory=memory).start(), parts) for parts in (2, 5)]
    for other in others:
        for one, two in zip(whole, other, strict=True):
            assert one.noise_std == two.noise_std
            for name, g in one.gradients.items():
                torch.testing.assert_close(g, two.gradients[name], rtol=0, atol=1e-5)
    another = run_whole(plan_of(memory=memory, seed=6).start())
    gap = max(
        float((one.gradients["0.weight"] - two.gradients["0.weight"]).abs().max())
        for one, two in zip(whole, another)
    )
    assert gap > 0.1  # the tolerance is far below the noise


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_shard_gets_the_noise_of_the_whole(memory: str) -> None:
    noise = GaussianNoise(SIGMA, mixing(), memory)
    generator = torch.Generator().manual_seed(0)
    sums = {
        name: torch.randn(shape, generator=generator)
        for name, shape in {"a": (5, 4), "b": (7,), "c": (2, 2)}.items()
    }
    whole = releases(noise, ClippedSum(sums, SensitivityClaim(CLIP)), range(20))
    for names in (["a"], ["b", "c"]):
        shard = ClippedSum({n: sums[n] for n in names}, SensitivityClaim(CLIP))
        for one, part in zip(whole, releases(noise, shard, range(20)), strict=True):
            assert list(part.gradients) == names
            assert part.noise_std == one.noise_std
            assert all(torch.equal(part.gradients[n], one.gradients[n]) for n in names)
    assert not torch.equal(whole[3].gradients["b"][:4], whole[3].gradients["c"].flatten())


# Going on after a stop


def release(run: PrivateRun, count: int) -> list[torch.Tensor]:
    return [noisy.gradients["w"] for noisy in of_run(run, count, 50)]


def blocks_in(path: Path) -> list[int]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if line["type"] == "noise-block"]


def block_matrix(matrix: Floats, *cuts: int) -> Floats:
    """C with all entries zeroed that refer from a block to an earlier one."""
    out = matrix.copy()
    for cut in cuts:
        out[cut:, :cut] = 0.0
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "stop", [1, PLAN_BANDS - 2, PLAN_BANDS - 1, PLAN_BANDS, PLAN_BANDS + 1, 9, PLAN_STEPS - 1]
)
def test_a_seeded_run_goes_on_as_if_it_had_not_stopped(path: Path, stop: int, memory: str) -> None:
    plan = plan_of(memory=memory)
    uninterrupted = release(plan.start(), PLAN_STEPS)
    with plan.start(path) as run:
        first = release(run, stop)
    with plan.start(path) as run:
        rest = release(run, PLAN_STEPS - stop)
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted, first + rest, strict=True))
    assert blocks_in(path) == [0]
    assert read_ledger(path).releases == PLAN_STEPS


def test_a_seeded_run_goes_on_after_many_stops_and_with_the_other_memory(path: Path) -> None:
    uninterrupted = release(plan_of().start(), PLAN_STEPS)
    made = []
    for start in range(0, PLAN_STEPS, 3):
        with plan_of(memory=MEMORIES[start % 2]).start(path) as run:
            made += release(run, 3)
    for a, b in zip(uninterrupted, made, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_whole_training_goes_on_after_a_stop(path: Path) -> None:
    # With batches and clipping: whoever stops before a release makes that release, not the next
    # one, after the stop.
    uninterrupted = run_whole(plan_of().start())
    model, (x, y), made = build(), data(), []
    for _ in range(3):
        with plan_of().start(path) as run:
            for indices, _ in zip(run.batches(), range(4)):
                made.append(run.step(model, loss, (x[indices], y[indices])))
    for one, two in zip(uninterrupted, made, strict=True):
        assert all(torch.equal(g, two.gradients[name]) for name, g in one.gradients.items())


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("memory", MEMORIES)
def test_another_dtype_begins_a_new_block_and_says_so(
    path: Path, tmp_path: Path, seed: int | None, memory: str
) -> None:
    # The same keys give other numbers in double precision: noise "correlated" with those would be
    # correlated with nothing, and mixing_row and noise_std would be wrong.
    plan, keys, inverse = plan_of(memory=memory, seed=seed), tmp_path / "keys", None
    with plan.start(path, keys) as run:
        of_run(run, 4)
    for start, dtype in ((4, torch.float64), (7, torch.float32)):
        with plan.start(path, keys) as run:
            with pytest.warns(UserWarning, match=f"not correlated with the steps before {start}"):
                first = of_run(run, 1, dtype=dtype)
            made = first + of_run(run, 1, dtype=dtype)
        with (
            plan.start(path, keys) as run,
            warnings.catch_warnings(),
        ):  # a further session of the same kind goes on
            warnings.simplefilter("error")
            made += of_run(run, 1, dtype=dtype)
        inverse = np.linalg.inv(block_matrix(plan.mixing.matrix, start))
        for t, noisy in enumerate(made, start=start):
            np.testing.assert_allclose(noisy.mixing_row, inverse[t, : t + 1], rtol=0, atol=1e-12)
            assert noisy.noise_std == pytest.approx(SIGMA * CLIP * np.linalg.norm(inverse[t]))
    assert blocks_in(path) == [0, 4, 7]
    contents = read_ledger(path)
    assert contents.releases == 10 and contents.noise_drawn is not None
    assert contents.noise_drawn.startswith("float32 by numpy")
    assert [session.step for session in contents.sessions] == [0, 4, 6, 7, 9]


@pytest.mark.statistical
def test_noise_after_a_change_of_dtype_has_the_covariance_of_its_block(
    path: Path, entropy: None
) -> None:
    plan, entries, keys = plan_of(seed=None), 40_000, path.with_suffix(".keys")
    with plan.start(path, keys) as run:
        before = of_run(run, 5, entries)
    with plan.start(path, keys) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = of_run(run, PLAN_STEPS - 5, entries, torch.float64)
    rows = rows_of(before + after)
    assert not rejected(rows, block_matrix(plan.mixing.matrix, 5))
    assert rejected(rows, plan.mixing.matrix)


@pytest.fixture
def entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh roots in a fixed order: statistical tests are the same each time."""
    seeds = iter(range(100))
    monkeypatch.setattr(
        RandomKey, "from_entropy", classmethod(lambda cls: RandomKey.from_seed(next(seeds)))
    )


@pytest.mark.parametrize("stop", [1, 3, 4, 9])
def test_without_seed_and_keys_a_new_block_begins(path: Path, stop: int) -> None:
    plan = plan_of(seed=None)
    with plan.start(path) as run:
        of_run(run, stop)
    assert read_ledger(path).noise_block == (0, plan.noise.digest)
    with plan.start(path) as run:
        made = of_run(run, PLAN_STEPS - stop)
    assert blocks_in(path) == [0, stop]
    assert read_ledger(path).noise_block == (stop, plan.noise.digest)
    inverse = np.linalg.inv(block_matrix(plan.mixing.matrix, stop))
    for t, noisy in enumerate(made, start=stop):
        assert not noisy.mixing_row[:stop].any()
        np.testing.assert_allclose(noisy.mixing_row, inverse[t, : t + 1], rtol=0, atol=1e-12)
        assert noisy.noise_std == pytest.approx(SIGMA * CLIP * np.linalg.norm(inverse[t]))


@pytest.mark.statistical
@pytest.mark.parametrize("memory", MEMORIES)
def test_covariance_after_a_new_block_is_that_of_the_cut_matrix(
    path: Path, memory: str, entropy: None
) -> None:
    plan, cut, made = plan_of(seed=None, memory=memory), 6, []
    for count in (cut, PLAN_STEPS - cut):
        with plan.start(path) as run:
            made += of_run(run, count, ENTRIES)
    rows = rows_of(made)
    assert not rejected(rows, block_matrix(plan.mixing.matrix, cut))
    assert rejected(rows, plan.mixing.matrix)
    assert rejected(rows, block_matrix(plan.mixing.matrix, cut - 1))


@pytest.mark.statistical
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "counts", [(1, 11), (3, 1, 8), (6, 6), (2, 2, 2, 2, 4), (5, 0, 7)], ids=str
)
def test_with_its_keys_a_run_goes_on_in_the_same_block(
    path: Path, counts: tuple[int, ...], memory: str, entropy: None
) -> None:
    # Every session draws with a root of its own, so the noise is another than without a stop: its
    # covariance is the same.
    plan, keys, made = plan_of(seed=None, memory=memory), path.with_name("keys"), []
    for count in counts:
        with plan.start(path, keys) as run:
            made += of_run(run, count, ENTRIES)
    assert blocks_in(path) == [0]
    rows = rows_of(made)
    assert not rejected(rows, plan.mixing.matrix)
    assert rejected(rows, block_matrix(plan.mixing.matrix, counts[0]))


def test_a_restored_copy_of_a_run_draws_other_noise(tmp_path: Path) -> None:
    # Two sums with the same noise would give away their difference.
    plan = plan_of(seed=None)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with plan.start(tmp_path / "one" / "ledger.jsonl", tmp_path / "one" / "keys") as run:
        of_run(run, 5)
    for file in (tmp_path / "one").iterdir():
        shutil.copy(
            file, tmp_path / "other"
        )  # with its mode: keys that others may read are refused
    gone_on = []
    for name in ("one", "other"):
        with plan.start(tmp_path / name / "ledger.jsonl", tmp_path / name / "keys") as run:
            gone_on.append(rows_of(of_run(run, 4)))
    assert (gone_on[0] != gone_on[1]).all()


def test_keys_are_for_their_owner_alone_one_a_session(path: Path) -> None:
    plan, keys = plan_of(seed=None), path.with_name("keys")
    for count, firsts in ((2, [0]), (0, [0, 2]), (3, [0, 2]), (1, [0, 2, 5])):
        with plan.start(path, keys) as run:
            of_run(run, count)
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
        ring = read_secrets(keys).ring
        assert [session.step for session in ring.sessions] == firsts
        assert len({session.root.root for session in ring.sessions}) == len(firsts)
    assert [ring.key_of(t) for t in range(7)] == [
        ring.sessions[i].root for i in (0, 0, 1, 1, 1, 2, 2)
    ]
    for text in (path.read_text(), *(repr(x) for x in (run, ring))):
        assert not any(
            s.root.root.hex() in text or repr(s.root.root) in text for s in ring.sessions
        )


def test_keys_are_written_only_where_they_are_of_use(path: Path) -> None:
    keys = path.with_name("keys")
    for changes in ({"seed": 5}, {"seed": None, "bands": 1}):
        with plan_of(**changes).start(path.with_name(f"{changes['seed']}.jsonl"), keys) as run:
            of_run(run, 1)
        assert not keys.exists()


def test_keys_of_another_run_are_not_taken_for_this_ones(path: Path) -> None:
    plan, keys = plan_of(seed=None), path.with_name("keys")
    with plan.start(path.with_name("another.jsonl"), keys) as run:
        of_run(run, 4)
    kept = keys.read_bytes()
    # Or they are this run's, and its ledger is lost: that cannot be told.
    with pytest.raises(ValueError, match=r"keys=.* is there, but no ledger of its run"):
        plan.start(path, keys)
    assert keys.read_bytes() == kept and not path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{}\n",
        '{"seed": null}\n',
        '{"seed": null, "sessions": [{"step": 0, "root": "xyz"}]}',
        '{"seed": 0.5, "sessions": []}',
        "[1]\n",
        "no json\n",
    ],
)
def test_damaged_keys_are_refused_or_begin_a_new_block(path: Path, damage: str) -> None:
    plan, keys = plan_of(seed=None), path.with_name("keys")
    with plan.start(path, keys) as run:
        of_run(run, 4)
    keys.write_text(damage)
    with pytest.raises(
        ValueError, match=r"keys=.* is damaged .*; remove it: the noise then begins a new block"
    ):
        plan.start(path, keys)
    keys.unlink()
    with plan.start(path, keys) as run:  # the refusal left the ledger free
        noisy = of_run(run, 1)[0]
    assert blocks_in(path) == [0, 4]
    assert not noisy.mixing_row[:4].any()


@pytest.mark.statistical
@pytest.mark.parametrize(
    "sessions",
    [
        [(5, False), (5, False)],
        [(None, True), (None, True), (None, True)],
        [(None, False), (None, False)],
        [(5, False), (None, True), (None, True)],
        [(None, True), (6, True)],
        [(None, True), (None, False), (None, True)],
    ],
    ids=str,
)
def test_what_releases_say_of_their_noise_holds_after_stops(
    path: Path, sessions: list[tuple[int | None, bool]], entropy: None
) -> None:
    """Sessions are (seed, whether the file of keys is passed). "Otherwise it begins anew": also
    where the seed or the keys are not those of the block.
    """
    made = []
    for seed, kept in sessions:
        with plan_of(seed=seed).start(path, path.with_name("keys") if kept else None) as run:
            made += of_run(run, PLAN_STEPS // len(sessions), ENTRIES)
    said = np.stack(
        [np.pad(noisy.mixing_row, (0, PLAN_STEPS - noisy.mixing_row.size)) for noisy in made]
    )
    assert not rejected(rows_of(made), np.linalg.inv(said))


@pytest.mark.statistical
def test_an_older_copy_of_the_keys_begins_a_new_block(path: Path, entropy: None) -> None:
    # Restored from a backup, say. Replaying a session's steps with draws that were never released
    # would show earlier draws a second time: squared columns up to 1.1.
    plan, keys, made = plan_of(seed=None), path.with_name("keys"), []
    for count in (5, 3, 4):
        with plan.start(path, keys) as run:
            made += of_run(run, count, ENTRIES)
        kept = read_secrets(keys)
        write_secrets(Secrets(kept.seed, KeyRing(kept.ring.sessions[:1])), keys)
    said = np.stack(
        [np.pad(noisy.mixing_row, (0, PLAN_STEPS - noisy.mixing_row.size)) for noisy in made]
    )
    assert not rejected(rows_of(made), np.linalg.inv(said))


def test_another_matrix_begins_a_new_block(path: Path) -> None:
    # Its rows would refer to rows that were made by the first matrix.
    one, other = (
        mixing_matrix(w, PLAN_BANDS) for w in (PrefixSums(PLAN_STEPS), PrefixSums(PLAN_STEPS, 0.9))
    )
    with plan_of(mixing=one).start(path) as run:
        of_run(run, 5)
    with plan_of(mixing=other).start(path) as run:
        noisy = of_run(run, 1)[0]
    assert blocks_in(path) == [0, 5]
    assert not noisy.mixing_row[:5].any() and noisy.mixing_row[5] == pytest.approx(
        1 / other.matrix[5, 5]
    )
    with plan_of(mixing=other).start(path) as run:  # and goes on with that one
        noisy = of_run(run, 1)[0]
    assert blocks_in(path) == [0, 5]
    assert noisy.mixing_row[5] != 0


def test_a_release_whose_line_was_cut_off_is_counted_and_the_noise_goes_on(path: Path) -> None:
    expected = release(plan_of().start(), PLAN_STEPS)
    with plan_of().start(path) as run:
        release(run, 5)
    path.write_bytes(path.read_bytes()[:-3])
    with plan_of().start(path) as run:
        assert run.released == 5
        rest = release(run, PLAN_STEPS - 5)
    assert all(torch.equal(a, b) for a, b in zip(expected[5:], rest, strict=True))


def test_a_run_goes_on_after_a_draw_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    # As independent noise does (tests/test_ledger.py): the failed release is counted, its noise is
    # skipped.
    expected = release(plan_of().start(), 6)
    run = plan_of().start()
    release(run, 3)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(GaussianNoise, "update", out_of_memory)
        with pytest.raises(MemoryError):
            release(run, 1)
    assert run.released == 4
    assert all(torch.equal(a, b) for a, b in zip(expected[4:], release(run, 2), strict=True))


# Soundness of blocks


@given(
    steps=st.integers(1, 25),
    bands=st.integers(1, 25),
    cuts=st.lists(st.integers(1, 24), max_size=4),
    seed=st.integers(0, 10**6),
)
def test_whatever_the_cuts_the_noise_is_that_of_a_banded_matrix_with_columns_of_norm_at_most_one(
    steps: int, bands: int, cuts: list[int], seed: int
) -> None:
    bands = min(bands, steps)
    matrix = random_mixing(steps, bands, seed)
    starts = [0, *sorted({c for c in cuts if c < steps}), steps]
    rows = np.zeros((steps, steps))
    for since, stop in pairwise(starts):
        for t, noisy in enumerate(
            releases(GaussianNoise(1.0, matrix), zero_sum(), range(since, stop), since=since), since
        ):
            rows[t, : t + 1] = noisy.mixing_row
    run = np.linalg.inv(rows)  # the matrix that the released noise has been solved with
    np.testing.assert_allclose(run, block_matrix(matrix.dense(), *starts[1:-1]), rtol=0, atol=1e-7)
    assert (np.linalg.norm(run, axis=0) <= 1 + 1e-7).all()
    np.testing.assert_allclose(np.tril(run, -bands), 0, rtol=0, atol=1e-7)


def test_a_replayed_history_is_the_one_that_was_lost() -> None:
    for memory in MEMORIES:
        noise = GaussianNoise(SIGMA, mixing(), memory)
        for since in (0, 3):
            history = noise.init(since)
            for t in range(since, 20):
                again = noise.replay(zero_sum().gradients, lambda _: KEY, since, t)
                assert (again.step, again.since) == (history.step, history.since)
                assert len(again.rows) == len(history.rows)
                assert all(torch.equal(a["w"], b["w"]) for a, b in zip(again.rows, history.rows))
                for a, b in zip(again.coefficients, history.coefficients, strict=True):
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
                _, history = noise.update(zero_sum(), lambda _: KEY, history)


# What is refused


def test_columns_longer_than_one_are_refused() -> None:
    # The sensitivity that is accounted for is a column's norm times the clipping norm.
    longer = mixing().columns.copy()
    longer[7] *= 1 + 1e-6
    with pytest.raises(ValueError, match=r"column of norm 1\.000001.*divide each by its norm"):
        GaussianNoise(SIGMA, BandedLower(longer))
    GaussianNoise(SIGMA, BandedLower(0.9 * mixing().columns))  # shorter ones only mean more noise


@pytest.mark.parametrize("value", [0.0, -0.5])
def test_a_diagonal_that_is_not_positive_is_refused(value: float) -> None:
    columns = mixing().columns.copy()
    columns[3] = 0.1
    columns[3, 0] = value
    with pytest.raises(ValueError, match="diagonal entry that is not positive"):
        GaussianNoise(SIGMA, BandedLower(columns))


@pytest.mark.parametrize("where", [(3, 0), (3, 2)])
def test_entries_that_are_not_numbers_are_refused(where: tuple[int, int]) -> None:
    columns = mixing().columns.copy()
    columns[where] = np.nan
    with pytest.raises(ValueError, match="mixing"):
        GaussianNoise(SIGMA, BandedLower(columns))


def test_a_matrix_that_enlarges_the_noise_beyond_single_precision_is_refused() -> None:
    columns = np.tile([0.6, -0.8], (STEPS, 1))  # the inverse's rows grow as (4/3)^t
    with pytest.raises(
        ValueError, match=r"amplifies the noise of some step .* times.*use fewer bands"
    ):
        GaussianNoise(SIGMA, BandedLower(columns))
    assert GaussianNoise(SIGMA, BandedLower(columns[:20])).bands == 2  # 500 times


@pytest.mark.parametrize("sigma", [0, -1.0, float("nan"), float("inf")])
def test_noise_multiplier_must_be_positive(sigma: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        GaussianNoise(sigma, mixing())


def test_an_unknown_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory='disk' is unknown; use one of rows, regenerate"):
        GaussianNoise(SIGMA, mixing(), "disk")


def test_steps_beyond_the_matrix_are_refused() -> None:
    noise = GaussianNoise(SIGMA, mixing(5, 2))
    assert len(releases(noise, zero_sum(), range(5))) == 5
    with pytest.raises(ValueError, match="step=5 is beyond the mixing matrix, which has 5 rows"):
        releases(noise, zero_sum(), range(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixing": "other steps"}, "mixing has 9 rows for 12 steps"),
        ({"workload": PrefixSums(5)}, "workload is for 5 steps, the run has 12"),
        ({"bands": PLAN_STEPS + 1}, "bands=13 exceeds steps=12"),
        ({"bands": "many"}, "bands='many' is unknown; valid: auto"),
        ({"bands": "auto"}, "give target_epsilon"),
        ({"memory": "disk"}, "memory='disk'"),
    ],
    ids=str,
)
def test_plans_refuse_by_name(change: dict, message: str) -> None:
    if "mixing" in change:
        change = {"mixing": mixing_matrix(PrefixSums(9), 3)}
    with pytest.raises(ValueError, match=message):
        plan_of(**change)


def test_a_plan_refuses_a_given_matrix_with_long_columns() -> None:
    right = mixing_matrix(PrefixSums(PLAN_STEPS), 3)
    longer: MixingMatrix = replace(right, banded=BandedLower(1.01 * right.banded.columns))
    with pytest.raises(ValueError, match=r"column of norm 1\.01"):
        plan_of(mixing=longer)


def test_a_plan_with_less_noise_or_another_matrix_than_accounted_is_refused() -> None:
    plan = plan_of()
    for noise in (
        replace(plan.noise, noise_multiplier=1.0),
        GaussianNoise(SIGMA, mixing(PLAN_STEPS, 5)),
        GaussianNoise(SIGMA, mixing(PLAN_STEPS - 1, PLAN_BANDS)),
    ):
        with pytest.raises(ValueError, match=r"build plans with PrivacyConfig\.build"):
            replace(plan, noise=noise)
