"""Matrices and plans of correlated noise that are refused, by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from correlated_runs import (
    PLAN_BANDS,
    PLAN_STEPS,
    SIGMA,
    STEPS,
    mixing,
    plan_of,
    releases,
    zero_sum,
)

from quietgrad.noise import GaussianNoise, MixingMatrix, PrefixSums, mixing_matrix
from quietgrad.noise.correlation.banded import BandedLower

# What is refused


def test_columns_longer_than_one_are_refused() -> None:
    # The sensitivity that is accounted for is a column's norm times the clipping norm.
    longer = mixing().columns.copy()
    longer[7] *= 1 + 1e-6
    with pytest.raises(ValueError, match=r"column of norm 1\.000001.*divide each by its norm"):
        GaussianNoise(SIGMA, BandedLower(longer))
    GaussianNoise(SIGMA, BandedLower(0.9 * mixing().columns))  # shorter ones only mean more noise


@pytest.mark.parametrize("where", [(0, 0), (3, 2), (STEPS - 1, 0)])
def test_a_matrix_with_another_entry_has_another_name(where: tuple[int, int]) -> None:
    # By its name alone a resume knows whether earlier rows are rows of the matrix that goes on.
    changed = mixing().columns.copy()
    changed[where] *= 0.5
    one, other = (GaussianNoise(SIGMA, BandedLower(c)) for c in (mixing().columns, changed))
    assert one.digest != other.digest
    assert one.digest == GaussianNoise(SIGMA, BandedLower(mixing().columns.copy())).digest


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


def test_a_plan_of_more_steps_than_its_matrix_has_rows_is_refused() -> None:
    plan = plan_of()
    short = replace(plan.noise, mixing=mixing(PLAN_STEPS - 1, PLAN_BANDS))
    with pytest.raises(ValueError, match=rf"{PLAN_STEPS - 1} rows for {PLAN_STEPS} steps"):
        replace(plan, noise=short)
