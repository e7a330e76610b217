"""Noise correlated across steps: its covariance, what every release says of it, and that neither
memory, micro-batches nor shards change it. The verdict on covariances
(``correlated_runs.rejected``) has to reject every wrong mechanism of a list.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from correlated_runs import (
    BANDS,
    CLIP,
    ENTRIES,
    KEY,
    MEMORIES,
    PLAN_STEPS,
    SIGMA,
    STEPS,
    Rows,
    mixing,
    of_run,
    plan_of,
    random_mixing,
    rejected,
    releases,
    rows_of,
    run_in_parts,
    run_whole,
    zero_sum,
)

from quietgrad import PrivacyConfig
from quietgrad.clipping import ClippedSum
from quietgrad.events import SensitivityClaim
from quietgrad.noise import BandedNoise, GaussianNoise
from quietgrad.noise.correlation.banded import Floats
from quietgrad.noise.sources.keyed import normal
from quietgrad.randomness import RandomKey

pytestmark = pytest.mark.usefixtures("examined_once")


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


@pytest.mark.grid(1, "two ways to keep the same rows")
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
