"""Noise by given Toeplitz coefficients: the matrix by hand, the noise's covariance, what it costs,
and the way there from a file.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from correlated_runs import CONFIG, RECORDS, of_run, rejected, rows_of
from hypothesis import assume, given
from hypothesis import strategies as st

from quietgrad.noise import BandedNoise, IndependentNoise
from quietgrad.noise.toeplitz import ToeplitzNoise
from quietgrad.training.settings.config import load_config

COEFFICIENTS = (2.0, 1.0, 0.75, -0.25)


def by_hand(coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    matrix = np.zeros((steps, steps))
    for lag, value in enumerate(coefficients):
        matrix += np.diag(np.full(steps - lag, value), -lag)
    return matrix / np.linalg.norm(matrix, axis=0)


@given(
    st.lists(st.floats(-0.9, 0.9), max_size=4).map(lambda rest: (1.0, *rest)),
    st.integers(5, 12),
    st.floats(1e-3, 1e3),
)
def test_matrix_and_objective_are_those_by_hand(
    coefficients: tuple[float, ...], steps: int, scale: float
) -> None:
    inverse = np.linalg.inv(by_hand(coefficients, steps))
    assume(np.linalg.norm(inverse, axis=1).max() < 999)
    given_ones = tuple(c * scale for c in coefficients)
    mixing, _ = ToeplitzNoise(given_ones).correlation(steps, 0.1, None)
    if len(coefficients) == 1:
        assert mixing is None
        return
    matrix = by_hand(coefficients, steps)
    np.testing.assert_allclose(mixing.matrix, matrix, rtol=1e-12, atol=1e-14)
    errors = np.tril(np.ones((steps, steps))) @ np.linalg.inv(matrix)
    assert mixing.objective == pytest.approx((errors**2).sum(), rel=1e-8)
    assert mixing.independent == pytest.approx(steps * (steps + 1) / 2)


def test_a_runs_noise_has_the_matrixs_covariance() -> None:
    plan = replace(CONFIG, noise=ToeplitzNoise(COEFFICIENTS)).build(RECORDS)
    rows = rows_of(of_run(plan.start(), 12, 20_000))
    assert not rejected(rows, by_hand(COEFFICIENTS, 12))
    assert rejected(rows, by_hand(COEFFICIENTS[:3], 12))
    assert rejected(rows, by_hand(COEFFICIENTS, 12).T)


def test_it_costs_what_any_matrix_of_so_many_bands_costs() -> None:
    plan = replace(CONFIG, noise=ToeplitzNoise(COEFFICIENTS)).build(RECORDS)
    banded = replace(CONFIG, noise=BandedNoise(4)).build(RECORDS)
    alone = replace(CONFIG, noise=IndependentNoise()).build(RECORDS)
    assert plan.epsilon == banded.epsilon
    assert plan.epsilon > alone.epsilon


def test_good_coefficients_are_near_the_best_matrix() -> None:
    mixing, _ = ToeplitzNoise((1.0, 0.5, 0.375, 0.3125)).correlation(64, 0.1, None)
    best, _ = BandedNoise(4).correlation(64, 0.1, None)
    assert best.objective < mixing.objective < 1.1 * best.objective < 0.4 * mixing.independent


def test_a_file_reads_back(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[noise]\nmethod = 'toeplitz'\ncoefficients = [1, 0.5]\n")
    config = load_config(path)
    assert config.noise == ToeplitzNoise((1.0, 0.5))
    path.write_text(config.to_toml())
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("coefficients", "said"),
    [
        ((), "coefficients is missing"),
        ((0.0, 1.0), "must be finite, the first of them above 0"),
        ((1.0, float("nan")), "must be finite"),
        (("a",), "coefficients"),
    ],
)
def test_bad_coefficients_are_refused(coefficients, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ToeplitzNoise(coefficients)


def test_numbers_of_numpy_are_numbers() -> None:
    wanted = ToeplitzNoise((1.0, 0.5))
    assert ToeplitzNoise(np.array([1.0, 0.5])) == wanted  # type: ignore[arg-type]
    assert ToeplitzNoise([np.float32(1), np.float32(0.5)]) == wanted  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)coefficients=.* must be a list"):
        ToeplitzNoise(np.eye(2))  # type: ignore[arg-type]


def test_what_it_is_for_is_said() -> None:
    mixing, _ = ToeplitzNoise((1.0, 0.5)).correlation(8, 0.1, None)
    assert mixing.workload == "given coefficients (error: prefix sums)"


def test_more_coefficients_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="coefficients are 13 for steps=12"):
        replace(CONFIG, noise=ToeplitzNoise((1.0,) * 13)).build(RECORDS)


def test_coefficients_whose_inverse_grows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"coefficients=\[1.0, 2.0\]"):
        replace(CONFIG, steps=12, noise=ToeplitzNoise((1.0, 2.0))).build(RECORDS)
    with pytest.raises(
        ValueError, match=r"coefficients=\[1.0, -3.0\] amplify .* such as \[1, 0.5, 0.375\]"
    ):
        replace(CONFIG, steps=400, noise=ToeplitzNoise((1.0, -3.0))).build(RECORDS)
