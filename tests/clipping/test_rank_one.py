"""Norms of rank-one gradients, which are made for many parameters at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quietgrad.clipping.norms.estimators.ghost import ghost_norms
from quietgrad.clipping.norms.estimators.several.rank_one import RankOne
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.rounding import NormSums


def factors(b: int, p: int, d: int, left: float = 1.0, right: float = 1.0) -> DenseFactors:
    return DenseFactors(torch.randn(b, 1, 1, p) * left, torch.randn(b, 1, 1, d) * right)


def measured(uses: list[DenseFactors], groups: list[int], dtype: torch.dtype) -> NormSums:
    sums = NormSums.empty(1 + max(groups), uses[0].sizes.b, torch.device("cpu"))
    some = RankOne(sums)
    for use, group in zip(uses, groups, strict=True):
        assert some.takes(use)
        some.add(group, 7, use, dtype)
    some.measure()
    some.measure()  # nothing is left
    return sums


def exact(use: DenseFactors) -> Tensor:
    """[b] squared norms in float64, entry by entry."""
    left, right = use.left_bgtp[:, 0].double(), use.right_bgtd[:, 0].double()
    return (left.mT @ right).flatten(1).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("one_group", [False, True])
def test_norms_and_bounds_are_those_of_each_alone(one_group: bool, dtype: torch.dtype) -> None:
    """Of several widths."""
    torch.manual_seed(0)
    uses = [factors(4, *width) for width in [(8, 24), (24, 8), (1, 1), (3, 5000), (2000, 7)]]
    groups = [0] * len(uses) if one_group else list(range(len(uses)))
    sums = measured(uses, groups, dtype)
    if one_group:
        torch.testing.assert_close(sums.squared[0], sum(map(exact, uses)), rtol=1e-6, atol=0)
        assert sums.entries == [7 * len(uses)]
        return
    assert sums.entries == [7] * len(uses)
    for group, use in enumerate(uses):
        right, alone = exact(use), ghost_norms([use], dtype)
        torch.testing.assert_close(sums.squared[group], right, rtol=1e-6, atol=0)
        assert bool((right <= sums.squared[group] + sums.slack[group]).all())
        assert bool((sums.slack[group] <= 1e-3 * right).all())
        for found, known in (
            (sums.least_squared[group], alone.least),
            (sums.terms_squared[group], alone.terms),
            (sums.margin_squared[group], alone.margin),
        ):
            torch.testing.assert_close(found.sqrt(), known, rtol=2e-3, atol=0)


@given(
    left=st.integers(-45, 18), right=st.integers(-45, 18), width=st.sampled_from([1, 3, 600])
)  # fmt: skip
def test_no_norm_is_too_small_where_squares_are_flushed_or_large(
    left: int, right: int, width: int
) -> None:
    """Denormals among them. What is infinite, or no number (beside a row of zeros), is no norm that
    divides: such a record is measured alone, or adds zero.
    """
    torch.manual_seed(width)
    use = factors(3, width, 4, 10.0**left, 10.0**right)
    sums = measured([use], [0], torch.float32)
    bound = sums.squared[0] + sums.slack[0]
    assert not bool((bound < exact(use)).any())


def test_half_precision_is_widened_first() -> None:
    torch.manual_seed(0)
    use = factors(5, 12, 9)
    half = DenseFactors(use.left_bgtp.bfloat16(), use.right_bgtd.bfloat16())
    found = measured([half], [0], torch.float32).squared[0]
    torch.testing.assert_close(found, exact(half), rtol=1e-6, atol=0)


def test_what_has_positions_or_blocks_is_measured_elsewhere() -> None:
    some = RankOne(NormSums.empty(1, 2, torch.device("cpu")))
    assert not some.takes(DenseFactors(torch.randn(2, 1, 2, 3), torch.randn(2, 1, 2, 3)))
    assert not some.takes(DenseFactors(torch.randn(2, 2, 1, 3), torch.randn(2, 2, 1, 3)))
