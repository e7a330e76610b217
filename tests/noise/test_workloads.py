"""Workloads against simulation and sums written out: prefix sums, curvature, horizons, floors,
clamping, merged spectra, and what is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixing_cases import DECAYING, RATE

from quietgrad.noise import (
    Curvature,
    PrefixSums,
    curvature_workload,
    mixing_matrix,
    prefix_sum_workload,
)
from quietgrad.noise.correlation.banded import (
    Floats,
)
from quietgrad.noise.correlation.curvature import HORIZONS
from quietgrad.noise.correlation.quadratic_form import DenseWorkload

# Workloads


@pytest.mark.parametrize("steps", [1, 2, 17])
def test_prefix_sums_have_the_closed_form(steps: int) -> None:
    j = np.arange(steps)
    np.testing.assert_array_equal(prefix_sum_workload(steps), steps - np.maximum.outer(j, j))
    np.testing.assert_array_equal(PrefixSums(steps).impulse(), np.ones(steps))


@given(
    steps=st.integers(1, 12),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    rates=st.lists(st.floats(0.01, 2), min_size=12, max_size=12),
    seed=st.integers(0, 10**6),
)
def test_prefix_sums_are_the_squared_iterates_of_sgd(
    steps: int, momentum: float, rates: list[float], seed: int
) -> None:
    # x^T W x = sum over steps of the squared iterate when the gradients are x: SGD is linear in
    # them.
    gradients = np.random.default_rng(seed).standard_normal(steps)
    for schedule in (None, rates[:steps]):
        iterate, velocity, total = 0.0, 0.0, 0.0
        for t in range(steps):
            velocity = momentum * velocity + gradients[t]
            iterate -= (1.0 if schedule is None else schedule[t]) * velocity
            total += iterate**2
        w = prefix_sum_workload(steps, momentum, schedule)
        assert gradients @ w @ gradients == pytest.approx(total, rel=1e-9)
        load = PrefixSums(steps, momentum, None if schedule is None else tuple(schedule))
        np.testing.assert_allclose(load.factor() @ load.factor().T, w, rtol=1e-10)
        if schedule is None:
            np.testing.assert_allclose(load.weights()[:, 0], load.impulse(), rtol=1e-12)


@pytest.mark.parametrize("steps", [1, 7])
def test_curvature_is_the_double_sum(steps: int) -> None:
    mu = [3.0, 1.0, 0.2, 0.0, -0.5]
    expected = np.zeros((steps, steps))
    for j in range(steps):
        for l in range(steps):
            expected[j, l] = sum(m * (1 - 0.3 * m) ** (2 * steps - 2 - j - l) for m in mu if m > 0)
    np.testing.assert_allclose(curvature_workload(mu, 0.3, steps), expected, rtol=1e-13)


@pytest.mark.parametrize("steps", [10, 300])
@pytest.mark.parametrize(
    "spectrum",
    [
        np.geomspace(1e-6, 9.9, 5000),
        np.linspace(1e-3, 9.9, 5000),
        8 / np.arange(1, 5001) ** 1.2,
        np.full(5000, 2.5),
    ],
    ids=["geometric", "uniform", "power law", "all alike"],
)
def test_factor_of_many_eigenvalues_is_that_of_the_whole_sum(spectrum: Floats, steps: int) -> None:
    factor = Curvature(tuple(spectrum), RATE, steps).factor()
    w = curvature_workload(spectrum, RATE, steps)
    assert factor.shape[1] <= 120
    np.testing.assert_allclose(factor @ factor.T, w, rtol=0, atol=1e-10 * np.abs(w).max())
    np.testing.assert_allclose(
        np.diagonal(factor @ factor.T), np.diagonal(w), rtol=1e-10, atol=1e-30 * w.max()
    )


def test_negative_eigenvalues_count_as_zero() -> None:
    mixed, positive = (3.0, -4.0, 0.5, 0.0, -1e-9), (3.0, 0.5)
    np.testing.assert_array_equal(
        curvature_workload(mixed, RATE, 9), curvature_workload(positive, RATE, 9)
    )
    np.testing.assert_array_equal(
        Curvature(mixed, RATE, 9).factor(), Curvature(positive, RATE, 9).factor()
    )


@pytest.mark.parametrize("floor", [1e-3, 0.5])
def test_a_floor_adds_its_share_of_the_trace_to_every_step(floor: float) -> None:
    plain, floored = (Curvature(DECAYING, RATE, 30, f).factor() for f in (0.0, floor))
    w = plain @ plain.T
    np.testing.assert_allclose(
        floored @ floored.T, w + floor * np.trace(w) / 30 * np.eye(30), atol=1e-10 * w.max()
    )


def test_a_floor_keeps_the_noise_of_every_step_in_bounds() -> None:
    # Theorem 1 alone sees a few shapes of noise and lets all others grow.
    rows = {
        f: mixing_matrix(Curvature(DECAYING, RATE, 16, f), 16).banded.largest_inverse_row()
        for f in (0.0, 1e-2)
    }
    assert rows[1e-2] < 0.2 * rows[0.0]
    with pytest.raises(ValueError, match=r"floor=-0\.1"):
        Curvature(DECAYING, RATE, 16, -0.1)


@pytest.mark.parametrize(
    "make", [lambda mu: Curvature(mu, 0.5, 6), lambda mu: curvature_workload(mu, 0.5, 6)]
)
def test_eigenvalues_beyond_the_stable_rate_are_clamped_with_a_warning_that_counts_them(
    make,
) -> None:
    with pytest.warns(
        UserWarning,
        match="2 of 4 eigenvalues exceed 2 / learning_rate = 4 .*largest is 1e.06.* 2 are clamped "
        "to 4",
    ):
        found = make((1e6, 5.0, 4.0, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clamped = make((4.0, 4.0, 4.0, 1.0))
    found, clamped = (
        (x.factor() @ x.factor().T if isinstance(x, Curvature) else x) for x in (found, clamped)
    )
    np.testing.assert_allclose(found, clamped, rtol=1e-12)


@pytest.mark.parametrize(
    ("workload", "bands", "message"),
    [
        (np.ones((3, 4)), 1, r"shape \(3, 4\); it must be square"),
        (np.ones(3), 1, "must be square"),
        (np.ones((0, 0)), 1, "must be square"),
        (np.triu(np.ones((3, 3))), 2, "not symmetric; pass W = A"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), 2, "indefinite: its smallest eigenvalue is -1"),
        (-np.eye(3), 2, "indefinite"),
        (np.full((2, 2), np.nan), 1, "not finite"),
        (np.diag([1.0, np.inf]), 1, "not finite"),
        (np.zeros((3, 3)), 2, "workload is zero"),
        (PrefixSums(5), 6, "bands=6 exceeds steps=5"),
        (PrefixSums(5), 0, "bands=0 is below 1"),
        (PrefixSums(5), -2, "bands=-2"),
    ],
    ids=str,
)
def test_bad_workloads_and_bands_are_refused_by_name(workload, bands: int, message: str) -> None:
    for family in ("auto", "banded", "toeplitz"):
        with pytest.raises(ValueError, match=message):
            mixing_matrix(workload, bands, family)


@pytest.mark.parametrize("bands", [2.0, "2", True, None])
def test_bands_must_be_a_whole_number(bands) -> None:
    with pytest.raises(TypeError, match="bands="):
        mixing_matrix(PrefixSums(5), bands)


@pytest.mark.parametrize("seconds", [0, -1.0, np.nan])
def test_time_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="max_seconds"):
        mixing_matrix(PrefixSums(5), 2, max_seconds=seconds)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(
        ValueError, match="family='circulant' is unknown; use one of auto, banded, toeplitz"
    ):
        mixing_matrix(PrefixSums(5), 2, "circulant")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefixSums(0), "steps=0"),
        (lambda: PrefixSums(3, 1.0), "momentum=1.0"),
        (lambda: PrefixSums(3, -0.1), "momentum=-0.1"),
        (lambda: prefix_sum_workload(3, 0.0, [0.1, 0.2]), "2 entries for steps=3"),
        (lambda: prefix_sum_workload(2, 0.0, [0.1, -0.2]), "learning_rates must be at least 0"),
        (lambda: prefix_sum_workload(2, 0.0, [0.0, 0.0]), "one of them positive"),
        (lambda: curvature_workload([], 0.1, 3), "eigenvalues must be a non-empty list"),
        (lambda: curvature_workload([1.0, np.nan], 0.1, 3), "finite numbers"),
        (lambda: curvature_workload([-1.0, 0.0], 0.1, 3), "no positive one"),
        (lambda: curvature_workload([1.0], 0.0, 3), "learning_rate"),
        (lambda: Curvature((1.0,), 0.1, 0), "steps=0"),
    ],
)
def test_bad_arguments_of_workloads_are_refused_by_name(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make", [lambda: PrefixSums(2.0), lambda: curvature_workload([1.0], 0.1, 3.0)]
)
def test_steps_must_be_a_whole_number(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="steps="):
        make()


def test_singular_matrices_are_workloads_and_a_little_asymmetry_is_rounding() -> None:
    rank_one = np.outer([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    load = DenseWorkload(rank_one)
    np.testing.assert_allclose(load.factor() @ load.factor().T, rank_one, atol=1e-12)
    w = prefix_sum_workload(8)
    w[0, 3] *= 1 + 1e-12
    assert mixing_matrix(w, 3).objective == pytest.approx(
        mixing_matrix(prefix_sum_workload(8), 3).objective, rel=1e-6
    )


# The loss after every step


@pytest.mark.parametrize("steps", [1, 7, 40])
@pytest.mark.parametrize(
    "eigenvalues", [(3.0, 1.0, 0.2, 0.01), (4.0, 1e-9), tuple(8 / np.arange(1, 400) ** 1.2)]
)
def test_the_horizon_all_is_the_mean_of_theorem_ones_workloads(
    steps: int, eigenvalues: tuple[float, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # clamped eigenvalues
        factor = Curvature(eigenvalues, 0.5, steps, horizon="all").factor()
        expected = np.zeros((steps, steps))
        for t in range(1, steps + 1):
            expected[:t, :t] += curvature_workload(eigenvalues, 0.5, t) / steps
    np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-5 * expected.max())


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_the_horizon_both_is_the_mean_of_the_other_two(steps: int, floor: float) -> None:
    eigenvalues = (3.0, 1.0, 0.2, 0.01)
    final, every, both = (
        factor @ factor.T
        for factor in (
            Curvature(eigenvalues, 0.5, steps, floor, horizon).factor() for horizon in HORIZONS
        )
    )
    np.testing.assert_allclose(both, (final + every) / 2, rtol=1e-9, atol=1e-12 * both.max())
    assert steps == 1 or np.abs(both - every).max() > 0.1 * every.max()


def test_without_curvature_the_horizon_all_is_prefix_sums() -> None:
    factor = Curvature((1e-10,), 0.5, 25, horizon="all").factor()
    found, sums = factor @ factor.T, prefix_sum_workload(25)
    np.testing.assert_allclose(found / found[0, 0], sums / sums[0, 0], atol=1e-7)


def test_counting_every_step_keeps_each_steps_noise_small() -> None:
    eigenvalues = tuple(8 / np.arange(1, 400) ** 1.2)
    final, every = (
        mixing_matrix(Curvature(eigenvalues, 0.2, 60, horizon=horizon), 8)
        for horizon in ("final", "all")
    )
    assert every.banded.largest_inverse_row() < 0.5 * final.banded.largest_inverse_row()
    assert every.relative_gap is not None and every.relative_gap < 1e-5
    with pytest.raises(ValueError, match="horizon='next'"):
        Curvature(eigenvalues, 0.2, 60, horizon="next")


@pytest.mark.parametrize("horizon", ["final", "all", "both"])
def test_merged_eigenvalues_give_the_same_workload(
    monkeypatch: pytest.MonkeyPatch, horizon: str
) -> None:
    mu = tuple(
        np.concatenate(
            [3 / np.arange(1.0, 3000.0), np.full(500, 1e-5), 1e-4 * np.arange(1.0, 300.0)]
        )
    )
    exact = Curvature(mu, 0.6, 40, horizon=horizon).factor()
    monkeypatch.setattr("quietgrad.noise.correlation.curvature.UNMERGED", 100)
    merged = Curvature(mu, 0.6, 40, horizon=horizon).factor()
    exact, merged = exact @ exact.T, merged @ merged.T
    np.testing.assert_allclose(merged, exact, rtol=0, atol=1e-7 * np.abs(exact).max())
    assert np.abs(merged - exact).max() > 0  # else nothing was merged


def test_a_spectrum_of_millions_is_merged() -> None:
    """A VGG's 1.2 million parameters: without merging the Gauss rule alone needs gigabytes and
    minutes.
    """
    mu = np.concatenate([3.0 / np.arange(1, 200) ** 1.2, np.geomspace(1e-2, 1e-6, 1_200_000)])
    found = Curvature(tuple(mu), 0.5, 300)
    nodes, weights = found._nodes()
    assert len(nodes) < 200
    assert weights.sum() == pytest.approx(mu.sum(), rel=1e-9)
