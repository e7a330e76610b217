"""Factors and banded arithmetic against the dense ones; the Toeplitz family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixing_cases import DECAYING, RATE, WORKLOADS, dense_objective, optimum, random_banded

from quietgrad.noise import (
    Curvature,
    PrefixSums,
    mixing_matrix,
    prefix_sum_workload,
)
from quietgrad.noise.correlation.banded import (
    BandedLower,
    band_of_product,
    columns_of,
    inside,
    reversed_cholesky,
)
from quietgrad.noise.correlation.mixing import load_mixing, save_mixing
from quietgrad.noise.correlation.solver import unit_columns

# Factors and banded arithmetic


@given(steps=st.integers(1, 40), bands=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_reversed_cholesky_factors_the_gram_matrix_and_keeps_the_band(
    steps: int, bands: int, seed: int
) -> None:
    bands = min(bands, steps)
    right = random_banded(steps, bands, seed).dense()
    x = right.T @ right
    found = reversed_cholesky(x)
    np.testing.assert_allclose(found.T @ found, x, rtol=0, atol=1e-12)
    assert np.array_equal(found, np.tril(found))
    np.testing.assert_allclose(np.tril(found, -bands), 0, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        found, right, rtol=0, atol=1e-9
    )  # there is only one with a positive diagonal


@pytest.mark.parametrize("workload", WORKLOADS)
def test_plain_cholesky_is_not_the_factor_that_is_wanted(workload: str) -> None:
    c = optimum(16, 4, workload).matrix
    x = c.T @ c
    plain = np.linalg.cholesky(x)
    np.testing.assert_allclose(plain @ plain.T, x, atol=1e-12)
    assert np.abs(plain.T @ plain - x).max() > 1e-2
    np.testing.assert_allclose(reversed_cholesky(x), c, atol=1e-8)


def test_an_indefinite_gram_matrix_is_refused() -> None:
    for x in (np.array([[1.0, 2.0], [2.0, 1.0]]), -np.eye(3), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="not positive definite"):
            reversed_cholesky(x)


@pytest.mark.parametrize(
    ("steps", "bands"),
    [(1, 1), (5, 3), (31, 1), (32, 4), (33, 4), (64, 33), (65, 32), (97, 40), (50, 50), (100, 2)],
)
def test_banded_arithmetic_is_the_dense_one(steps: int, bands: int) -> None:
    # Blocks have max(bands, 32) rows: sizes below, at and off its multiples.
    mixing = random_banded(steps, bands, steps)
    dense = np.zeros((steps, steps))
    for j in range(steps):
        for m in range(min(bands, steps - j)):
            dense[j + m, j] = mixing.columns[j, m]
    right = np.random.default_rng(1).standard_normal((steps, 3))
    np.testing.assert_array_equal(mixing.dense(), dense)
    np.testing.assert_array_equal(columns_of(dense, bands), mixing.columns * inside(steps, bands))
    np.testing.assert_allclose(
        mixing.solve(right), np.linalg.solve(dense, right), rtol=0, atol=1e-11
    )
    np.testing.assert_allclose(
        mixing.solve_transposed(right), np.linalg.solve(dense.T, right), rtol=0, atol=1e-11
    )
    np.testing.assert_allclose(
        mixing.gram_band(), columns_of(dense.T @ dense, bands), rtol=0, atol=1e-13
    )
    other = np.random.default_rng(2).standard_normal((steps, 3))
    np.testing.assert_allclose(
        band_of_product(right, other, bands), columns_of(right @ other.T, bands), rtol=0, atol=1e-13
    )
    for t in range(steps):
        np.testing.assert_array_equal(mixing.row(t), dense[t, t::-1][:bands])


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize(("steps", "bands"), [(1, 1), (33, 4), (70, 40)])
def test_largest_inverse_row_is_the_dense_one(steps: int, bands: int, chunk: int) -> None:
    mixing = random_banded(steps, bands, 3)
    expected = np.linalg.norm(np.linalg.inv(mixing.dense()), axis=1).max()
    assert mixing.largest_inverse_row(chunk) == pytest.approx(expected, rel=1e-10)


def test_a_matrix_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    for found in (optimum(16, 4, "prefix sums"), mixing_matrix(PrefixSums(30), 3, "toeplitz")):
        save_mixing(found, tmp_path / "mixing.npz")
        again = load_mixing(tmp_path / "mixing.npz")
        assert np.array_equal(again.banded.columns, found.banded.columns)
        assert replace(again, banded=found.banded) == found
    assert [path.name for path in tmp_path.iterdir()] == ["mixing.npz"]
    (tmp_path / "torn.npz").write_bytes((tmp_path / "mixing.npz").read_bytes()[:200])
    np.savez(tmp_path / "other.npz", weights=np.ones(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "mixing.npz").read_bytes()[:-100])
    for name in ("missing.npz", "other.npz", "torn.npz", "cut.npz"):
        with pytest.raises(ValueError, match=f"mixing=.*{name}' is no mixing matrix"):
            load_mixing(tmp_path / name)


def test_unit_columns_keep_the_shape_of_every_column() -> None:
    raw = np.random.default_rng(0).uniform(0.1, 1, (30, 5))
    found = unit_columns(raw)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-14)
    assert not found[~inside(30, 5)].any()
    np.testing.assert_allclose(found * (raw[:, :1] / found[:, :1]), raw * inside(30, 5), atol=1e-12)


def test_unit_columns_keep_the_gram_matrix_where_a_diagonal_entry_is_negative() -> None:
    raw = random_banded(12, 4, 0).columns.copy()
    raw[3] *= -1.0
    dense = BandedLower(raw).dense()
    found = BandedLower(unit_columns(raw)).dense()
    assert (np.diagonal(found) > 0).all()
    np.testing.assert_allclose(found.T @ found, dense.T @ dense, atol=1e-12)


# The Toeplitz family


@pytest.mark.grid(6, "workloads, sizes and bands between the extremes")
@pytest.mark.parametrize(
    "workload",
    [
        PrefixSums(50),
        PrefixSums(50, 0.9),
        Curvature(DECAYING, RATE, 50),
        Curvature(DECAYING, RATE, 50, horizon="all"),
        Curvature(DECAYING, RATE, 50, floor=0.1, horizon="both"),
    ],
    ids=["prefix sums", "momentum", "curvature", "every step", "both"],
)
@pytest.mark.parametrize("bands", [1, 2, 7, 50])
def test_toeplitz_reports_the_dense_objective_and_has_alike_columns(workload, bands: int) -> None:
    found = mixing_matrix(workload, bands, "toeplitz")
    assert found.family == "toeplitz" and found.relative_gap is None
    w = workload.factor() @ workload.factor().T
    assert found.objective == pytest.approx(dense_objective(found.matrix, w), rel=1e-8)
    assert found.independent == pytest.approx(np.trace(w), rel=1e-10)
    assert found.objective <= found.independent * (1 + 1e-12)
    columns = found.banded.columns
    np.testing.assert_allclose(np.linalg.norm(columns, axis=1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        columns[: 51 - bands], np.tile(columns[0], (51 - bands, 1)), rtol=0, atol=1e-13
    )
    for j in range(51 - bands, 50):  # cut at the last step: the same up to a factor
        np.testing.assert_allclose(
            columns[j, : 50 - j] / columns[j, 0], columns[0, : 50 - j] / columns[0, 0], atol=1e-12
        )
    best = mixing_matrix(workload, bands, "banded", max_seconds=0.2)
    assert best.objective <= found.objective * (1 + 1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_toeplitz_prefix_sums_are_near_the_best_toeplitz_matrix(momentum: float) -> None:
    # They are optimised as if no column was cut; the dense workload takes the descent that counts
    # cut columns.
    light = mixing_matrix(PrefixSums(200, momentum), 8, "toeplitz").objective
    exact = mixing_matrix(prefix_sum_workload(200, momentum), 8, "toeplitz").objective
    assert exact * (1 - 1e-6) <= light < 1.02 * exact


def test_toeplitz_of_many_steps_needs_no_dense_matrix() -> None:
    # A dense [T, T] would take 3.2 GB.
    steps, bands = 20_000, 16
    found = mixing_matrix(PrefixSums(steps), bands)
    assert found.family == "toeplitz"
    np.testing.assert_allclose(np.linalg.norm(found.banded.columns, axis=1), 1, rtol=0, atol=1e-12)
    assert found.independent == pytest.approx(steps * (steps + 1) / 2, rel=1e-12)
    # tr(W X^-1) = |A C^-1|^2; the squared norms of its columns fall smoothly to the last, so every
    # hundredth stands for its neighbours.
    middles = np.arange(50, steps, 100)
    unit = np.zeros((steps, len(middles)))
    unit[middles, np.arange(len(middles))] = 1.0
    sampled = 100 * np.square(np.cumsum(found.banded.solve(unit), axis=0)).sum()
    assert found.objective == pytest.approx(sampled, rel=1e-3)
    assert found.objective < 0.1 * found.independent


def test_toeplitz_refuses_a_schedule() -> None:
    with pytest.raises(ValueError, match=r"family='toeplitz'.*schedule.*family='banded'"):
        mixing_matrix(PrefixSums(3, 0.0, (0.3, 0.2, 0.1)), 2, "toeplitz")
