"""Ghost norms that wait for each other are those that each parameter has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quietgrad.clipping.norms.estimators import ghost
from quietgrad.clipping.norms.estimators.ghost import ghost_norms
from quietgrad.clipping.norms.estimators.several import together
from quietgrad.clipping.norms.estimators.several.together import Together
from quietgrad.clipping.norms.factors import DenseFactors
from quietgrad.clipping.norms.factors.direct import Side, SummedRows
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.norms.rounding import NormSums, least_of


def factors(b: int, t: int, p: int, d: int, right: Tensor | None = None) -> DenseFactors:
    return DenseFactors(
        torch.randn(b, 1, t, p), torch.randn(b, 1, t, d) if right is None else right
    )


def several(b: int, t: int) -> list[DenseFactors]:
    """Of several widths, three with one input."""
    shared = torch.randn(b, 1, t, 24)
    return [
        factors(b, t, 8, 24),
        *(factors(b, t, p, 24, shared) for p in (24, 24, 7)),
        factors(b, t, 1100, 24),
        factors(b, t, 24, 1100),
    ]


def sums_of(uses: list[DenseFactors], groups: list[int], dtype: torch.dtype) -> NormSums:
    sums = NormSums.empty(1 + max(groups), uses[0].sizes.b, torch.device("cpu"))
    some = Together(Scratch(), sums)
    for group, use in zip(groups, uses, strict=True):
        assert some.takes(use)
        some.add(group, 5, use, dtype)
    some.measure()
    some.measure()  # nothing is left
    return sums


def with_ones(use: DenseFactors, side: str | None) -> DenseFactors:
    """A column of ones beside one of the factors, formed."""

    def wider(x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones_like(x[..., :1])], dim=3)

    left, right = use.left_bgtp, use.right_bgtd
    if side == "right":
        return DenseFactors(left, wider(right))
    return DenseFactors(wider(left), right) if side == "left" else use


def assert_least_of_two(
    least: Tensor, terms: Tensor, use: DenseFactors, side: str | None, dtype: torch.dtype
) -> None:
    """As where a weight and its bias are measured apart: a longer text may part them."""
    weight = ghost_norms([use], dtype)
    rows = (use.left_bgtp if side == "right" else use.right_bgtd)[:, 0]
    of_bias = least_of(SummedRows(rows).spread()) if side else torch.zeros(len(rows))
    torch.testing.assert_close(
        least, torch.hypot(weight.least, of_bias.double()), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(terms, weight.terms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sides", [("right",), ("left",), ("right", None), ("left", "right", None)])
def test_a_bias_is_a_column_of_ones(sides: tuple[Side | None, ...], dtype: torch.dtype) -> None:
    """Beside others that have one, none, or one at the other factor; bounds hold, and are hardly
    larger.
    """
    torch.manual_seed(0)
    uses = several(3, 12) * 2
    ones = [sides[i % len(sides)] for i in range(len(uses))]
    sums = NormSums.empty(len(uses), 3, torch.device("cpu"))
    some = Together(Scratch(), sums)
    for group, (use, side) in enumerate(zip(uses, ones, strict=True)):
        some.add(group, 5, use, dtype, side)
    some.measure()
    for group, (use, side) in enumerate(zip(uses, ones, strict=True)):
        whole = with_ones(use, side)
        alone = ghost_norms([whole], dtype)
        exact = whole.left_bgtp[:, 0].double().mT @ whole.right_bgtd[:, 0].double()
        off = (exact.flatten(1).square().sum(1) - sums.squared[group]).abs()
        assert bool((off <= sums.slack[group]).all())
        for found, known in (
            (sums.slack[group], alone.slack),
            (sums.margin_squared[group], alone.margin**2),
        ):
            assert bool((found >= known * (1 - 1e-3)).all())
            assert bool((found <= known * 1.05).all())
        least, terms = sums.least_squared[group].sqrt(), sums.terms_squared[group].sqrt()
        assert_least_of_two(least, terms, use, side, dtype)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("t", [3, 120, 260, 512])
def test_a_bias_beside_a_long_text(t: int, side: Side) -> None:
    """Its Gram matrices do not wait, and may be formed by halves."""
    torch.manual_seed(0)
    use = factors(2, t, 600, 520)
    assert ghost.in_one_tile(use)
    found = ghost_norms([use], torch.float32, ones=side)
    whole = with_ones(use, side)
    alone = ghost_norms([whole], torch.float32)
    exact = whole.left_bgtp[:, 0].double().mT @ whole.right_bgtd[:, 0].double()
    off = (exact.flatten(1).square().sum(1) - found.squared).abs()
    assert bool((off <= found.slack).all()) and bool((off <= 1e-5 * found.squared).all())
    for name in ("slack", "margin"):
        known = getattr(alone, name)
        assert bool((getattr(found, name) >= known * (1 - 1e-3)).all()), name
        assert bool((getattr(found, name) <= known * 1.05).all()), name
    assert_least_of_two(found.least, found.terms, use, side, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [2, 31, 64, 90])
def test_the_same_norms_and_bounds_as_alone(t: int, dtype: torch.dtype) -> None:
    """Each parameter in a group of its own: squared norms alike but for their last digits, bounds
    no smaller, and hardly larger (the longest row of all that wait counts for each).
    """
    torch.manual_seed(0)
    uses = several(4, t) * 3
    sums = sums_of(uses, list(range(len(uses))), dtype)
    assert sums.entries == [5] * len(uses)
    for group, use in enumerate(uses):
        alone = ghost_norms([use], dtype)
        assert torch.allclose(sums.squared[group], alone.squared, rtol=1e-12, atol=0)
        for found, known in (
            (sums.slack[group], alone.slack),
            (sums.margin_squared[group], alone.margin**2),
        ):
            assert bool((found >= known * (1 - 1e-6)).all())
            assert bool((found <= known * 1.01).all())


def test_groups_get_their_own_and_parameters_add_up() -> None:
    torch.manual_seed(0)
    uses = several(3, 5)
    sums = sums_of(uses, [0, 1, 0, 1, 0, 1], torch.float32)
    for group in (0, 1):
        alone = sum(ghost_norms([use], torch.float32).squared for use in uses[group::2])
        assert torch.allclose(sums.squared[group], alone, rtol=1e-12, atol=0)


def test_micro_batches_of_other_sizes_do_not_meet() -> None:
    """Lengths that change in the middle are measured before."""
    torch.manual_seed(0)
    uses = [factors(3, 4, 8, 6), factors(3, 9, 8, 6), factors(3, 4, 8, 6)]
    sums = sums_of(uses, [0, 1, 2], torch.float32)
    for group, use in enumerate(uses):
        assert torch.equal(sums.squared[group], ghost_norms([use], torch.float32).squared)


def test_an_input_that_was_written_into_is_not_taken_for_the_one_before() -> None:
    torch.manual_seed(0)
    first = factors(2, 3, 4, 5)
    sums = NormSums.empty(2, 2, torch.device("cpu"))
    some = Together(Scratch(), sums)
    some.add(0, 1, first, torch.float32)
    before = ghost_norms([first], torch.float32).squared
    first.right_bgtd.mul_(3.0)
    some.add(1, 1, first, torch.float32)
    some.measure()
    assert torch.allclose(sums.squared[0], before)
    assert torch.allclose(sums.squared[1], 9 * before)


def test_long_texts_maps_in_groups_and_single_positions_do_not_wait() -> None:
    some = Together(Scratch(), NormSums.empty(1, 2, torch.device("cpu")))
    assert some.takes(factors(2, 90, 3, 3)) and together.ENTRIES < 2 * 91**2
    assert not some.takes(factors(2, 91, 3, 3))
    assert not some.takes(factors(2, 1, 3, 3))
    assert not some.takes(DenseFactors(torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 3)))


@pytest.mark.parametrize("with_bias_first", [True, False])
def test_layers_of_one_shape_keep_bounds_of_their_own(with_bias_first: bool) -> None:
    """A column of ones is one product more, whose rounding a layer without a bias does not have."""
    torch.manual_seed(0)
    kinds: list[tuple[DenseFactors, Side | None]] = [
        (factors(3, 6, 5, 4), "right"),
        (factors(3, 6, 5, 4), None),
    ]

    def slack_of(some: list[tuple[DenseFactors, Side | None]]) -> Tensor:
        sums = NormSums.empty(1, 3, torch.device("cpu"))
        waiting = Together(Scratch(), sums)
        for use, ones in some:
            waiting.add(0, 5, use, torch.float32, ones)
        waiting.measure()
        return sums.slack

    both = slack_of(kinds if with_bias_first else kinds[::-1])
    apart = sum(slack_of([one]) for one in kinds)
    torch.testing.assert_close(both, apart, rtol=1e-9, atol=0.0)
