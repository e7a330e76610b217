"""The noise of numbers released beside the gradients, and that of gradients whose clipping norm
follows them: its size, normal, independent of all other noise, keyed.

Noise is measured as released less private sum. n of them over nu squared are chi-square with n
degrees of freedom; a cosine of two independent noises times sqrt(n) is nearly standard normal. All
comparisons share FALSE_ALARM, so a right implementation fails one of the tests below with
probability under 1e-6; seeds are fixed, so in fact always or never.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from correlated_runs import mixing, rejected
from plans import changed
from scipy import stats

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.clipping import ClippedSum
from quietgrad.events import SensitivityClaim, SideRelease
from quietgrad.noise import GaussianNoise, KeyedSource, NoisySum
from quietgrad.noise.beside import cover_side_sums
from quietgrad.noise.sources.grid import noise_std
from quietgrad.randomness import RandomKey

FALSE_ALARM = 1e-8
SIGMA, CLIP, STEPS, ENTRIES = 1.7, 0.3, 1500, 3
LOSS, ADAPTIVE = TrainingLoss(own_noise=6.0), AdaptiveClipping(own_noise=4.0, rate=0.5)
CONFIG = PrivacyConfig(
    noise_multiplier=SIGMA,
    max_grad_norm=CLIP,
    expected_batch_size=2,
    steps=STEPS,
    training_loss=LOSS,
    adaptive_clipping=ADAPTIVE,
    seed=5,
    data_are_public=True,
)


def released(plan: PrivacyPlan, entries: int = ENTRIES) -> tuple[list[NoisySum], np.ndarray]:
    """All releases of a run whose records have gradients above the norm; and [steps] the norms that
    they were clipped to.
    """
    made, norms = [], []
    with plan.start() as run:
        for indices in run.batches():
            norms.append(run.max_grad_norm)
            count = len(indices)
            gradients = torch.full((count, entries), 100.0 * run.max_grad_norm)
            total = run.contribution({"w": gradients}, count, torch.full((count,), 9.0))
            noisy = run.release(total)
            parts = {n: v - float(total.private.beside[n]) for n, v in noisy.beside.items()}
            sums = {"w": noisy.gradients["w"].double() - total.gradients["w"].double()}
            made.append(replace(noisy, gradients=sums, beside=parts))
    return made, np.array(norms)


def wrong_size(noise: np.ndarray, std: float, comparisons: int = 8) -> bool:
    tail = FALSE_ALARM / (2 * comparisons)
    statistic = float(np.sum((noise / std) ** 2))
    return not stats.chi2.ppf(tail, noise.size) < statistic < stats.chi2.isf(tail, noise.size)


def correlate(one: np.ndarray, other: np.ndarray, comparisons: int = 20) -> bool:
    cosine = float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
    return abs(cosine) * np.sqrt(one.size) > stats.norm.isf(FALSE_ALARM / (2 * comparisons))


@pytest.fixture(scope="module")
def run() -> tuple[list[NoisySum], np.ndarray]:
    return released(CONFIG.build(20))


def beside(made: list[NoisySum], name: str) -> np.ndarray:
    return np.array([noisy.beside[name] for noisy in made])


@pytest.mark.statistical
def test_each_number_has_its_own_noise_of_the_stated_size(run) -> None:
    made, norms = run
    loss, count = beside(made, LOSS.name), beside(made, ADAPTIVE.name)
    assert not wrong_size(loss, 6.0) and not wrong_size(count, 4.0)
    assert stats.kstest(loss / 6.0, "norm").pvalue > FALSE_ALARM
    assert stats.kstest(count / 4.0, "norm").pvalue > FALSE_ALARM
    first = np.array([float(noisy.gradients["w"][0]) for noisy in made]) / (SIGMA * norms)
    series = [loss, count, first]
    for i, one in enumerate(series):
        assert not correlate(one[1:], one[:-1])  # with that of the step before
        for other in series[:i]:
            assert not correlate(one, other)
    for factor in (2 / 3, 1.5, 0.0):  # too little, too much, and missing
        assert wrong_size(loss * factor, 6.0) and wrong_size(count * factor, 4.0)
    assert correlate(loss, 0.9 * loss + 0.1 * count)


@pytest.mark.statistical
def test_the_gradients_noise_follows_the_clipping_norm_of_its_step(run) -> None:
    made, norms = run
    assert norms.max() > 3 * norms.min()  # it moved
    noise = np.stack([noisy.gradients["w"].numpy() for noisy in made])
    levels = np.array([noisy.noise_std for noisy in made])
    assert np.allclose(levels, SIGMA * norms, rtol=1e-12)
    assert not wrong_size((noise / (SIGMA * norms)[:, None]).ravel(), 1.0)
    old = np.concatenate([norms[:100], norms[:-100]])  # a norm of a hundred steps ago
    assert wrong_size((noise / (SIGMA * old)[:, None]).ravel(), 1.0)
    assert wrong_size((noise / (SIGMA * CLIP)).ravel(), 1.0)  # the first one


def test_noise_scaled_by_an_old_norm_is_refused() -> None:
    config = replace(CONFIG, steps=3)
    with config.build(20).start() as run:
        held: ClippedSum | None = None
        for step, indices in enumerate(run.batches()):
            count = len(indices)
            total = run.contribution({"w": torch.ones(count, 3)}, count)
            if step == 0:
                held = total
            else:
                assert held is not None and held.claim != total.claim
                with pytest.raises(ValueError, match="the clipped sum claims"):
                    run.release(replace(total, claim=held.claim))
            run.release(total)


@pytest.mark.statistical
@pytest.mark.parametrize("memory", ["rows", "regenerate"])
def test_correlated_noise_is_white_in_units_of_each_steps_norm(memory: str) -> None:
    steps, bands = 64, 8
    config = changed(
        replace(CONFIG, steps=steps), bands=bands, mixing=matrix_of(steps, bands), memory=memory
    )
    made, norms = released(config.build(400), entries=20_000)
    rows = np.stack([noisy.gradients["w"].numpy() for noisy in made])
    assert norms.max() > 1.2 * norms.min()
    dense = mixing(steps, bands).dense()
    assert not rejected(rows / norms[:, None], dense, SIGMA)
    assert rejected(rows / CLIP, dense, SIGMA)
    for t, noisy in enumerate(made):  # and says how large it is
        lengths = np.linalg.norm(noisy.mixing_row)
        assert noisy.noise_std == pytest.approx(SIGMA * norms[t] * lengths)
    # The numbers' own noise is not correlated.
    assert not correlate(beside(made, LOSS.name)[1:], beside(made, LOSS.name)[:-1])


def matrix_of(steps: int, bands: int) -> Any:
    from quietgrad.noise import PrefixSums, mixing_matrix

    return mixing_matrix(PrefixSums(steps), bands)


@pytest.mark.parametrize("source", ["keyed", "secure"])
def test_noise_is_a_function_of_key_step_and_name(source: str) -> None:
    if source == "secure":
        pytest.importorskip("cryptography")
    config = changed(replace(CONFIG, steps=4), source=source)
    one, other = (released(config.build(20))[0] for _ in range(2))
    assert [noisy.beside for noisy in one] == [noisy.beside for noisy in other]
    values = [value for noisy in one for value in noisy.beside.values()]
    assert len(set(values)) == 8


def test_a_secure_source_covers_numbers_on_its_grid() -> None:
    pytest.importorskip("cryptography")
    noise = changed(replace(CONFIG, steps=4), source="secure").build(20).noise
    empty = ClippedSum({"w": torch.zeros(2)}, CONFIG.clipping.clipper(CLIP).claim)
    made = noise.update(empty, lambda _: RandomKey.from_seed(1), noise.init())[0]
    for side in noise.beside:
        std = noise_std(side.noise_multiplier, SensitivityClaim(1.0), 1, 1, 2.0**-30)
        assert std > side.noise_multiplier  # larger by what rounding costs
        units = made.beside[side.name] / (std * 2.0**-30)
        assert units != 0 and abs(units - round(units)) < 1e-4


def test_a_batch_without_records_is_released_like_any_other() -> None:
    noise = GaussianNoise(1.0, beside=CONFIG.build(20).event.beside)
    empty = ClippedSum({"w": torch.zeros(2)}, CONFIG.clipping.clipper(CLIP).claim)
    noisy, _ = noise.update(empty, lambda _: RandomKey.from_seed(1), noise.init())
    assert set(noisy.beside) == {LOSS.name, ADAPTIVE.name}
    assert all(value != 0 for value in noisy.beside.values())


def test_a_number_is_released_at_its_steps_alone() -> None:
    config = replace(CONFIG, steps=7, training_loss=replace(LOSS, every=3))
    made, _ = released(config.build(20))
    assert [LOSS.name in noisy.beside for noisy in made] == [True, False, False] * 2 + [True]
    assert all(ADAPTIVE.name in noisy.beside for noisy in made)


def test_each_number_of_each_step_is_covered_by_a_draw_of_its_own() -> None:
    # Without any statistics: one name or one step for two draws would be the same number.
    key, sides = RandomKey.from_seed(7), (SideRelease("a", 2.0), SideRelease("b", 2.0))
    drawn = [
        number
        for step in (0, 1)
        for number in cover_side_sums({}, sides, KeyedSource(), key, step).values()
    ]
    gradient = ClippedSum({"w": torch.zeros(1, dtype=torch.float64)}, SensitivityClaim(2.0))
    noise = GaussianNoise(1.0)
    drawn.append(float(noise.update(gradient, lambda _: key, noise.init())[0].gradients["w"]))
    assert len(set(drawn)) == 5 and 0.0 not in drawn


def test_sums_beside_are_covered_in_float64_and_due_ones_alone() -> None:
    key, sides = RandomKey.from_seed(7), (SideRelease("a", 2.0), SideRelease("b", 2.0, every=2))
    none = cover_side_sums({}, sides, KeyedSource(), key, 1)
    assert set(none) == {"a"}  # without records too: which batches are empty is private
    sums = {name: torch.tensor(2.0**30 + 1, dtype=torch.float64) for name in ("a", "b")}
    some = cover_side_sums(sums, sides, KeyedSource(), key, 1)
    assert set(some) == {"a"}
    assert some["a"] - none["a"] == pytest.approx(2**30 + 1, abs=1e-6)
