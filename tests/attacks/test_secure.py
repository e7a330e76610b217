"""Attacks on the noise itself: its low bits, its tails, its streams. Each shows that it works where
it is expected to, and that it fails on the secure source.

Statistical: a right implementation fails one of these with probability below 1e-6 (Clopper-Pearson
or binomial bounds at 1e-7 each); seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("cryptography")

from quietgrad.accounting import delta
from quietgrad.clipping import ClippedSum
from quietgrad.events import PoissonGaussian, SensitivityClaim
from quietgrad.noise import GaussianNoise, KeyedSource, NoiseSource, SecureSource
from quietgrad.noise.sources import grid as grids
from quietgrad.noise.sources import rounded_normal as exact
from quietgrad.randomness import RandomKey

ALARM = 1e-7
TRIALS = 40_000
CLIP, SIGMA = 1.0, 1.0
KEY = RandomKey.from_seed(5)


def released(source: NoiseSource, value: float, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """TRIALS independent releases of a single number, with no record (0) or one record (C). In
    truth each is a release of its own; the entries of one are as independent.
    """
    clipped = ClippedSum({"w": torch.full((TRIALS,), value, dtype=dtype)}, SensitivityClaim(CLIP))
    noise = GaussianNoise(SIGMA, source=source)
    return noise.update(clipped, lambda _: KEY, noise.init())[0].gradients["w"].double().numpy()


def violates(
    source: NoiseSource, event: Callable[[np.ndarray], np.ndarray], level: float = 1.0
) -> bool:
    """Whether the event is, beyond doubt, more probable without the record than e^epsilon times its
    probability with it, plus the delta that the accountant states for that epsilon.
    """
    allowed = delta(PoissonGaussian(SIGMA, 1.0, 1), level)
    without, with_ = (int(event(released(source, value)).sum()) for value in (0.0, CLIP))
    low = stats.beta.ppf(ALARM, without, TRIALS - without + 1) if without else 0.0
    high = stats.beta.isf(ALARM, with_ + 1, TRIALS - with_)
    return bool(low > math.exp(level) * high + allowed)


def has_low_bits(values: np.ndarray) -> np.ndarray:
    """Numbers that are no multiple of 2^-24. A float32 sum of something near 1 and noise is one:
    the noise's lower bits are gone where the record is.
    """
    scaled = values * 2.0**24
    return scaled != np.round(scaled)


@pytest.mark.statistical
def test_the_low_bits_of_ordinary_noise_tell_whether_a_record_is_there() -> None:
    """Mironov (2012), on a single number in float32: every release of C plus noise is a multiple of
    2^-24, a quarter of those of 0 plus noise is not.
    """
    assert not has_low_bits(released(KeyedSource(), CLIP)).any()
    assert has_low_bits(released(KeyedSource(), 0.0)).mean() > 0.2
    assert violates(KeyedSource(), has_low_bits)
    assert violates(KeyedSource(), has_low_bits, level=5.0)  # nor does an epsilon of 5 allow it


@pytest.mark.statistical
def test_the_low_bits_of_secure_noise_do_not() -> None:
    assert has_low_bits(released(SecureSource(), 0.0)).mean() > 0.2  # the event is there to be seen
    assert has_low_bits(released(SecureSource(), CLIP)).mean() > 0.1
    assert not violates(SecureSource(), has_low_bits)


@pytest.mark.statistical
def test_the_attack_notices_a_release_that_skips_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutant: secure numbers, added like ordinary ones.
    monkeypatch.setattr(
        "quietgrad.noise.mechanism.covered",
        lambda total, row, std, grid: total + (row * std).float(),
    )
    assert violates(SecureSource(), has_low_bits)


def units(source: NoiseSource, value: float) -> np.ndarray:
    """Releases of a float64 sum in steps of the grid."""
    std = grids.noise_std(SIGMA, SensitivityClaim(CLIP), TRIALS, 1, SecureSource.grid)
    return released(source, value, torch.float64) / (std * SecureSource.grid)


@pytest.mark.statistical
@pytest.mark.parametrize("value", [0.0, CLIP, 1 / 3, math.pi * 1e-7])
def test_what_can_be_released_does_not_depend_on_the_sum(value: float) -> None:
    """All releases are whole steps, whatever lies between the steps in the sum; and every residue
    is as frequent as any other.
    """
    steps = np.round(units(SecureSource(), value))
    assert np.abs(units(SecureSource(), value) - steps).max() < 1e-6
    for modulus in (2, 8, 31):
        counts = np.bincount(np.mod(steps, modulus).astype(int), minlength=modulus)
        assert stats.chisquare(counts).pvalue > ALARM
    ordinary = units(KeyedSource(), value)
    assert (
        np.abs(ordinary - np.round(ordinary)).max() > 0.4
    )  # the question has another answer there


def test_a_sum_between_two_steps_is_seen_where_only_the_noise_is_on_the_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Mutant: noise on the grid, the sum left as it is: what lies between the steps comes out
    # untouched.
    monkeypatch.setattr(
        "quietgrad.noise.mechanism.covered", lambda total, row, std, grid: total + row * std
    )
    found = units(SecureSource(), 1 / 3 + 0.4 * 2.0**-30)
    apart = found - np.floor(found)
    assert np.ptp(apart) < 1e-3 and 0.01 < apart.mean() < 0.99


@pytest.mark.statistical
def test_ordinary_numbers_of_a_gpu_end_where_secure_ones_go_on() -> None:
    """A normal number from one 32-bit uniform (the usual way on a GPU) is below sqrt(2 ln 2^32) =
    6.66: what lies beyond C + 6.66 sigma proves the record. 2^-36 of mass an entry, and 22 million
    entries; on the secure source the same bits (all zero) give any number up to what further bits
    allow."""

    class AllZeroAtFirst:
        def words(self, level: int, start: int, count: int) -> torch.Tensor:
            return torch.zeros(count, 2, dtype=torch.int64)

        def block(self, level: int, index: int) -> tuple[int, int]:
            return (0, 0) if level == 0 else (2**60, 2**60)

    assert math.sqrt(2 * 32 * math.log(2)) < 6.67
    assert exact.rounded_normals(AllZeroAtFirst(), 0, 1, 2.0**30).item() > 9.3 * 2**30


@pytest.mark.statistical
def test_two_releases_of_one_sum_share_nothing() -> None:
    """The difference of two releases is the difference of two independent draws, never the sum
    without noise; with one stream for both it would be.
    """
    clipped = ClippedSum({"w": torch.full((TRIALS,), 0.4)}, SensitivityClaim(CLIP))
    noise = GaussianNoise(SIGMA, source=SecureSource())

    def released(step: int) -> np.ndarray:
        noisy, _ = noise.update(clipped, lambda _: KEY, noise.init(step))
        return noisy.gradients["w"].double().numpy()

    first, second = released(0), released(1)
    law = stats.chi2(TRIALS, scale=2 * (SIGMA * CLIP) ** 2)
    assert law.ppf(ALARM) < ((first - second) ** 2).sum() < law.isf(ALARM)
    again = released(0)
    assert not law.ppf(ALARM) < ((first - again) ** 2).sum()
