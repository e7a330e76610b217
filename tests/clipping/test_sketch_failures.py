"""How often a bound on a sketch's rounding may fail: so seldom that no delta has to count it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats

from quietgrad.accounting.spending import SMALLEST_TAIL
from quietgrad.clipping.norms.estimators.sketches import (
    LOG_FAILURE,
    position_gamma,
    tail_margin,
    worst_mean,
)
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.factors.sums.columns import Sums
from quietgrad.clipping.norms.rounding import gamma

# Columns, positions and underflow, of both sketches of Hutch++.
BOUNDS = 6


def test_all_failures_of_a_long_run_are_below_what_any_delta_resolves() -> None:
    """Before: 1e-12 a bound, 1.2e-5 in all for 200 matrices and 10^4 releases."""
    releases, layers, blocks = 10**4, 200, 32
    assert BOUNDS * releases * layers * blocks * math.exp(-LOG_FAILURE) < SMALLEST_TAIL
    assert BOUNDS * releases * layers * 1e-12 > 1e-5


@pytest.mark.parametrize("k", [2, 4, 8, 32, 256])
def test_a_weighted_mean_s_bound_is_the_expected_shortfall_at_that_level(k: int) -> None:
    """By quadrature of chi(k) / sqrt(k) beyond its quantile."""
    level = math.exp(-LOG_FAILURE)
    quantile = float(stats.chi.isf(level, k))

    def beyond(x: float) -> float:
        return (quantile + x) * math.exp(float(stats.chi.logpdf(quantile + x, k)) + LOG_FAILURE)

    found = sum(
        integrate.quad(beyond, *ends, epsabs=0, epsrel=1e-10)[0]
        for ends in ((0.0, 1.0), (1.0, 6.0))
    ) / math.sqrt(k)
    assert found <= worst_mean(k) <= 1.002 * found


@pytest.mark.parametrize(
    "sums", [Sums(1, 1, 1), Sums(64, 64, 1), Sums(768, 64, 12), Sums(4096, 64, 64, paired=True)]
)
@pytest.mark.parametrize("k", [2, 8, 32])
def test_a_row_whose_first_entry_is_all_of_it_exceeds_the_bound_as_seldom(
    k: int, sums: Sums
) -> None:
    """What is added up is (c + v + 1) |P_1| then, v the additions of sums that hold that entry, P_1
    a row of the projection: chi(k) / sqrt(k), whose quantile is known.
    """
    one = torch.ones(1, 1, 1, 1)
    uses, like, dtype = [DenseFactors(one, one)], one, torch.float32
    positions = worst_mean(k) * position_gamma(uses, like, dtype)
    columns = float(tail_margin(uses, sums, k, like, dtype)) - positions
    quantile = float(stats.chi.isf(math.exp(-LOG_FAILURE), k)) / math.sqrt(k)
    across = 6 if sums.paired else sums.stretches
    assert columns >= gamma((sums.within + across + 1) * quantile, like, dtype)
