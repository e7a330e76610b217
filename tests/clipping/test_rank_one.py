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
from quietgrad.clipping.norms.factors.direct import Side
from quietgrad.clipping.norms.rounding import NormSums, least_of

SIDES: tuple[Side | None, ...] = (None, "right", "left")


def factors(b: int, p: int, d: int, left: float = 1.0, right: float = 1.0) -> DenseFactors:
    return DenseFactors(torch.randn(b, 1, 1, p) * left, torch.randn(b, 1, 1, d) * right)


def measured(
    uses: list[DenseFactors], ones: list[Side | None], groups: list[int], dtype: torch.dtype
) -> NormSums:
    sums = NormSums.empty(1 + max(groups), uses[0].sizes.b, torch.device("cpu"))
    some = RankOne(sums)
    for use, side, group in zip(uses, ones, groups, strict=True):
        assert some.takes(use)
        some.add(group, 7, use, dtype, side)
    some.measure()
    some.measure()  # nothing is left
    return sums


def exact(use: DenseFactors, side: Side | None) -> Tensor:
    """[b] squared norms of weight and bias, in float64, entry by entry."""
    left, right = use.left_bgtp[:, 0].double(), use.right_bgtd[:, 0].double()
    weight = (left.mT @ right).flatten(1).square().sum(1)
    rows = {None: torch.zeros_like(left), "right": left, "left": right}[side]
    return weight + rows.flatten(1).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("one_group", [False, True])
def test_norms_and_bounds_are_those_of_each_alone(one_group: bool, dtype: torch.dtype) -> None:
    """Of several widths, with and without a bias; least divisors are those of weight and bias
    apart, which a longer record may part.
    """
    torch.manual_seed(0)
    widths = [(8, 24), (24, 8), (1, 1), (3, 5000), (2000, 7)]
    uses = [factors(4, *width) for width in widths for _ in SIDES]
    ones = list(SIDES) * len(widths)
    groups = [0] * len(uses) if one_group else list(range(len(uses)))
    sums = measured(uses, ones, groups, dtype)
    each = [exact(use, side) for use, side in zip(uses, ones, strict=True)]
    if one_group:
        torch.testing.assert_close(sums.squared[0], sum(each), rtol=1e-6, atol=0)
        assert sums.entries == [7 * len(uses)]
        return
    assert sums.entries == [7] * len(uses)
    for group, (use, side, right) in enumerate(zip(uses, ones, each, strict=True)):
        torch.testing.assert_close(sums.squared[group], right, rtol=1e-6, atol=0)
        assert bool((right <= sums.squared[group] + sums.slack[group]).all())
        assert bool((sums.slack[group] <= 1e-3 * right).all())
        alone = ghost_norms([use], dtype)
        rows = {None: torch.zeros(4), "right": use.left_bgtp, "left": use.right_bgtd}[side]
        bias = least_of(torch.linalg.vector_norm(rows.reshape(4, -1).double(), dim=1))
        least = sums.least_squared[group].sqrt()
        torch.testing.assert_close(least, torch.hypot(alone.least, bias), rtol=2e-3, atol=0)
        torch.testing.assert_close(sums.terms_squared[group].sqrt(), alone.terms, rtol=2e-3, atol=0)
        margin = sums.margin_squared[group].sqrt()
        assert bool((margin >= alone.margin * (1 - 2e-3)).all())
        assert bool((margin <= alone.margin * 1.01).all())


@given(
    left=st.integers(-45, 18), right=st.integers(-45, 18), side=st.sampled_from(SIDES),
    width=st.sampled_from([1, 3, 600]),
)  # fmt: skip
def test_no_norm_is_too_small_where_squares_are_flushed_or_large(
    left: int, right: int, side: Side | None, width: int
) -> None:
    """Denormals among them. An infinite bound is one, too: such a record adds zero."""
    torch.manual_seed(width)
    use = factors(3, width, 4, 10.0**left, 10.0**right)
    sums = measured([use], [side], [0], torch.float32)
    bound = sums.squared[0] + sums.slack[0]
    assert bool((bound >= exact(use, side)).all())


def test_half_precision_is_widened_first() -> None:
    torch.manual_seed(0)
    use = factors(5, 12, 9)
    half = DenseFactors(use.left_bgtp.bfloat16(), use.right_bgtd.bfloat16())
    found = measured([half], ["right"], [0], torch.float32).squared[0]
    torch.testing.assert_close(found, exact(half, "right"), rtol=1e-6, atol=0)


def test_what_has_positions_or_blocks_is_measured_elsewhere() -> None:
    some = RankOne(NormSums.empty(1, 2, torch.device("cpu")))
    assert not some.takes(DenseFactors(torch.randn(2, 1, 2, 3), torch.randn(2, 1, 2, 3)))
    assert not some.takes(DenseFactors(torch.randn(2, 2, 1, 3), torch.randn(2, 2, 1, 3)))
